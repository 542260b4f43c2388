"""The model that ships: it loads fast, it ranks well, it says what it does not know."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from radical_rerank import Profile, RaDiCal, Reranker
from radical_rerank.backbones import DEFAULT_MODEL, Backbone
from radical_rerank.cli import main
from radical_rerank.embedded.scenes.datasets import scenes, scenes_composed
from radical_rerank.embedded.scenes.figures import Card, question_accuracy, ranking_quality, signals
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.embedded.scenes.world import COLOURS, SHAPES
from radical_rerank.errors import OutOfWorldWarning
from radical_rerank.retrieval import SceneEmbedder

FOLDER = model_folder(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return Backbone.from_pretrained()


def test_it_is_small_and_whole() -> None:
    assert sum(f.stat().st_size for f in FOLDER.glob("*.safetensors")) <= 20_000_000
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json", "radical_template.json"):
        assert (FOLDER / name).is_file()
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen3_vl"
    assert config["text_config"]["num_hidden_layers"] >= 12


def test_it_loads_in_two_seconds() -> None:
    Backbone.from_pretrained()  # what is imported once is not the model's time
    start = time.perf_counter()
    reranker = Reranker.from_pretrained()
    assert time.perf_counter() - start < 2
    assert reranker.backbone.name == DEFAULT_MODEL
    assert reranker.window == 20


def test_its_profile_ships(embedded: Backbone) -> None:
    profile = Profile.find(embedded.identity)
    assert profile is not None
    assert profile.layers == tuple(range(embedded.shape.num_layers))
    assert profile.h_norm is not None
    assert max(profile.h_norm) - min(profile.h_norm) > 0.05  # not flat
    said: list[str] = []
    reranker = Reranker(embedded, RaDiCal(keep=0.2), say=said.append)
    reranker.rank("a red star", make_list("test", 0, 4).images)
    assert not said  # nothing had to be measured


def test_it_ranks_held_out_lists_dense_and_pruned(embedded: Backbone) -> None:
    """A small sample of what the card reports; generous margins for its size."""
    data = scenes(lists=16)
    rerankers = {name: Reranker(embedded, name, keep=0.2) for name in ("dense", "radical", "random")}
    dense, pruned, random = (found["MRR@10"] for found in ranking_quality(rerankers, data).values())
    assert dense > 0.75
    assert pruned > 0.93 * dense
    assert random < 0.9 * pruned
    composed = ranking_quality({"dense": Reranker(embedded, "dense")}, scenes_composed(lists=16))
    assert composed["dense"]["MRR@10"] > 0.55
    assert question_accuracy(embedded, 30)["yes/no"] > 0.75


def test_its_signals_are_those_that_pruning_relies_on(embedded: Backbone) -> None:
    found = signals(embedded, 20)
    assert found["AUC"] > 0.8
    assert found["least positive share"] > 0.2
    single = max(found["evidence kept by relevance"], found["evidence kept by uniqueness"])
    assert found["evidence kept by DTI"] > single
    assert min(found["evidence kept by relevance"], found["evidence kept by uniqueness"]) > 0.3
    assert found["evidence kept by random"] == pytest.approx(0.2, abs=0.08)


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
        main(["rank", item.descriptions[0].text(), *paths, "--json"])
    assert not stop.value.code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"] == DEFAULT_MODEL
    assert "note" not in captured.err
    Image.new("RGB", (640, 480), "white").save(tmp_path / "photo.jpg")
    with pytest.raises(SystemExit):
        main(["rank", "a red star", *paths, str(tmp_path / "photo.jpg")])
    notes = [line for line in capsys.readouterr().err.splitlines() if "note" in line]
    assert len(notes) == 1
    assert "name a real model for photographs" in notes[0]


def test_its_first_stage_is_late_interaction(embedded: Backbone) -> None:
    item = make_list("test", 3, 6)
    queries = ["a small red star left of a blue ring", "a green heart"]
    plain, paired = SceneEmbedder(embedded), SceneEmbedder(embedded, pairs=True)
    vectors = plain.embed_images(item.images)
    found = plain.embed_queries(queries) @ vectors.T
    more = paired.embed_queries(queries) @ vectors.T - found
    table = torch.nn.functional.normalize(embedded.model.get_input_embeddings().weight.detach(), dim=-1)

    def word(text: str) -> torch.Tensor:
        return table[embedded.tokenizer(" " + text, add_special_tokens=False)["input_ids"][0]]

    for row, query in enumerate(queries):
        words = query.split()
        for column, image in enumerate(item.images):
            (feature,) = embedded.encode([embedded.preprocess(image, 384)])
            tokens = torch.nn.functional.normalize(feature.tokens, dim=-1)
            expected = both = 0.0
            for i, name in enumerate(words):
                if name in (*COLOURS, *SHAPES, "small", "large", "left", "right", "top", "bottom"):
                    expected += max(float(t @ word(name)) for t in tokens)
                if name in COLOURS and words[i + 1] in SHAPES:
                    both += max(float(t @ word(name) + t @ word(words[i + 1])) for t in tokens)
            assert float(found[row, column]) == pytest.approx(expected, abs=1e-4)
            assert float(more[row, column]) == pytest.approx(both, abs=1e-4)


def test_its_card_says_where_it_comes_from_and_what_was_measured(embedded: Backbone) -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(r"commit `[0-9a-f]{40}`", card)
    assert "radical scenes train" in card
    assert "radical scenes evaluate" in card
    figures = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    groups = Card(embedded, 1000, None, lambda items, label: items).groups()
    assert set(figures["figures"]) == {name for names in groups for name in names}
    for name, values in figures["figures"].items():
        if "MRR@10" in values:
            line = next(line for line in card.splitlines() if line.startswith(f"| {name} |"))
            assert f"| {values['MRR@10']:.3f} |" in line
            assert line.endswith(f"| {values['lists']} |")


def test_the_evaluation_goes_on_where_it_was_killed(
    embedded: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def groups(self: Card) -> dict:
        def measure(name: str) -> dict[str, dict[str, float]]:
            calls.append(name)
            if name == "b" and calls.count("b") == 1:
                raise KeyboardInterrupt
            return {name: {"value": 1.0}}

        return {(name,): lambda name=name: measure(name) for name in "abc"}

    monkeypatch.setattr(Card, "groups", groups)
    card = Card(embedded, 5, tmp_path / "figures.json", lambda items, label: items)
    with pytest.raises(KeyboardInterrupt):
        card.run()
    assert card.run() == {name: {"value": 1.0} for name in "abc"}
    assert calls == ["a", "b", "b", "c"]
    with pytest.raises(ValueError, match="another model or number of lists"):
        Card(embedded, 6, tmp_path / "figures.json", lambda items, label: items).run()


def test_the_demo_writes_its_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radical_rerank.cli", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(
        [*command, "--size", "60", "--queries", "2", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert len(data["rows"]) == 2
    for row in data["rows"]:
        dense, pruned = row["Dense"], row["RaDiCal 20%"]
        budget = 0.2 * dense["visual_tokens"]
        assert budget <= pruned["visual_tokens_left"] < budget + 4  # four stages, each rounded up
        assert 0 < pruned["flops_saved"] < row["RaDiCal 10%"]["flops_saved"]
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10_000
