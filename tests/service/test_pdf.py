"""PDF files over HTTP: their pages are candidates. A hostile file ends its process, not the service."""

from __future__ import annotations

import base64
import io
import json
import statistics
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")
pytest.importorskip("pypdfium2", reason="an extra")

import httpx
from fastapi.testclient import TestClient

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.service import listening
from radical_rerank.reranking.encoding import PAGE_PIXELS
from radical_rerank.reranking.pages import pages_of
from tests.cases import keep_profile
from tests.pdfs import Leaf, write_pdf
from tests.service.helpers import PICTURES, QUERY, body, serving, uri

BOX = (0, 0, 30, 40)
WORDS = ("red star", "blue circle", "green square")
REPORT = write_pdf([Leaf(lines=(words,)) for words in WORDS])
SMALL = write_pdf([Leaf(box=BOX, picture=picture) for picture in PICTURES[:3]])


def pdf(data: bytes) -> dict[str, str]:
    return {"pdf": base64.b64encode(data).decode()}


def places(results: Any) -> list[tuple[int, int | None]]:
    return [(result["index"], result.get("page")) for result in results]


def test_pages_with_their_texts_are_ranked_as_by_the_library(reader: Backbone) -> None:
    keep_profile(reader)
    other = Image.new("RGB", (48, 48), "red")
    expected = Reranker(reader, "radical", keep=0.2, max_text_tokens=1).rank("red", [other, REPORT])
    with serving(reader, patience=100.0, max_text_tokens=1) as client:
        forms = [pdf(REPORT), {"pdf": "data:application/pdf;base64," + pdf(REPORT)["pdf"]}]
        for form in forms:
            asked = {"query": "red", "documents": [uri(other), form], "return_documents": True}
            answer = client.post("/rerank", json={**asked, "return_pruning": True})
            assert answer.status_code == 200, answer.text
            results = answer.json()["results"]
            assert places(results) == [(r.index, r.page) for r in expected]
            scores = [result["relevance_score"] for result in results]
            assert scores == pytest.approx([result.probability for result in expected], abs=1e-4)
            assert {result["document"].get("pdf") for result in results} == {None, form["pdf"]}
            cut = [{"index": 1, "tokens": 2, "kept": 1, "page": page} for page in (1, 2, 3)]
            assert sorted(answer.json()["meta"]["cut"], key=lambda one: one["page"]) == cut
            assert answer.json()["pruning"][0]["indices"] == [0, 1, 1, 1]


def test_a_model_without_texts_ranks_the_pictures(client: TestClient, embedded: Backbone) -> None:
    asked = {"query": QUERY, "documents": [pdf(SMALL), uri(PICTURES[3])]}
    answer = client.post("/rerank", json=asked)
    assert answer.status_code == 200, answer.text
    expected = Reranker(embedded, "radical", keep=0.2).rank(QUERY, [SMALL, PICTURES[3]])
    assert places(answer.json()["results"]) == [(r.index, r.page) for r in expected]


def test_the_web_page_gets_pages_as_images_with_texts(client: TestClient) -> None:
    answer = client.post("/v1/pages", json={"query": "pages", "documents": [pdf(REPORT)]})
    documents = answer.json()["documents"]
    assert [document["text"] for document in documents] == list(WORDS)
    for page, document in zip(pages_of(REPORT, name="x"), documents, strict=True):
        data = base64.b64decode(document["images"][0].partition(",")[2])
        assert Image.open(io.BytesIO(data)).tobytes() == page.image(PAGE_PIXELS).tobytes()


