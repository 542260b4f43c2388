"""The worst that one client can send, and its effect on others. `radical bench attacks` measures more."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")

import httpx
from pydantic import ValidationError

from radical_rerank import Query, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.cli import main
from radical_rerank.lab.bench.attacks import HOST, Peak, all_attacks, children, host_known, hostile_host
from radical_rerank.lab.bench.payloads import brackets, many_scans, numbers, picture, polyglot, request
from radical_rerank.lab.bench.service import listening, resident
from radical_rerank.reranking import Ranking
from radical_rerank.service.documents import MAX_SCANS, Limits
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.fetch import SafeFetcher, is_public
from radical_rerank.service.intake import Intake, Memory
from radical_rerank.service.readers import Readers, ReadTask
from radical_rerank.service.reading import Incoming, Reading
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import RankJob, RankWork, RankWorker
from tests.service.helpers import PICTURES, QUERY, body, serving, uri

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with hostile_host() as port, host_known():
        yield port


@pytest.fixture(scope="module")
def url(embedded: Backbone, port: int) -> Iterator[str]:
    with listening(
        embedded, patience=100.0, allowed_hosts=[HOST], fetch_timeout=2.0, max_query_tokens=64
    ) as url:
        yield url


@pytest.fixture(scope="module")
def normal(url: str) -> float:
    """Seconds of a good request when nothing else happens."""
    return max(good(url) for _ in range(5))


def good(url: str) -> float:
    start = time.monotonic()
    answer = httpx.post(f"{url}/rerank", json=body(), timeout=60)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - start


def post(url: str, content: bytes) -> tuple[int, str, str]:
    answer = httpx.post(f"{url}/rerank", content=content, headers=JSON, timeout=60)
    problem = answer.json().get("error", {})
    return answer.status_code, problem.get("code", ""), problem.get("message", "")


# Each attack, with a good client at the same time.

ANSWERS = {
    "numbers for documents, 6 MB": {422},
    "brackets for documents, 60 MB": {422},
    "one string of 60 MB": {422},
    "bodies that drip": {0},
    "a JPEG of 2,400 scans": {422},
    "a JPEG of the most scans allowed": {200},
    "a host that drips": {422},
    "pictures of 201 x 1": {422},
    "queries of 10,000 characters": {422},
    "a WebP that is also an IM": {200},
    "pictures of 31 megapixels": {200},
    "a host that packs twice": {422},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_good_client_hardly_notices(name: str, url: str, port: int, normal: float) -> None:
    attack = all_attacks(port)[name]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(attack, url)
        while True:
            good(url)
            if running.done():
                break
        assert running.result() in ANSWERS[name]
    # The best of a few: other programs on this machine also take time.
    assert min(good(url) for _ in range(4)) <= 2 * normal


def test_every_attack_is_tested(port: int) -> None:
    assert set(all_attacks(port)) == set(ANSWERS)


def test_the_benchmark_of_attacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "attacks", "--seconds", "1", "--only", "201 x 1", "--json"])
    assert stop.value.code == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["good"] == result["asked"] >= 12
    assert set(result["statuses"]) == {"422"}
    assert result["p95"] > 0 < result["unloaded"]
    assert result["megabytes"] < 600
    with pytest.raises(SystemExit) as stop:
        main(["bench", "attacks", "--only", "no such attack"])
    assert stop.value.code == 2


# Parsing.


def test_a_million_numbers_are_one_error_and_block_nobody(url: str) -> None:
    stop, late = threading.Event(), []

    def watch() -> None:
        with httpx.Client(base_url=url) as http:
            while not stop.is_set():
                start = time.monotonic()
                assert http.get("/healthz").status_code == 200
                late.append(time.monotonic() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before, start = resident(), time.monotonic()
    try:
        # Few enough values for the parser, too many documents; and more values than are parsed at all.
        for content, code in (
            (numbers(20_000), "too_many_documents"),
            (numbers(2_000_000), "invalid_request"),
        ):
            status, given, message = post(url, content)
            assert (status, given) == (422, code)
            assert len(message) < 200
    finally:
        stop.set()
        watcher.join()
    assert time.monotonic() - start < 5
    assert max(late) < 1
    assert resident() - before < 100


def test_validation_stops_at_the_first_error(url: str) -> None:
    documents = [uri(PICTURES[0]), *[0] * 100]
    status, code, message = post(url, json.dumps({"query": "x", "documents": documents}).encode())
    assert (status, code) == (422, "invalid_request")
    assert message.startswith("documents.1.")


def test_what_cannot_be_parsed_is_refused(url: str) -> None:
    for content in (
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"query": "\\ud800", "documents": ["x"]}',
        b"7",
    ):
        status, code, _ = post(url, content)
        assert (status, code) == (422, "invalid_request")
    good(url)


def test_hostile_documents_are_one_short_error(url: str) -> None:
    tiny = base64.b64encode(picture(1, 1)).decode()
    part = {"type": "image_url", "image_url": {"url": tiny}}
    deep: Any = "x"
    for _ in range(150):
        deep = [deep]
    for document, code in (
        ({"images": [tiny] * 20_000}, "too_many_images"),
        ({"content": [part] * 10_000}, "too_many_images"),
        ({"images": [tiny] * 5_000, "image": 7}, "invalid_request"),
        ({"images": [0] * 50_000}, "invalid_request"),
        ({"content": [{"type": "text", "text": 0}] * 20_000}, "invalid_request"),
        ({"content": deep}, "invalid_request"),
        ({"text": deep}, "invalid_request"),
        ({"text": "x" * 20_000_000}, "too_much_text"),
        ("a " * 10_000_000, "too_much_text"),
        ("~" * 20_000_000, "bad_document"),
        ({"content": [{"type": "text", "text": "x" * 200}] * 10_000}, "too_much_text"),
    ):
        start = time.monotonic()
        content = json.dumps({"query": "x", "documents": [uri(PICTURES[0]), document]}).encode()
        status, given, message = post(url, content)
        assert (status, given) == (422, code), message
        assert len(message) < 300
        assert time.monotonic() - start < 10
    good(url)


def test_what_takes_too_much_memory_is_refused_and_the_reader_replaced() -> None:
    reader = Readers(2, memory=192 << 20, seconds=20)
    reader.start()
    try:
        first = reader.pids
        wide = ('{"query": "\U0001f600' + "a" * 40_000_000 + '"}').encode()

        async def read(content: bytes) -> Any:
            task = ReadTask("a", time.monotonic() + 20, lambda asked, pixels: None)
            return await reader.request(bytearray(content), LIMITS, task)

        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                asyncio.run(read(wide))
            assert caught.value.status == 422
        result = asyncio.run(read(request(picture(30, 20))))
        assert result.images[0].size == (30, 20)
        assert reader.pids != first
    finally:
        reader.stop()


LIMITS = Limits(("dense",), 10, 10, 1000, 1000, 32_000_000, 45_000_000)


def test_readers_are_small_and_end_with_the_service() -> None:
    reader = Readers(2, memory=448 << 20, seconds=20)
    reader.start()
    pids = reader.pids

    async def read(number: int) -> Any:
        task = ReadTask("a", time.monotonic() + 20, lambda asked, pixels: None)
        return await reader.request(bytearray(request(picture(64, 64))), LIMITS, task)

    async def some() -> list[Any]:
        return await asyncio.gather(*map(read, range(20)))

    assert len(asyncio.run(some())) == 20
    assert max(map(resident, pids)) < 60  # without torch, which takes hundreds
    reader.stop()
    assert all(resident(pid) != resident(pid) for pid in pids)  # not a number: they are gone


# Keys and bodies.


def test_a_key_is_checked_before_the_body_is_read(embedded: Backbone) -> None:
    with listening(embedded, api_keys=["sesame"]) as url:
        parts = urlsplit(url)
        for key, status in (("wrong", b"401"), ("sesame", None)):
            with socket.create_connection((parts.hostname, parts.port or 80), timeout=2) as connection:
                connection.sendall(
                    f"POST /rerank HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
                    "Content-Type: application/json\r\nContent-Length: 60000000\r\n\r\n{".encode()
                )
                if status is None:  # the service waits for the rest
                    connection.settimeout(0.5)
                    with pytest.raises(TimeoutError):
                        connection.recv(100)
                else:
                    assert status in connection.recv(100)


def test_a_body_has_a_time_limit(embedded: Backbone) -> None:
    with listening(embedded, body_timeout=0.5) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
            head = "POST /rerank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 60000000\r\n\r\n{{".encode())
            start = time.monotonic()
            answer = connection.recv(4000)
        assert time.monotonic() - start < 3
        assert b" 408 " in answer
        assert b"body_timeout" in answer


@pytest.mark.parametrize("key", ["", "  ", "\t\n"])
def test_an_empty_key_is_refused(key: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(ValidationError, match="API key is empty"):
        Settings(api_keys=["good", key])
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--port", "0", "--api-key", key])
    assert stop.value.code == 2
    assert "API key is empty" in capsys.readouterr().err
    monkeypatch.setenv("RADICAL_SERVE_API_KEYS", json.dumps([key]))
    with pytest.raises(ValidationError, match="API key is empty"):
        Settings()
    monkeypatch.setenv("RADICAL_SERVE_API_KEYS", key)  # not even a list
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--port", "0"])
    assert stop.value.code == 2
    assert "api_keys" in capsys.readouterr().err


# Memory and places.


def test_large_requests_leave_room_for_small_ones() -> None:
    memory = Memory(3200)
    with memory.reservation() as first, memory.reservation() as second, memory.reservation() as small:
        first.grow(2000)
        with pytest.raises(ServiceError) as caught:
            second.grow(500)
        assert caught.value.status == 429
        second.grow(400)
        small.grow(100)  # into the last quarter
        with pytest.raises(ServiceError):
            small.grow(1)  # no longer small
        first.grow(-1000)
        second.grow(400)
        assert memory.used == 1900
    assert memory.used == 0


def test_the_request_that_has_waited_longest_is_evicted() -> None:
    async def run() -> None:
        memory, intake = Memory(3200), Intake(3)
        late = ServiceError(408, "late", "late")
        released = asyncio.Event()

        async def wait(client: str, size: int) -> str:
            with memory.reservation() as held:

                async def work() -> str:
                    intake.grow(held, size)
                    await released.wait()
                    return client

                return await intake.wait(client, held, work(), 5, late)

        async def started(client: str, size: int) -> asyncio.Task[str]:
            task = asyncio.create_task(wait(client, size))
            await asyncio.sleep(0.01)
            return task

        many = [await started("many", 2000), await started("many", 100)]
        few = await started("few", 100)
        new = await started("new", 100)  # no place: the first of the client with most of them
        with pytest.raises(ServiceError) as caught:
            await many[0]
        assert caught.value.status == 429
        assert memory.used == 300
        large = await started("few", 2000)
        assert large.done() is False
        rest = [many[1], few, new, large]
        released.set()
        done = await asyncio.gather(*rest, return_exceptions=True)
        assert sum(isinstance(one, ServiceError) for one in done) == 1  # for the place of the large one
        assert memory.used == 0

    asyncio.run(run())


def test_waiting_requests_are_evicted_for_a_small_one() -> None:
    async def run() -> None:
        memory, intake = Memory(3200), Intake(100)
        late = ServiceError(408, "late", "late")

        async def hoard(size: int) -> None:
            with memory.reservation() as held:

                async def work() -> None:
                    intake.grow(held, size)
                    await asyncio.sleep(5)

                await intake.wait("hoarder", held, work(), 5, late)

        hoarders = [asyncio.create_task(hoard(100)) for _ in range(32)]
        await asyncio.sleep(0.05)
        assert memory.used == 3200
        with memory.reservation() as held:
            intake.grow(held, 60)
            assert memory.used == 3160
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in hoarders) == 1
        for task in hoarders:
            task.cancel()
        await asyncio.gather(*hoarders, return_exceptions=True)

    asyncio.run(run())


def test_decoded_pixels_of_all_requests_together_are_bounded() -> None:
    pixels = 10_000_000
    reading = Reading(
        Settings(max_memory=56 << 20, max_body=1 << 20, max_pixels=pixels, max_total_pixels=pixels)
    )

    async def read(content: bytes) -> list[int]:
        async def chunks() -> AsyncIterator[bytes]:
            yield content

        with reading.memory.reservation() as held:
            incoming = Incoming("a", len(content), chunks(), time.monotonic() + 20)
            _, images = await reading.read(incoming, held)
            assert held.bytes == 4 * sum(image.width * image.height for image in images)
            return [image.width for image in images]

    big, small = request(picture(3000, 3000)), request(picture(300, 300))
    reading.readers.start()
    try:
        assert asyncio.run(read(big)) == [3000]
        assert reading.memory.used == 0
        with reading.memory.reservation() as other:  # another request's pictures, as large as these
            other.grow(36_000_000)
            with pytest.raises(ServiceError) as caught:
                asyncio.run(read(big))
            assert (caught.value.status, caught.value.code) == (429, "overloaded")
            assert asyncio.run(read(small)) == [300]
        assert asyncio.run(read(big)) == [3000]
    finally:
        reading.readers.stop()
    with pytest.raises(ValidationError, match="max_memory must be at least"):
        Settings(max_memory=100 << 20)
    with pytest.raises(ValidationError, match="reader_memory must be at least"):
        Settings(reader_memory=200 << 20)


def test_memory_under_attack(url: str) -> None:
    import os

    with Peak(os.getpid()) as peak, ThreadPoolExecutor(4) as pool:
        for content in (brackets(20_000_000), request(picture(5600, 5600))):
            list(pool.map(lambda _, content=content: post(url, content), range(4)))
    assert children(os.getpid())
    assert peak.megabytes < 600


# Images.


def test_scans_are_counted_before_they_are_decoded(url: str) -> None:
    start = time.monotonic()
    status, code, message = post(url, request(many_scans(5600, 5600, 2400)))
    assert (status, code) == (422, "bad_image")
    assert "document 0 has 2406 scans" in message
    assert time.monotonic() - start < 5
    assert post(url, request(many_scans(200, 200, 200)))[0] == 200  # many, of a small picture
    assert MAX_SCANS >= 16


def test_a_picture_that_takes_too_long_is_given_up_and_its_process_killed() -> None:
    reader = Readers(2, memory=448 << 20, seconds=0.15)
    reader.start()
    try:
        first = set(reader.pids)

        async def read(content: bytes) -> Any:
            task = ReadTask("a", time.monotonic() + 20, lambda asked, pixels: None)
            return await reader.request(bytearray(content), LIMITS, task)

        start = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            asyncio.run(read(request(many_scans(5600, 5600, 9), picture(3000, 4000))))
        assert caught.value.code == "too_slow"
        assert time.monotonic() - start < 3
        end = time.monotonic() + 10
        while set(reader.pids) == first and time.monotonic() < end:
            time.sleep(0.05)
        assert len(set(reader.pids) & first) == 1
        reader.seconds = 10
        assert len(asyncio.run(read(request(picture(30, 20)))).images) == 1
    finally:
        reader.stop()


def test_heavy_pictures_never_take_the_last_process() -> None:
    """Light requests of the same and of another client overtake heavy ones."""
    reader = Readers(2, memory=448 << 20, seconds=30)
    reader.start()
    heavy = request(many_scans(5600, 5600, 9))
    light = request(picture(30, 20))
    order = []

    async def read(name: str, client: str, content: bytes) -> None:
        task = ReadTask(client, time.monotonic() + 30, lambda asked, pixels: None)
        await reader.request(bytearray(content), LIMITS, task)
        order.append(name)

    async def run() -> None:
        slow = [asyncio.create_task(read("heavy", "a", heavy)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.gather(*(read("light", client, light) for client in "abab"))
        await asyncio.gather(*slow)

    try:
        asyncio.run(run())
    finally:
        reader.stop()
    assert order.count("heavy") == 3
    assert order[-2:] == ["heavy", "heavy"]


def test_the_queue_of_one_client_does_not_make_another_wait() -> None:
    reader = Readers(2, memory=448 << 20, seconds=30)
    served, refused = [], []
    content = request(picture(600, 600))

    async def read(client: str) -> None:
        task = ReadTask(client, time.monotonic() + 30, lambda asked, pixels: served.append(client))
        try:
            await reader.request(bytearray(content), LIMITS, task)
        except ServiceError as error:
            refused.append((client, error.status))

    async def run() -> None:
        crowd = [asyncio.create_task(read("crowd")) for _ in range(80)]  # more than may wait
        await asyncio.sleep(0)
        other = [asyncio.create_task(read("other")) for _ in range(2)]
        await asyncio.sleep(0.05)
        reader.start()
        await asyncio.gather(*crowd, *other)

    asyncio.run(run())
    reader.stop()
    assert refused == [("crowd", 429)] * 18
    assert served.count("other") == 2
    assert "other" not in served[5:]


def test_a_request_that_is_being_read_takes_no_place_in_the_queue(embedded: Backbone, port: int) -> None:
    limits = {"allowed_hosts": [HOST], "fetch_timeout": 3.0, "queue": 1, "patience": 100.0}
    drip = json.dumps({"query": QUERY, "documents": [f"http://{HOST}:{port}/drip"] * 3}).encode()
    with listening(embedded, **limits) as url, ThreadPoolExecutor(8) as pool:
        good(url)
        start = time.monotonic()
        waiting = [pool.submit(post, url, drip) for _ in range(8)]
        time.sleep(0.5)
        for _ in range(5):
            good(url)
        assert not any(future.done() for future in waiting)
        answers = [future.result() for future in waiting]
        assert time.monotonic() - start < 10
    assert {(status, code) for status, code, _ in answers} == {(422, "fetch_failed")}


def test_a_polyglot_is_what_it_was_checked_as(url: str, embedded: Backbone) -> None:
    data = [polyglot((64, 48), (2000, 1500)), polyglot((32, 48), (2000, 1500))]
    answer = httpx.post(f"{url}/rerank", content=request(*data), headers=JSON, timeout=60).json()
    images = [Image.new("RGB", size) for size in ((64, 48), (32, 48))]
    expected = Reranker(embedded, "radical", keep=0.2).rank("a red star", images)
    assert expected.report is not None
    assert answer["usage"]["total_tokens"] == expected.report.tokens


def test_a_thin_image_fails_alone(url: str) -> None:
    thin = {"query": QUERY, "documents": [uri(PICTURES[0]), uri(Image.new("RGB", (201, 1)))]}
    asked = [body(3), body(4), thin, *[body(3)] * 8]

    def ask(content: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{url}/rerank", json=content, timeout=60)

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    assert [answer.status_code for answer in answers] == [200, 200, 422, *[200] * 8]
    assert "document 1 cannot be prepared" in answers[2].json()["error"]["message"]


# The worker.


class Failing:
    """A stand-in for the model that fails on the query "bad"."""

    def __init__(self) -> None:
        self.alone: list[str] = []

    def __call__(self, method: str, keep: float | None) -> Any:
        return self

    def rank_many(self, lists: Any, batch_size: int, stop: Any) -> list[Ranking]:
        time.sleep(0.05)
        for query, _ in lists:
            if query.text == "bad":
                raise RuntimeError("the device has run out of something")
        return [Ranking(()) for _ in lists]


def jobs_of(worker: RankWorker, texts: list[str], images: Any = (), seconds: float = 10) -> list[Any]:
    async def run() -> list[Any]:
        loop = asyncio.get_running_loop()
        work = [RankWork(Query(text), images, ("a", 1), time.monotonic() + seconds) for text in texts]
        jobs = [RankJob(one, loop, loop.create_future()) for one in work]
        for job in jobs:
            worker.submit(job)
        return await asyncio.gather(*(job.future for job in jobs), return_exceptions=True)

    return asyncio.run(run())


def test_a_batch_that_fails_for_any_reason_runs_again_one_by_one() -> None:
    worker = RankWorker(Failing(), places=8, patience=100.0, max_batch=4)
    worker.start()
    results = jobs_of(worker, ["first", "a", "bad", "b", "c"])
    worker.stop(5)
    assert [isinstance(result, Ranking) for result in results] == [True, True, False, True, True]
    assert results[2].status == 500


def test_the_ranker_stops_at_the_deadline(embedded: Backbone) -> None:
    reranker = Reranker(embedded, "dense")
    slow = [
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.1))
        for layer in embedded.model.model.language_model.layers
    ]
    worker = RankWorker(lambda method, keep: reranker, places=8, patience=100.0, max_batch=1)
    worker.start()
    try:
        start = time.monotonic()
        (late,) = jobs_of(worker, [QUERY], PICTURES, seconds=0.3)
        spent = time.monotonic() - start
        assert late.status == 504
        assert spent < 0.9  # all layers would take 1.2 s
        (fine,) = jobs_of(worker, [QUERY], PICTURES)
        assert len(fine) == len(PICTURES)
    finally:
        worker.stop(5)
        for handle in slow:
            handle.remove()


def test_long_queries_are_refused_before_they_wait_for_the_ranker(embedded: Backbone) -> None:
    with serving(embedded, max_query_tokens=20, patience=9.0) as client:
        status = client.post("/rerank", json=body(3, query="star " * 20)).status_code
        answer = client.post("/rerank", json=body(3, query="star " * 2000))
        assert (status, answer.status_code) == (200, 422)
        assert "the query has 2000 tokens, more than the limit of 20" in answer.json()["error"]["message"]


# Fetching.


@pytest.mark.parametrize(
    "address",
    [
        "::127.0.0.1", "::7f00:1", "::", "::ffff:127.0.0.1", "::ffff:0:127.0.0.1", "2002:7f00:1::",
        "2002:0a00:0001::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "64:ff9b::10.0.0.1",
        "64:ff9b:1::808:808", "64:ff9b:1:7f00:0:100::", "fe80::5efe:8.8.8.8", "2606:4700::5efe:127.0.0.1",
        "2606:4700::200:5efe:10.0.0.1", "fec0::1", "ff02::1", "100::1", "2001:db8::1", "4000::1",
    ],
)  # fmt: skip
def test_no_form_of_a_private_address_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["2002:0808:0808::1", "64:ff9b::8.8.8.8", "2a00:1450:4001::8a"])
def test_public_addresses_stay_public(address: str) -> None:
    assert is_public(address)


class _Odd(BaseHTTPRequestHandler):
    seen: dict[str, str] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        _Odd.seen = dict(self.headers)
        if self.path == "/nowhere":
            self.send_response(302)
            self.send_header("Location", "http://[")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Encoding", self.path[1:])
        self.end_headers()
        self.wfile.write(gzip.compress(gzip.compress(bytes(10_000_000))))

    def log_message(self, *args: Any) -> None:
        pass


def test_odd_answers_of_a_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafeFetcher, "_address", lambda self, host, port: "127.0.0.1")
    server = HTTPServer(("127.0.0.1", 0), _Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fetcher = SafeFetcher(["odd.example"], timeout=5, max_bytes=100_000)
    try:
        for path, code in (
            ("nowhere", "url_not_allowed"),
            *((encoding, "fetch_failed") for encoding in ("gzip", "gzip,%20gzip", "br", "deflate", "x-gzip")),
        ):
            with pytest.raises(ServiceError) as caught:
                asyncio.run(fetcher.get(f"http://odd.example:{server.server_address[1]}/{path}"))
            assert caught.value.code == code, path
            assert _Odd.seen["Accept-Encoding"] == "identity"
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(ServiceError, match="not well-formed"):
        asyncio.run(fetcher.get("http://odd.example/\ud800"))


# Smaller cases.


def test_lone_surrogates_are_refused(url: str) -> None:
    for field in ({"model": "\ud800"}, {"documents": ["http://\udfff.example/"]}, {"query": "a \ud800"}):
        status, code, _ = post(url, json.dumps({**body(2), **field}).encode())
        assert (status, code) == (422, "invalid_request")


def test_data_uris_in_any_case_and_wrapped(url: str) -> None:
    data = base64.b64decode(uri(PICTURES[0]).partition(",")[2])
    wrapped = base64.encodebytes(data).decode().replace("\n", "\r\n ")
    documents = [f"DATA:image/png;Base64,{wrapped}", wrapped, {"image": f"data:;base64,{wrapped}"}]
    answer = httpx.post(f"{url}/rerank", json={"query": QUERY, "documents": documents}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_errors_have_a_detail_for_jinas_clients(url: str) -> None:
    for answer in (
        httpx.post(f"{url}/v1/rerank", json=body(2, documents=["text"]), timeout=60),
        httpx.get(f"{url}/nothing"),
        httpx.get(f"{url}/v1/sample?seed=x"),
    ):
        assert "results" not in answer.json()
        assert answer.json()["detail"] == answer.json()["error"]["message"]


def test_only_trusted_host_names_are_answered(embedded: Backbone) -> None:
    with serving(embedded, trusted_hosts=["shop.example", "*.in.example", "[::1]"], patience=9.0) as client:
        for host in ("shop.example", "SHOP.example:8000", "a.in.example", "[::1]:80"):
            assert client.get("/healthz", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "in.example", "shop.example.evil", "evilin.example", "", "[::2]"):
            answer = client.get("/healthz", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "untrusted_host"), host
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_security_headers_are_on_errors_too(embedded: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    from radical_rerank.service import app as application

    monkeypatch.setattr(application, "_read", lambda *a: 1 / 0)
    limits = {"cors_origins": ["https://shop.example"], "api_keys": ["sesame"]}
    with serving(embedded, **limits) as client:
        key = {"Authorization": "Bearer sesame", "Origin": "https://shop.example"}
        broken = client.post("/rerank", json=body(2), headers=key)
        assert broken.status_code == 500
        locked = client.post("/rerank", json=body(2), headers={"Origin": "https://shop.example"})
        assert locked.status_code == 401
        assert locked.headers["access-control-allow-origin"]  # so that a web page can show the error
        for answer in (broken, locked, client.get("/nothing"), client.put("/rerank")):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"


def test_only_json_is_read(url: str) -> None:
    """A web form of another site cannot send JSON without a CORS preflight."""
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        content = json.dumps(body(2)).encode()
        answer = httpx.post(f"{url}/rerank", content=content, headers={"Content-Type": kind})
        assert answer.status_code == 415
