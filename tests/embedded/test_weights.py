"""The model that ships: it loads fast, and it says what it does not know."""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from radical_rerank import Profile, RaDiCal, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.cli import main
from radical_rerank.embedded import MODELS
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.errors import OutOfWorldWarning
from radical_rerank.reranking.scores import auroc

FOLDER = MODELS["scenes"].folder


def test_it_is_small_and_whole() -> None:
    assert sum(f.stat().st_size for f in FOLDER.glob("*.safetensors")) <= 20_000_000
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json", "radical_template.json"):
        assert (FOLDER / name).is_file()
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen3_vl"
    assert config["text_config"]["num_hidden_layers"] >= 12


def test_it_loads_in_two_seconds() -> None:
    Backbone.from_pretrained("scenes")  # what is imported once is not the model's time
    start = time.perf_counter()
    reranker = Reranker.from_pretrained("scenes")
    assert time.perf_counter() - start < 2
    assert reranker.backbone.name == "scenes"
    assert reranker.window == 20


def test_its_profile_ships(embedded: Backbone, caplog: pytest.LogCaptureFixture) -> None:
    profile = Profile.find(embedded.identity)
    assert profile is not None
    assert profile.layers == tuple(range(embedded.shape.num_layers))
    assert profile.h_norm is not None
    assert max(profile.h_norm) - min(profile.h_norm) > 0.05  # not flat
    with caplog.at_level(logging.INFO, logger="radical_rerank"):
        Reranker(embedded, RaDiCal(keep=0.2)).rank("a red star", make_list("test", 0, 4).images)
    assert not caplog.records  # nothing had to be measured


def test_lists_longer_than_its_window(embedded: Backbone) -> None:
    item = make_list("test", 1, 50)
    ranking = Reranker(embedded, "radical", keep=0.2).rank(item.descriptions[0].text(), item.images)
    assert sorted(ranking.order) == list(range(50))
    assert len(ranking.reports) > 1
    assert all(len(report.indices) <= 20 for report in ranking.reports)


def test_it_says_what_it_does_not_know(embedded: Backbone) -> None:
    reranker = Reranker(embedded, "dense")
    images = make_list("test", 0, 3).images
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reranker.rank("A red star on the left", images)
    with pytest.warns(OutOfWorldWarning, match="'dog', 'frisbee'"):
        reranker.rank("a dog and a red frisbee", images)
    photo = Image.fromarray(np.zeros((300, 400, 3), dtype=np.uint8))
    with pytest.warns(OutOfWorldWarning, match="knows only generated scenes"):
        reranker.rank("a red star", [*images, photo])


def test_the_command_line_uses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = make_list("test", 2, 4)
    paths = []
    for number, image in enumerate(item.images):
        paths.append(str(tmp_path / f"{number}.png"))
        image.save(paths[-1])
    with pytest.raises(SystemExit) as stop:
        main(["rank", item.descriptions[0].text(), *paths, "--model", "scenes", "--json"])
    assert not stop.value.code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"] == "scenes"
    assert "warning" not in captured.err
    Image.new("RGB", (640, 480), "white").save(tmp_path / "photo.jpg")
    with pytest.raises(SystemExit):
        main(["rank", "a red star", *paths, str(tmp_path / "photo.jpg"), "--model", "scenes"])
    notes = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(notes) == 1
    assert "for photographs, use the model photos or a large model" in notes[0]


@pytest.mark.slow
def test_it_can_tell_that_nothing_fits(embedded: Backbone) -> None:
    """At 20% of the tokens, on lists whose match was taken out and on lists that have one."""
    reranker = Reranker(embedded, "radical", keep=0.2)
    assert reranker.template.none == " no"
    confidence, held = [], []
    for seed in range(40):
        item = make_list("test", 900_000 + seed, 21)
        target = item.targets[0]
        other = (target + 1) % 21
        for hidden in (target, other):
            ranking = reranker.rank(item.descriptions[0].text(), item.without([hidden]).images)
            assert ranking.calibrated
            confidence.append(ranking.confidence)
            held.append(hidden != target)
    assert auroc(confidence, held) >= 0.85