@pytest.mark.parametrize(
    ("document", "code", "message"),
    [
        (pdf(b"%PDF-1.7 broken" * 9), "bad_document", "document 1 is not a PDF that can be read"),
        (pdf(write_pdf([])), "bad_document", "document 1 has no pages"),
        (pdf(write_pdf([Leaf()], password="secret")), "bad_document", "document 1 is encrypted"),
        (pdf(write_pdf([Leaf(box=BOX)] * 9)), "bad_document", "has 9 pages, more than the limit of 7"),
        ({"pdf": uri(PICTURES[0])}, "bad_document", "document 1 is not a PDF that can be read"),
        ({"pdf": "http://127.0.0.1/a.pdf"}, "bad_document", "document 1 is not a data URI"),
        ({"pdf": "/etc/passwd"}, "bad_document", "document 1 is not a data URI"),
        ({**pdf(SMALL), "text": "x"}, "bad_document", "document 1 has a pdf and other fields"),
        (pdf(write_pdf([Leaf()] * 4)), "too_many_pixels", "the images together have more than"),
        (pdf(write_pdf([Leaf(box=(0, 0, 14_400, 1))])), "cannot_rank", "document 1, page 1"),
    ],
)  # fmt: skip
def test_bad_files_are_named(limited: TestClient, document: Any, code: str, message: str) -> None:
    answer = limited.post("/rerank", json={"query": QUERY, "documents": [uri(PICTURES[0]), document]})
    assert answer.status_code == 422, answer.text
    assert (answer.json()["error"]["code"], message in answer.json()["error"]["message"]) == (code, True)


@pytest.fixture(scope="module")
def limited(embedded: Backbone) -> Iterator[TestClient]:
    with serving(embedded, patience=100.0, max_documents=8, max_total_pixels=2_500_000) as client:
        yield client


def test_pages_and_documents_count_together(limited: TestClient) -> None:
    four = pdf(write_pdf([Leaf(box=BOX)] * 4))
    assert limited.post("/rerank", json={"query": QUERY, "documents": [four, four]}).status_code == 200
    answer = limited.post("/rerank", json={"query": QUERY, "documents": [four, four, uri(PICTURES[0])]})
    assert answer.json()["error"]["code"] == "too_many_documents"


def test_no_pdf_is_a_query_or_a_reference(client: TestClient) -> None:
    for wrong in ({"query": pdf(SMALL)}, {"reference": pdf(SMALL)}):
        answer = client.post("/rerank", json={**body(2), **wrong})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_document")


# Hostile files.


def packed(data: bytes, times: int = 1) -> bytes:
    """A PDF whose only page has this content, compressed several times."""
    for _ in range(times):
        data = zlib.compress(data, 9)
    filters = "/FlateDecode " * times
    stream = f"<< /Length {len(data)} /Filter [{filters}] >>\nstream\n".encode() + data + b"\nendstream"
    whole = write_pdf([Leaf(box=(0, 0, 595, 842))])
    start = whole.index(b"<<", whole.index(b"\n11 0 obj"))
    return whole[:start] + stream + whole[whole.index(b"endobj", start) :]  # the library repairs the places


HOSTILE = {
    "slow to draw": packed(b"0 0 m 595 842 l 0 842 l 595 0 l b* " * 1_500_000),
    "a bomb": packed(bytes(1 << 30), times=2),
    "a page tree that holds itself": REPORT.replace(b"/Kids [10 0 R", b"/Kids [ 2 0 R"),
    "many pages": REPORT.replace(b"/Count 3 ", b"/Count 2000000000 "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_good_client_hardly_notices_a_hostile_file(embedded: Backbone, name: str) -> None:
    content = json.dumps({"query": QUERY, "documents": [pdf(HOSTILE[name]), uri(PICTURES[0])]})
    # An escaped letter, so that no search for the word finds it.
    content = content.replace('"pdf"', '"\\u0070df"')
    with listening(embedded, patience=100.0, read_timeout=3.0) as url, ThreadPoolExecutor(4) as pool:

        def good() -> float:
            start = time.monotonic()
            assert httpx.post(f"{url}/rerank", json=body(), timeout=60).status_code == 200
            return time.monotonic() - start

        def attack(_: int) -> httpx.Response:
            kind = {"Content-Type": "application/json"}
            return httpx.post(f"{url}/rerank", content=content, headers=kind, timeout=60)

        calm = max(good() for _ in range(3))
        running = [pool.submit(attack, number) for number in range(4)]
        spent = [good()]
        while not all(future.done() for future in running):
            spent.append(good())
        statuses = {future.result().status_code for future in running}
        assert statuses <= {200, 422}
        # Less than the seconds that a file may take. The median: other programs on this machine take time.
        assert statistics.median(spent) < max(3 * calm, 2.0)
        assert min(good() for _ in range(3)) < max(3 * calm, 2.0)
