"""The HTTP service: forms of requests, limits, refusals, load."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")

import httpx
from fastapi.testclient import TestClient

from radical_rerank import Reranker
from radical_rerank.backbones import DEFAULT_MODEL, Backbone
from radical_rerank.errors import InputError
from radical_rerank.lab.bench.service import listening, resident
from radical_rerank.lab.bench.service import serving as running
from radical_rerank.reranking import RankedDocument, Ranking
from radical_rerank.reranking.encoding import data_uri
from radical_rerank.service import app as application
from radical_rerank.service import backend as backends
from radical_rerank.service.app import create_app
from radical_rerank.service.backend import Local
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.fetch import SafeFetcher, is_public
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import Job, Work, Worker
from tests.cases import draw_list

QUERY, PICTURES = draw_list(3, 5)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def plain(image: Image.Image) -> str:
    return base64.b64encode(encoded(image)).decode()


uri = data_uri


def body(count: int = 5, **more: Any) -> dict[str, Any]:
    return {"query": QUERY, "documents": [{"image": uri(image)} for image in PICTURES[:count]], **more}


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return Backbone.from_pretrained()


@contextlib.contextmanager
def serving(backbone: Backbone, **settings: Any) -> Iterator[TestClient]:
    chosen = Settings(**settings)
    app = create_app(chosen, Local(chosen, load=lambda: backbone))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(embedded: Backbone) -> Iterator[TestClient]:
    with serving(embedded, patience=100.0) as client:
        yield client


@pytest.fixture(scope="module")
def url(embedded: Backbone) -> Iterator[str]:
    with listening(embedded, patience=100.0) as url:
        yield url


@pytest.fixture(scope="module")
def expected(embedded: Backbone) -> Ranking:
    return Reranker(embedded, "radical", keep=0.2).rank(QUERY, PICTURES)


# Forms.


FORMS = {
    "jina, data URI": lambda image: {"image": uri(image)},
    "jina, base64": lambda image: {"image": plain(image)},
    "cohere": uri,
    "vllm": lambda image: {"content": [{"type": "image_url", "image_url": {"url": uri(image)}}]},
}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_librarys_ranking(
    client: TestClient, expected: Ranking, path: str, form: str
) -> None:
    documents = [FORMS[form](image) for image in PICTURES]
    answer = client.post(path, json={"model": "any", "query": QUERY, "documents": documents, "unknown": 1})
    assert answer.status_code == 200, answer.text
    data = answer.json()
    assert [result["index"] for result in data["results"]] == expected.order
    scores = [result["relevance_score"] for result in data["results"]]
    assert scores == pytest.approx([math.exp(result.score) for result in expected], abs=1e-4)
    assert sum(scores) == pytest.approx(1, abs=1e-3)
    assert set(data) == {"id", "model", "usage", "results", "meta"}
    assert set(data["results"][0]) == {"index", "relevance_score"}
    assert data["usage"]["total_tokens"] == expected.report.tokens


def test_top_n_documents_and_pruning_are_given_when_asked_for(client: TestClient, expected: Ranking) -> None:
    answer = client.post(
        "/v1/rerank", json=body(top_n=2, return_documents=True, return_pruning=True, keep=0.5, method="fastv")
    ).json()
    assert len(answer["results"]) == 2
    first = answer["results"][0]
    assert first["document"] == body()["documents"][first["index"]]
    (report,) = answer["pruning"]
    assert report["method"] == "FastV"
    assert report["keep"] == 0.5
    assert 0 < report["flops_saved"] < 1
    assert 0 < report["kv_saved"] < 1
    assert set(report["seconds"]) >= {"preprocess", "vision", "decoder"}
    assert "survivors" not in report["stages"][0]
    shown = client.post("/v1/rerank", json=body(return_survivors=True)).json()["pruning"][-1]
    kept = shown["stages"][-1]["survivors"]
    assert sum(map(len, kept)) == shown["stages"][-1]["after"]


def test_a_composed_query_has_a_reference(client: TestClient, embedded: Backbone) -> None:
    words = "the star is green instead of red"
    expected = Reranker(embedded, "radical", keep=0.2).rank(words, PICTURES[1:], reference=PICTURES[0])
    for reference in (uri(PICTURES[0]), {"image": plain(PICTURES[0])}, FORMS["vllm"](PICTURES[0])):
        asked = {**body(), "query": words, "documents": body()["documents"][1:], "reference": reference}
        answer = client.post("/rerank", json=asked).json()
        assert [result["index"] for result in answer["results"]] == expected.order


def test_coheres_own_client(url: str, expected: Ranking) -> None:
    cohere = pytest.importorskip("cohere", reason="the client of another service")
    client = cohere.ClientV2(api_key="none", base_url=url)
    answer = client.rerank(model="embedded", query=QUERY, documents=[uri(p) for p in PICTURES], top_n=3)
    assert [result.index for result in answer.results] == expected.order[:3]
    assert answer.results[0].relevance_score > answer.results[1].relevance_score


def test_other_routes(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "embedded"
    assert "/v1/rerank" in client.get("/openapi.json").json()["paths"]
    assert "swagger" in client.get("/docs").text.lower()
    client.post("/rerank", json=body(2))
    text = client.get("/metrics").text
    assert "radical_request_seconds_count" in text
    assert (
        "radical_refused_total{code=" in client.get("/metrics").text
        or client.post("/rerank", json=body(documents=["text"])).is_client_error
    )
    sample = client.get("/v1/sample?seed=4").json()
    assert len(sample["images"]) == 12
    assert client.get("/v1/sample?seed=-1").status_code == 422
    assert client.get("/").text.startswith("<!doctype html>")
    for name in ("app.js", "style.css"):
        assert client.get(f"/static/{name}").status_code == 200
    for name in ("app.py", "../app.py", "%2e%2e%2fapp.py"):
        assert client.get(f"/static/{name}").status_code == 404


# Refusals.


def bomb() -> bytes:
    return encoded(Image.new("1", (20_000, 20_000)))


REFUSED = {
    "text": ("a red star", "bad_document"),
    "path": ("/etc/passwd", "bad_document"),
    "long path": ("/" + "a/" * 200 + "b.png", "bad_document"),
    "file URL": ("file:///etc/passwd", "bad_document"),
    "http URL": ("http://127.0.0.1/x.png", "url_not_allowed"),
    "https URL": ("HTTPS://example.com/x.png", "url_not_allowed"),
    "ftp URL": ("ftp://example.com/x.png", "bad_document"),
    "SVG": (
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(),
        "bad_image",
    ),
    "plain data URI": ("data:image/png,abc", "bad_document"),
    "broken base64": ("data:image/png;base64,@@@@", "bad_document"),
    "nothing": ("data:image/png;base64,", "bad_image"),
    "empty string": ("", "bad_document"),
    "zeros": ("data:image/png;base64," + base64.b64encode(bytes(500)).decode(), "bad_image"),
    "PDF": ("data:application/pdf;base64," + base64.b64encode(b"%PDF-1.4" + bytes(90)).decode(), "bad_image"),
    "TIFF": (
        "data:image/tiff;base64," + base64.b64encode(encoded(PICTURES[0], "TIFF")).decode(), "bad_image",
    ),
    "truncated": (
        "data:image/png;base64," + base64.b64encode(encoded(PICTURES[0])[:300]).decode(), "bad_image",
    ),
    "bomb": ("data:image/png;base64," + base64.b64encode(bomb()).decode(), "too_many_pixels"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_picture_is_refused_by_name(client: TestClient, kind: str) -> None:
    document, code = REFUSED[kind]
    for form in (document, {"image": document}):
        answer = client.post("/v1/rerank", json={"query": QUERY, "documents": [uri(PICTURES[0]), form]})
        assert answer.status_code == 422, answer.text
        problem = answer.json()["error"]
        assert problem["code"] == code
        if code != "url_not_allowed" and kind != "bomb":
            assert "document 1" in problem["message"]
        assert "/work" not in answer.text
        assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": ""},
        {"query": "  "},
        {"query": None},
        {"documents": []},
        {"documents": "one"},
        {"documents": [{"text": "words"}]},
        {"documents": [{"content": []}]},
        {"top_n": 0},
        {"keep": 0},
        {"keep": 1.5},
        {"method": "best"},
        {"reference": "no picture"},
    ],
)
def test_bad_fields_are_named(client: TestClient, wrong: dict[str, Any]) -> None:
    answer = client.post("/v1/rerank", json={**body(2), **wrong})
    assert answer.status_code == 422
    problem = answer.json()["error"]
    assert problem["code"]
    assert any(word in problem["message"] for word in (*wrong, "method", "document", "such"))


def test_limits(embedded: Backbone) -> None:
    with serving(
        embedded, max_documents=3, max_body=40_000, max_pixels=20_000, max_total_pixels=50_000, patience=9.0
    ) as client:
        small = [Image.new("RGB", (100, 100)) for _ in range(6)]
        ask = lambda images: client.post(  # noqa: E731
            "/rerank", json={"query": QUERY, "documents": [uri(image) for image in images]}
        )
        assert ask(small[:3]).status_code == 200
        assert ask(small[:4]).json()["error"]["code"] == "too_many_documents"
        assert ask([Image.new("RGB", (200, 101))]).json()["error"]["code"] == "too_many_pixels"
        three = [Image.new("RGB", (140, 140)) for _ in range(3)]
        assert ask(three).json()["error"]["code"] == "too_many_pixels"
        big = json.dumps({"query": "x" * 50_000, "documents": ["y"]}).encode()
        for content in (big, iter([big[:30_000], big[30_000:]])):  # with and without a length
            answer = client.post("/rerank", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["code"] == "too_large"
        assert ask(small[:3]).status_code == 200


def test_security_headers_are_on_every_answer(client: TestClient) -> None:
    for answer in (client.get("/"), client.get("/nothing"), client.post("/rerank", json={})):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
    assert client.get("/nothing").json()["error"]["code"] == "not_found"
    assert client.get("/rerank").json()["error"]["code"] == "method_not_allowed"


def test_other_origins_may_call_only_where_allowed(embedded: Backbone) -> None:
    asked = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    with serving(embedded, cors_origins=["https://shop.example"]) as client:
        assert client.options("/rerank", headers=asked).headers["access-control-allow-origin"]
        other = client.options("/rerank", headers={**asked, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_keys(embedded: Backbone) -> None:
    with serving(embedded, api_keys=["first", "sécond"], patience=9.0) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
            answer = client.post("/rerank", json=body(2), headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert client.get("/v1/models", headers=headers).status_code == 401
        for key in ("first", "sécond"):
            good = {"Authorization": f"Bearer {key}".encode()}
            assert client.post("/rerank", json=body(2), headers=good).status_code == 200
        assert client.get("/healthz").status_code == 200


def test_an_unexpected_error_tells_nothing_of_the_server(
    embedded: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(embedded, patience=9.0) as client:

        def fails(*args: Any, **options: Any) -> None:
            raise OSError("/root/secret/file")

        monkeypatch.setattr(Reranker, "rank_many", fails)
        answer = client.post("/rerank", json=body(2))
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal"
        monkeypatch.setattr(application, "_read", lambda *a: 1 / 0)
        other = client.post("/rerank", json=body(2))
        assert other.status_code == 500
        for found in (answer, other):
            assert "secret" not in found.text
            assert "Error" not in found.text
        monkeypatch.undo()
        assert client.post("/rerank", json=body(2)).status_code == 200


def test_broken_pictures_never_break_the_service(client: TestClient) -> None:
    """1,000 of them: truncated, flipped, wrong type, huge header sizes, zero bytes."""
    draw = random.Random(0)
    good = {
        kind: encoded(PICTURES[0].resize((64, 48)), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    }
    served = 0
    for _ in range(1000):
        kind = draw.choice(list(good))
        data = bytearray(good[kind])
        way = draw.choice(["cut", "flip", "zeros", "header", "mixed"])
        if way == "cut":
            data = data[: draw.randrange(len(data))]
        elif way == "flip":
            for _ in range(draw.randrange(1, 60)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        elif way == "zeros":
            data = bytearray(draw.randrange(200))
        elif way == "header":
            for place in range(10, min(40, len(data))):
                data[place] = draw.choice([0xFF, 0x7F, data[place]])
        else:
            data = data[:20] + bytearray(good[draw.choice(list(good))][20:])
        document = "data:image/png;base64," + base64.b64encode(bytes(data)).decode()
        answer = client.post("/rerank", json={"query": QUERY, "documents": [document, "not one"]})
        assert 400 <= answer.status_code < 500, (way, answer.text)
        if answer.json()["error"]["message"].startswith("document 1"):
            served += 1  # a flipped byte may leave a picture that can be read
    assert served < 400
    assert client.post("/rerank", json=body()).status_code == 200


# Fetching.


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("172.16.9.9", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_only_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/picture.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(encoded(PICTURES[0]))
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(bytes(10_000))
        elif self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(self.path[4:]).decode())
            self.end_headers()
        else:
            self.send_response(404)
            self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """good.example answers here; inner.example has a private address, as a name under attack would."""
    server = HTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    true = SafeFetcher._address

    def address(self: SafeFetcher, host: str, port: int) -> str:
        return "127.0.0.1" if host == "good.example" else true(self, host, port)

    known = socket.getaddrinfo

    def resolved(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host == "inner.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", port))]
        return known(host, port, *args, **more)

    monkeypatch.setattr(SafeFetcher, "_address", address)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    yield port
    server.shutdown()
    server.server_close()


def test_allowed_urls_are_fetched_and_no_others(site: int) -> None:
    fetcher = SafeFetcher(["good.example", "inner.example"], timeout=5, max_bytes=100_000)

    def get(url: str) -> bytes:
        return asyncio.run(fetcher.get(url))

    here = f"http://good.example:{site}"

    def to(target: str) -> str:
        return f"{here}/to/{base64.urlsafe_b64encode(target.encode()).decode()}"

    assert get(f"{here}/picture.png") == encoded(PICTURES[0])
    assert get(to("/picture.png")) == encoded(PICTURES[0])
    for refused, code in (
        (f"http://127.0.0.1:{site}/picture.png", "url_not_allowed"),
        (f"http://other.example:{site}/picture.png", "url_not_allowed"),
        ("http://inner.example/picture.png", "url_not_allowed"),
        (f"http://good.example@127.0.0.1:{site}/picture.png", "url_not_allowed"),
        (f"http://user@good.example:{site}/picture.png", "url_not_allowed"),
        ("file:///etc/passwd", "url_not_allowed"),
        ("http://[::1", "url_not_allowed"),
        (to(f"http://127.0.0.1:{site}/picture.png"), "url_not_allowed"),
        (to("http://inner.example/latest/meta-data"), "url_not_allowed"),
        (to("file:///etc/passwd"), "url_not_allowed"),
        (f"{here}/missing", "fetch_failed"),
        (f"{here}/endless", "fetch_failed"),
    ):
        with pytest.raises(ServiceError) as caught:
            get(refused)
        assert caught.value.code == code, refused
        assert caught.value.status == 422
    loop = here + "/to/" + base64.urlsafe_b64encode(b"/picture.png").decode()
    for _ in range(4):
        loop = to(loop)
    with pytest.raises(ServiceError, match="redirects too often"):
        get(loop)


def test_a_request_may_name_an_allowed_url(embedded: Backbone, site: int, expected: Ranking) -> None:
    with serving(embedded, allowed_hosts=["good.example"], patience=9.0) as client:
        documents = [f"http://good.example:{site}/picture.png", *(uri(image) for image in PICTURES[1:])]
        answer = client.post("/rerank", json={"query": QUERY, "documents": documents})
        assert [result["index"] for result in answer.json()["results"]] == expected.order


# The line.


class Slow:
    """A stand-in for the model whose rankings take a known time, and say whose they are."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.batches = seconds, []

    def __call__(self, method: str, keep: float) -> Any:
        return self

    def rank_many(self, lists: Any, batch_size: int, stop: Any = None) -> Iterator[Ranking]:
        self.batches.append([query.text for query, _ in lists])
        if any("bad" in query.text for query, _ in lists):
            raise InputError("bad query")
        time.sleep(self.seconds * len(lists))
        return iter([Ranking((RankedDocument(0, -1.0, query.text),)) for query, _ in lists])


