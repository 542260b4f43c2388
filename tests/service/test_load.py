"""The service as a whole: under load, over time, at its end."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")

import httpx
from fastapi.testclient import TestClient

from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.service import listening, resident
from radical_rerank.lab.bench.service import serving as running
from radical_rerank.service import app as application
from radical_rerank.service import backend as backends
from tests.cases import draw_list
from tests.service.helpers import QUERY, Slow, uri


@pytest.mark.slow
def test_at_twice_its_load_the_accepted_keep_their_latency(
    embedded: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open loop, on a real server whose model takes a known time. Each response must match its request."""
    slow = Slow(0.08)
    monkeypatch.setattr(backends, "Rerankers", lambda backbone, **asking: slow)
    monkeypatch.setattr(backends, "warm_up", lambda reranker: slow.seconds)
    monkeypatch.setattr(
        application, "_response",
        lambda asked, ranking, model: {
            "id": ranking[0].document, "model": "m", "usage": {"total_tokens": 0}, "results": [], "meta": {},
        },
    )  # fmt: skip
    draw = random.Random(1)
    with listening(embedded) as url, httpx.Client(base_url=url, timeout=20) as http:
        picture = uri(Image.new("RGB", (32, 32)))

        def ask(text: str) -> tuple[int, float]:
            start = time.monotonic()
            answer = http.post("/rerank", json={"query": text, "documents": [picture]})
            spent = time.monotonic() - start
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 200:
                assert answer.json()["id"] == text
            else:
                assert answer.headers["retry-after"]
            return answer.status_code, spent

        alone = statistics.median(ask(f"alone {i}")[1] for i in range(10))
        with ThreadPoolExecutor(64) as pool:
            futures = []
            for i in range(150):
                futures.append(pool.submit(ask, f"query {i}"))
                time.sleep(draw.expovariate(2 / slow.seconds))
            results = [future.result() for future in futures]
    accepted = sorted(spent for status, spent in results if status == 200)
    assert 30 <= len(accepted) <= 110
    assert accepted[int(0.95 * len(accepted))] < 2 * alone


@pytest.mark.slow
def test_memory_stays_flat(client: TestClient) -> None:
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc")
    fresh = [draw_list(seed, 2)[1] for seed in range(10)]

    def some(count: int) -> None:
        for i in range(count):
            documents = [uri(image) for image in fresh[i % 10]]
            assert client.post("/rerank", json={"query": QUERY, "documents": documents}).status_code == 200

    some(40)
    before = resident()
    some(120)
    assert resident() - before < 25


@pytest.mark.slow
def test_sigterm_lets_running_requests_end() -> None:
    with running("scenes", within=90, patience=9) as (url, process):
        query, images = draw_list(5, 40)
        documents = [uri(image) for image in images]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                httpx.post, f"{url}/rerank", json={"query": query, "documents": documents}, timeout=60
            )
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            assert answer.result().status_code == 200
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_the_command_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    from radical_rerank.cli import main

    for wrong in (["--method", "best"], ["--keep", "7"], ["--model", "/no/such/folder"]):
        with pytest.raises(SystemExit) as stop:
            main(["serve", "--port", "0", *wrong])
        assert stop.value.code not in (0, None)
