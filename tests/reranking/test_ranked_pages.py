"""PDF files as documents: their pages are ranked, each with its number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from radical_rerank import Backbone, Reranker
from radical_rerank.errors import InputError
from radical_rerank.reranking import encoding
from radical_rerank.reranking.pages import pages_of
from tests.pdfs import Leaf, write_pdf

pytest.importorskip("pypdfium2", reason="an extra")

WORDS = ("red star", "blue circle", "green square")


@pytest.fixture(scope="session")
def backbone(pairs: dict[str, Backbone]) -> Backbone:
    return pairs["qwen3_vl"]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.pdf"
    path.write_bytes(write_pdf([Leaf(lines=(words,)) for words in WORDS]))
    return path


@pytest.mark.parametrize("scorer", ["logits", "pointwise"])
@pytest.mark.parametrize("text", [True, False])
def test_a_page_is_its_picture_and_its_text(
    backbone: Backbone, report: Path, scorer: str, text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "PAGE_PIXELS", 4000)
    reranker = Reranker(backbone, "dense", scorer=scorer, page_text=text)
    other = Image.new("RGB", (48, 48), "red")
    ranking = reranker.rank("red", [other, str(report)])
    by_hand: list[Any] = [other]
    for page in pages_of(report, name="report"):
        shown: dict[str, Any] = {"image": page.image(4000)}
        by_hand.append({**shown, "text": page.text()} if text else shown)
    plain = reranker.rank("red", by_hand)
    places = {(0, None): 0, (1, 1): 1, (1, 2): 2, (1, 3): 3}
    assert [(places[r.index, r.page], r.score) for r in ranking] == [(r.index, r.score) for r in plain]
    shown_as = {(row["document"], row.get("page")) for row in ranking.to_dict()["results"]}
    assert shown_as == {(None, None), *((str(report), page) for page in (1, 2, 3))}
    again = reranker.rank("red", [other, report.read_bytes()])
    assert [(r.page, r.score) for r in again] == [(r.page, r.score) for r in ranking]


def test_features_of_pages_are_cached(backbone: Backbone, report: Path) -> None:
    reranker = Reranker(backbone, "dense")
    reranker.rank("red", [report])
    assert (reranker.vision_cache.hits, reranker.vision_cache.misses) == (0, 3)
    reranker.rank("blue", [report])
    assert (reranker.vision_cache.hits, reranker.vision_cache.misses) == (3, 3)


def test_a_model_without_texts_ranks_the_pictures(report: Path) -> None:
    ranking = Reranker("photos", "dense").rank("a dog", [report])
    assert sorted(r.page or 0 for r in ranking) == [1, 2, 3]
    with pytest.raises(InputError, match="no place for a document's text"):
        Reranker("photos", "dense", page_text=True).rank("a dog", [report])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"%PDF-1.7 broken", "is not a PDF that can be read"),
        (write_pdf([Leaf(lines=("x",))], password="secret"), "is encrypted: it needs a password"),
        (write_pdf([]), "has no pages"),
        (b"", "is not a PDF that can be read"),
    ],
)
def test_a_bad_pdf_is_named(backbone: Backbone, tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.pdf"
    path.write_bytes(data)
    reranker = Reranker(backbone, "dense")
    good = Image.new("RGB", (48, 48), "red")
    with pytest.raises(InputError, match=rf"document 1 \(.*bad.pdf\) {message}"):
        reranker.rank("red", [good, path])
    ranking = reranker.rank("red", [good, path], on_error="skip")
    assert [(one.index, message in one.reason) for one in ranking.skipped] == [(1, True)]


LONG = """
import json, sys, threading, time
from radical_rerank import Reranker

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

reranker = Reranker("photos", "radical", keep=0.2)
reranker.prepare()
start, most, running = resident(), 0, True

def watch():
    global most
    while running:
        most = max(most, resident())
        time.sleep(0.02)

watcher = threading.Thread(target=watch)
watcher.start()
ranking = reranker.rank("a dog on the grass", [sys.argv[1]], top_k=5)
running = False
watcher.join()
print(json.dumps({"bytes": most - start, "pages": [result.page for result in ranking],
                  "prompts": ranking.totals.prompts}))
"""


@pytest.mark.slow
def test_three_hundred_pages_fit_in_memory(tmp_path: Path) -> None:
    """Within 1.5 GB beyond the model. Drawn all at once, the pages would take 0.9 GB before anything else."""
    picture = Image.effect_mandelbrot((800, 1000), (-2, -1.5, 1, 1.5), 20).convert("RGB")
    path = tmp_path / "long.pdf"
    path.write_bytes(write_pdf([Leaf(lines=(f"page {n}",), picture=picture) for n in range(300)]))
    output = subprocess.run(
        [sys.executable, "-c", LONG, path], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    assert len(set(found["pages"])) == 5
    assert found["prompts"] == 29  # windows of 20, 10 apart
    assert found["bytes"] < 600e6