def worker_of(slow: Slow, **options: Any) -> Worker:
    options = {"places": 8, "patience": 100.0, "max_batch": 4, "prepare": lambda: slow.seconds, **options}
    worker = Worker(slow, **options)
    worker.start()
    return worker


async def asked(
    worker: Worker,
    text: str,
    deadline: float = 10.0,
    kind: tuple[str, float] = ("a", 1),
    images: list[Image.Image] | None = None,
) -> str:
    from radical_rerank.reranking import Query

    work = Work(Query(text), images or [], kind, time.monotonic() + deadline)
    with worker.admitted(work.heavy):
        loop = asyncio.get_running_loop()
        job = Job(work, loop, loop.create_future())
        worker.submit(job)
        try:
            ranking = await job.future
        finally:
            worker.forget(job)
        return ranking[0].document


def test_one_thread_loads_and_ranks() -> None:
    """Else two OpenMP pools share the cores, and each ranking takes half as long again."""
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


def test_everyone_gets_their_own_answer_and_kinds_run_together() -> None:
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


def test_a_full_line_is_refused_at_once() -> None:
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
        for images in ([], large):  # the light one that waits is in the way of both kinds
            with pytest.raises(ServiceError):
                await asked(worker, "late", images=images)
        return await asyncio.gather(heavy, light)

    assert asyncio.run(both()) == ["heavy", "light"]
    worker.stop(5)


