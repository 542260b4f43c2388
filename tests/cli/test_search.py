"""`radical search` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.cli import main, search
from radical_rerank.embedded.scenes.drawing import render
from radical_rerank.embedded.scenes.embedder import SceneEmbedder
from radical_rerank.embedded.scenes.gallery import make_gallery
from tests.pdfs import Leaf, write_pdf

GALLERY = make_gallery("test", 5, size=30, queries=1)
QUERY = GALLERY.descriptions[0].text()


@pytest.fixture(scope="module")
def scenes() -> Backbone:
    return Backbone.from_pretrained("scenes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """30 scenes in three folders."""
    monkeypatch.setenv("COLUMNS", "240")
    for number, scene in enumerate(GALLERY.scenes):
        path = tmp_path / "pictures" / str(number // 10) / f"{number} [x].png"
        path.parent.mkdir(parents=True, exist_ok=True)
        render(scene)[0].save(path)
        os.utime(path, (1, 1))
    return tmp_path / "pictures"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["search", *arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_search_equals_embedding_and_ranking_by_hand(
    folder: Path, scenes: Backbone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backbone, "from_pretrained", lambda name="", **_: scenes)
    options = ["--model", "scenes", "--candidates", "8", "--top-k", "3", "--keep", "0.5"]
    code, out, err = run(capsys, QUERY, str(folder), *options, "--json")
    assert code == 0
    assert "embedding" in err
    data = json.loads(out)
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.relative_to(folder).as_posix())
    embedder = SceneEmbedder(scenes)
    scores = (embedder.embed_images(paths) @ embedder.embed_queries([QUERY])[0]).tolist()
    first = sorted(range(30), key=lambda n: -scores[n])[:8]
    ranking = Reranker(scenes, keep=0.5).rank(QUERY, [paths[n] for n in first], top_k=3)
    assert [result["path"] for result in data["results"]] == [str(result.document) for result in ranking]
    assert [result["rank"] for result in data["results"]] == [1, 2, 3]
    for result, own in zip(data["results"], ranking, strict=True):
        assert result["score"] == pytest.approx(own.score, abs=1e-4)
        assert result["first_stage"]["rank"] == own.index + 1
        assert result["first_stage"]["score"] == pytest.approx(scores[first[own.index]], abs=1e-5)
    assert data["index"] | {"file": ""} == {
        "file": "", "pictures": 30, "new": 30, "changed": 0, "removed": 0, "embedded": 30, "unreadable": {},
    }  # fmt: skip
    assert set(data["seconds"]) == {"load", "index", "retrieve", "rerank"}

    (folder / "broken.png").write_text("no")
    os.utime(folder / "broken.png", (1, 1))
    code, out, err = run(capsys, QUERY, str(folder), *options)
    assert code == 0
    assert f"left out: {folder}/broken.png is not in an image format" in err
    assert [line.split()[5] for line in out.splitlines() if ".png" in line] == [
        str(result.document).split()[0] for result in ranking
    ]
    assert "30 pictures, searched with scenes" in out
    code, out, err = run(capsys, QUERY, str(folder), *options, "--json")
    assert "left out" not in err
    assert list(json.loads(out)["index"]["unreadable"]) == ["broken.png"]
    code, out, _ = run(capsys, QUERY, str(folder), *options, "--json", "--rebuild")
    assert json.loads(out)["index"]["embedded"] == 30


def test_the_page_has_the_results_in_order(
    folder: Path,
    tmp_path: Path,
    scenes: Backbone,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Backbone, "from_pretrained", lambda name="", **_: scenes)
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    Image.new("RGB", (1600, 900), "red").save(folder / "large.png")
    page, query = tmp_path / "out" / "page.html", "a red circle </h1> {{folder}}"
    code, out, _ = run(capsys, query, str(folder), "--model", "scenes", "--page", str(page), "--json")
    assert code == 0
    assert shown == []
    text = page.read_text(encoding="utf-8")
    assert "“a red circle &lt;/h1&gt; {{folder}}”" in text
    results = json.loads(out)["results"]
    places = [text.index(f"<p>{result['path']}</p>") for result in results]
    assert places == sorted(places)
    assert text.count("<img") == 5
    assert text.count("data:image/webp;base64,") == 5
    (folder / "report.pdf").write_bytes(write_pdf([Leaf(["one"]), Leaf(["two"])]))
    every = ["--model", "scenes", "--candidates", "40", "--top-k", "40", "--page", str(page)]
    code, out, _ = run(capsys, "red", str(folder), *every, "--json")
    pages = [result["page"] for result in json.loads(out)["results"] if result["path"].endswith(".pdf")]
    assert sorted(pages) == [1, 2]
    text = page.read_text(encoding="utf-8")
    assert text.count("<img") == 33
    assert f"<p>{folder}/report.pdf, page 2</p>" in text
    _, out, _ = run(capsys, "red", str(folder), *every)
    assert f"{folder}/report.pdf, page 2" in out
    code, _, err = run(capsys, "red", str(folder), "--model", "scenes", "--open")
    assert code == 0
    (address,) = shown
    assert Path(address.removeprefix("file://")).is_file()
    assert address.removeprefix("file://") in err.replace("\n", "")


def test_which_first_stage(scenes: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    from radical_rerank import retrieval

    photos = Backbone.from_pretrained("photos")
    monkeypatch.setattr(Backbone, "from_pretrained", {"photos": photos, "scenes": scenes}.__getitem__)
    monkeypatch.setattr(retrieval, "embedder_of", lambda name: SimpleNamespace(name=f"another, {name}"))
    assert search.first_stage_of(None, scenes).name == "scenes"
    assert search.first_stage_of(None, photos).name == "photos"
    assert search.first_stage_of("photos", scenes).fingerprint == photos.fingerprint
    assert search.first_stage_of("scenes", scenes).fingerprint == scenes.fingerprint
    assert search.first_stage_of("siglip2", scenes).name == "another, siglip2"


def test_errors_name_the_folder(
    tmp_path: Path, scenes: Backbone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(Backbone, "from_pretrained", lambda name="", **_: scenes)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, query, message in (
        ("none", "red", f"the folder {tmp_path}/none does not exist"),
        ("file", "red", f"{tmp_path}/file is not a folder"),
        ("empty", "red", f"the folder {tmp_path}/empty has no pictures that can be read"),
        ("empty", " ", "the query is empty"),
    ):
        code, out, err = run(capsys, query, str(tmp_path / name), "--model", "scenes")
        assert (code, out) == (2, "")
        assert message in err.replace("\n", " ")


WATCHED = """
import os, sys
folder, opened = sys.argv.pop(1), []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(folder):
        opened.append(os.fsdecode(arguments[0]))
sys.addaudithook(watch)
from radical_rerank.cli import main
try:
    main(sys.argv[1:])
finally:
    print("opened:", *sorted(opened), sep="\\n", file=sys.stderr)
"""


@pytest.mark.slow
def test_a_later_search_reads_the_candidates_and_nothing_else(folder: Path) -> None:
    outputs = []
    for _ in range(2):
        options = ["--model", "scenes", "--candidates", "6", "--top-k", "6", "--json"]
        command = [sys.executable, "-c", WATCHED, str(folder), "search", QUERY, str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        opened = done.stderr.partition("opened:\n")[2].splitlines()
        outputs.append((json.loads(done.stdout), opened))
    (first, all_read), (second, read) = outputs
    assert first["results"] == second["results"]
    candidates = sorted(result["path"] for result in second["results"])
    assert read == candidates
    assert all_read == sorted([*map(str, folder.rglob("*.png")), *candidates])
