"""The model of photographs that ships: small, fast to load, honest about what it is."""

from __future__ import annotations

import json
import logging
import re
import time
import warnings
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from radical_rerank import Profile, RaDiCal, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.cli import main
from radical_rerank.embedded import DEFAULT_MODEL, MODELS
from radical_rerank.embedded.card import write_card
from radical_rerank.embedded.photos.datasets import photo_lists
from radical_rerank.embedded.photos.figures import LARGE_SIZE, plain_words
from radical_rerank.embedded.photos.pictures import sample_pictures
from radical_rerank.errors import SmallModelWarning
from radical_rerank.reranking import load_image

FOLDER = MODELS["photos"].folder
FLICKR8K = Path(__file__).parents[4] / "shared" / "flickr8k"


@pytest.fixture(scope="module")
def photos() -> Backbone:
    return Backbone.from_pretrained("photos")


def test_it_is_small_and_whole() -> None:
    assert sum(f.stat().st_size for f in FOLDER.glob("*.safetensors")) <= 40_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "internvl_lite"
    assert config["text_config"]["model_type"] == "qwen3"
    assert config["text_config"]["num_hidden_layers"] >= 12


def test_it_loads_in_two_seconds(photos: Backbone) -> None:
    start = time.perf_counter()
    reranker = Reranker()
    assert time.perf_counter() - start < 2
    assert reranker.backbone.name == DEFAULT_MODEL == "photos"
    assert reranker.window == 20


def test_its_profile_ships(photos: Backbone, caplog: pytest.LogCaptureFixture) -> None:
    profile = Profile.find(photos.identity)
    assert profile is not None
    assert profile.h_norm is not None
    assert max(profile.h_norm) - min(profile.h_norm) > 0.05  # not flat
    with caplog.at_level(logging.INFO, logger="radical_rerank"):
        Reranker(photos, RaDiCal(keep=0.2)).rank("a cat", sample_pictures()[:4])
    assert not caplog.records  # nothing had to be measured


def test_it_says_once_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radical_rerank.embedded._said", set())
    files = [str(tmp_path / f"{colour}.jpg") for colour in ("white", "green", "blue")]
    for file in files:
        Image.new("RGB", (640, 480), Path(file).stem).save(file)
    with pytest.raises(SystemExit):
        main(["rank", "a dog running in a field", *files])
    notes = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(notes) == 1
    assert "small model" in notes[0]
    assert "Qwen/Qwen3-VL" in notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SmallModelWarning)
        Reranker(keep=0.2).rank("a dog", files)


@pytest.mark.slow
def test_twenty_large_photographs_are_four_seconds_of_two_cores(photos: Backbone) -> None:
    """Counted as the processor's time in one thread, which other programs change little."""
    files = []
    for number in range(20):
        picture = load_image(sample_pictures()[number % 10]).rotate(180 * (number // 10))
        buffer = BytesIO()
        picture.resize(LARGE_SIZE).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    reranker, threads = Reranker(photos, "radical", keep=0.2), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        assert len(reranker.rank("a cat", files)) == 20
        assert time.process_time() - start < 2 * 4
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_plain_words_find_their_pictures(photos: Backbone) -> None:
    found = plain_words(photos)
    assert found["queries"] == 12
    # The card names the five that it does not find.
    assert found["Dense"] >= 7
    assert found["RaDiCal 20%"] >= 7


def test_its_figures_hold_the_bars() -> None:
    figures = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))["figures"]
    first, dense = figures["first stage"], figures["Dense, N = 20"]["MRR@10"]
    assert first["R@1"] >= 0.15
    assert first["R@20"] >= 0.65
    assert dense >= 0.75
    assert figures["Dense, pools with the match inside"]["MRR@10"] >= first["MRR@10, match inside"]
    assert figures["RaDiCal 20%, N = 20"]["MRR@10"] >= 0.99 * dense
    assert figures["Random 20%, the same layers, N = 20"]["MRR@10"] <= 0.95 * dense
    assert figures["cold list"]["pictures"] == 20
    assert figures["cold list"]["seconds"] < 4
    names = figures["class names"]  # nine of twelve names that are in no caption
    assert names["queries"] == 17
    assert names["Dense"] / names["queries"] >= 9 / 12
    assert names["RaDiCal 20%"] / names["queries"] >= 9 / 12


def test_its_card_is_what_the_command_writes(tmp_path: Path) -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    commit = re.search(r"commit `([0-9a-f]{40})`", card)
    assert commit
    for name in ("config.json", "figures.json", "training_log.jsonl", "radical_template.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"0" * (FOLDER / "model.safetensors").stat().st_size)
    assert write_card("photos", tmp_path, commit[1]).read_text(encoding="utf-8") == card


@pytest.mark.slow
def test_it_ranks_photographs_that_it_never_saw(photos: Backbone) -> None:
    if not FLICKR8K.is_dir():
        pytest.skip("needs the photographs of Flickr8k, which do not ship")
    data, reranker = photo_lists(FLICKR8K, lists=12), Reranker(photos, "radical", keep=0.2)
    gains = []
    for task in data.tasks:
        ranking = reranker.rank(task.text, [data.picture(name) for name in task.candidates or ()])
        names = [(task.candidates or ())[index] for index in ranking.order]
        gains.append(1 / (1 + next(rank for rank, name in enumerate(names) if name in task.relevant)))
    assert sum(gains) / len(gains) > 0.5  # chance is 0.18
