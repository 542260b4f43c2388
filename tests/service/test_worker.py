"""The queue before the model: order, batches, refusals, deadlines."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.reranking import Query
from radical_rerank.service.backend import Rerankers
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import RankJob, RankWork, RankWorker
from tests.service.helpers import Slow


def worker_of(slow: Slow, **options: Any) -> RankWorker:
    options = {"places": 8, "patience": 100.0, "max_batch": 4, "prepare": lambda: slow.seconds, **options}
    worker = RankWorker(slow, **options)
    worker.start()
    return worker


async def asked(
    worker: RankWorker,
    text: str,
    deadline: float = 10.0,
    kind: tuple[str, float] = ("a", 1),
    images: list[Image.Image] | None = None,
) -> str:
    work = RankWork(Query(text), images or [], kind, time.monotonic() + deadline)
    with worker.admitted(work.heavy):
        loop = asyncio.get_running_loop()
        job = RankJob(work, loop, loop.create_future())
        worker.submit(job)
        try:
            ranking = await job.future
        finally:
            worker.forget(job)
        return str(ranking[0].document)


def test_one_thread_loads_and_ranks() -> None:
    """Two OpenMP pools on the same cores would make each ranking 50% slower."""
    threads = []

    class Noted(Slow):
        def rank_many(self, lists: Any, batch_size: int, stop: Any = None) -> Any:
            threads.append(threading.current_thread())
            return super().rank_many(lists, batch_size)

    def prepare() -> float:
        threads.append(threading.current_thread())
        return 0.1

    worker = worker_of(Noted(0.0), prepare=prepare)
    assert worker.seconds == 0.1
    asyncio.run(asked(worker, "a"))
    worker.stop()
    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()

    def fail() -> float:
        raise InputError("no such model")

    with pytest.raises(InputError, match="no such model"):
        worker_of(Slow(0.0), prepare=fail)


def test_each_request_gets_its_own_ranking_and_lists_of_a_kind_run_together() -> None:
    slow = Slow(0.02)
    worker = worker_of(slow)

    async def all_of() -> list[Any]:
        jobs = [asked(worker, f"{'bad ' * (i == 3)}{i}", kind=("ab"[i % 2], 1)) for i in range(8)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(all_of())
    assert isinstance(results[3], ServiceError)
    assert results[3].status == 422
    assert [r for i, r in enumerate(results) if i != 3] == ["0", "1", "2", "4", "5", "6", "7"]
    assert max(map(len, slow.batches)) > 1
    assert all(len({int(text.split()[-1]) % 2 for text in batch}) == 1 for batch in slow.batches)
    worker.stop(5)
    assert not worker.alive


def test_a_full_queue_refuses_immediately() -> None:
    worker = worker_of(Slow(0.3), places=2, max_batch=1)

    async def three() -> list[Any]:
        jobs = [asyncio.create_task(asked(worker, str(i))) for i in range(2)]
        await asyncio.sleep(0.05)
        start = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            await asked(worker, "2")
        assert time.monotonic() - start < 0.1
        assert caught.value.status == 429
        assert int(caught.value.headers["Retry-After"]) >= 1
        return await asyncio.gather(*jobs)

    assert asyncio.run(three()) == ["0", "1"]
    worker.stop(5)


def test_heavy_requests_never_keep_light_ones_out() -> None:
    worker = worker_of(Slow(0.2), patience=0.5, max_batch=4)
    large = [Image.new("L", (4000, 4000))]

    async def both() -> list[Any]:
        heavy = asyncio.create_task(asked(worker, "heavy", images=large))
        await asyncio.sleep(0.02)
        with pytest.raises(ServiceError):  # another heavy one would wait for the first
            await asked(worker, "heavy too", images=large)
        light = asyncio.create_task(asked(worker, "light"))
        await asyncio.sleep(0.02)
        for images in ([], large):  # both would wait for the light one
            with pytest.raises(ServiceError):
                await asked(worker, "late", images=images)
        return list(await asyncio.gather(heavy, light))

    assert asyncio.run(both()) == ["heavy", "light"]
    worker.stop(5)


def test_patience_limits_the_wait() -> None:
    worker = worker_of(Slow(0.3), patience=0.5, max_batch=1)

    async def later() -> list[str]:
        first = asyncio.create_task(asked(worker, "first"))
        await asyncio.sleep(0.05)
        with pytest.raises(ServiceError):  # 0.25 s to wait, more than half of 0.3
            await asked(worker, "early")
        await asyncio.sleep(0.15)
        second = asyncio.create_task(asked(worker, "second"))
        return list(await asyncio.gather(first, second))

    assert asyncio.run(later()) == ["first", "second"]
    worker.stop(5)


def test_a_deadline_can_pass_in_the_queue_and_a_disconnected_client_frees_its_place() -> None:
    slow = Slow(0.2)
    worker = worker_of(slow, max_batch=1)

    async def run() -> None:
        first = asyncio.create_task(asked(worker, "first"))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(asked(worker, "late", deadline=0.05))
        gone = asyncio.create_task(asked(worker, "gone"))
        await asyncio.sleep(0.01)
        assert worker.in_flight == 3
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert worker.in_flight == 2
        with pytest.raises(ServiceError) as caught:
            await late
        assert caught.value.status == 504
        assert await first == "first"

    asyncio.run(run())
    assert [text for batch in slow.batches for text in batch] == ["first"]
    worker.stop(5)


def test_stopping_finishes_requests_in_flight() -> None:
    worker = worker_of(Slow(0.1), max_batch=1)

    async def run() -> list[Any]:
        jobs = [asyncio.create_task(asked(worker, str(i))) for i in range(3)]
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(asyncio.to_thread(worker.stop, 5))
        await asyncio.sleep(0.02)
        with pytest.raises(ServiceError) as caught:
            await asked(worker, "late")
        assert caught.value.status == 503
        await stopping
        return await asyncio.gather(*jobs)

    assert asyncio.run(run()) == ["0", "1", "2"]


def test_the_settings_say_how_a_trained_reranker_is_asked(backbone: Backbone) -> None:
    assert (Settings().preset, Settings().scorer) == ("auto", None)
    rerankers = Rerankers(backbone, preset="qwen3-vl-reranker", scorer=None)
    reranker = rerankers("dense", 1.0)
    assert (reranker.scorer, reranker.max_image_tokens) == ("pointwise", 1800)
    assert Rerankers(backbone, preset="none", scorer="generate")("dense", 1.0).scorer == "generate"