def test_impatience_lets_in_only_who_need_not_wait() -> None:
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


def test_a_deadline_passes_in_the_line_and_a_gone_client_frees_its_place() -> None:
    slow = Slow(0.2)
    worker = worker_of(slow, max_batch=1)

    async def run() -> None:
        first = asyncio.create_task(asked(worker, "first"))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(asked(worker, "late", deadline=0.05))
        gone = asyncio.create_task(asked(worker, "gone"))
        await asyncio.sleep(0.01)
        assert worker.inside == 3
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert worker.inside == 2
        with pytest.raises(ServiceError) as caught:
            await late
        assert caught.value.status == 504
        assert await first == "first"

    asyncio.run(run())
    assert [text for batch in slow.batches for text in batch] == ["first"]
    worker.stop(5)


def test_stopping_finishes_what_is_inside() -> None:
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


def test_at_twice_its_load_the_accepted_keep_their_latency(
    embedded: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open loop against a real server whose model takes a known time; every answer is the asker's own."""
    slow = Slow(0.08)
    monkeypatch.setattr(backends, "Rerankers", lambda backbone: slow)
    monkeypatch.setattr(backends, "warm_up", lambda reranker: slow.seconds)
    monkeypatch.setattr(
        application, "_answer",
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
            found = [future.result() for future in futures]
    accepted = sorted(spent for status, spent in found if status == 200)
    assert 30 <= len(accepted) <= 110
    assert accepted[int(0.95 * len(accepted))] < 2 * alone


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


def test_sigterm_lets_running_requests_end() -> None:
    with running(DEFAULT_MODEL, within=90, patience=9) as (url, process):
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
