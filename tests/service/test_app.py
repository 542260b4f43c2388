"""The HTTP service: forms of requests, limits, refusals."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")

from fastapi.testclient import TestClient

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.service import listening
from radical_rerank.reranking import Ranking
from radical_rerank.service import app as application
from tests.service.helpers import PICTURES, QUERY, body, encoded, plain, serving, uri


@pytest.fixture(scope="module")
def url(embedded: Backbone) -> Iterator[str]:
    with listening(embedded, patience=100.0) as url:
        yield url


# Forms.


FORMS: dict[str, Callable[[Image.Image], Any]] = {
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
    assert scores == pytest.approx([result.probability for result in expected], abs=1e-4)
    assert data["meta"]["calibrated"]
    assert data["meta"]["confidence"] == pytest.approx(expected.confidence, abs=1e-4)
    assert set(data) == {"id", "model", "usage", "results", "meta"}
    assert set(data["results"][0]) == {"index", "relevance_score"}
    assert expected.report is not None
    assert data["usage"]["total_tokens"] == expected.report.tokens


def test_top_n_documents_and_pruning_are_returned_on_request(client: TestClient, expected: Ranking) -> None:
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


@pytest.mark.slow
def test_coheres_own_client(url: str, expected: Ranking) -> None:
    cohere = pytest.importorskip("cohere", reason="the client of another service")
    client = cohere.ClientV2(api_key="none", base_url=url)
    answer = client.rerank(model="scenes", query=QUERY, documents=[uri(p) for p in PICTURES], top_n=3)
    assert [result.index for result in answer.results] == expected.order[:3]
    assert answer.results[0].relevance_score > answer.results[1].relevance_score


def test_other_routes(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "scenes"
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
    assert client.get("/v1/sample?world=moon").status_code == 404
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
def test_what_is_not_an_image_is_refused_by_name(client: TestClient, kind: str) -> None:
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_other_origins_may_call_only_if_allowed(embedded: Backbone) -> None:
    asked = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    with serving(embedded, cors_origins=["https://shop.example"]) as client:
        assert client.options("/rerank", headers=asked).headers["access-control-allow-origin"]
        other = client.options("/rerank", headers={**asked, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.slow
def test_keys(embedded: Backbone) -> None:
    with serving(embedded, api_keys=["first", "sécond"], patience=9.0) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
            answer = client.post("/rerank", json=body(2), headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert client.get("/v1/models", headers=headers).status_code == 401
        for key in ("first", "sécond"):
            good = [(b"Authorization", f"Bearer {key}".encode())]
            assert client.post("/rerank", json=body(2), headers=good).status_code == 200
        assert client.get("/healthz").status_code == 200


@pytest.mark.slow
def test_an_unexpected_error_reveals_nothing_about_the_server(
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
        for response in (answer, other):
            assert "secret" not in response.text
            assert "Error" not in response.text
        monkeypatch.undo()
        assert client.post("/rerank", json=body(2)).status_code == 200


@pytest.mark.slow
def test_broken_images_never_break_the_service(client: TestClient) -> None:
    """1,000 broken images: truncated, flipped bytes, wrong type, huge sizes in the header, zero bytes."""
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
            served += 1  # an image with a flipped byte may still be readable
    assert served < 400
    assert client.post("/rerank", json=body()).status_code == 200
