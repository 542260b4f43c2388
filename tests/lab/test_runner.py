"""The runner: what a record holds, and the key that identifies it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from radical_rerank import RaDiCal, Random, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError, ScoringError
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.records import Cell, Records, provenance
from radical_rerank.lab.runner import Runner, work_of
from radical_rerank.lab.tables import facts_of, summarize
from radical_rerank.method import kv_bytes, macs
from radical_rerank.pruning import METHODS, Profile, SparseVLM
from radical_rerank.reranking import Ranking
from radical_rerank.reranking.prompt import PromptTemplate
from tests.cases import PROFILE, draw_list
from tests.lab.data import (
    CELLS,
    drawn_lists,
    one_query,
)


def test_records_say_what_ran(runner: Runner, tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    runner.run(drawn_lists(), CELLS, records, limit=2)
    written = list(records)
    assert len(written) == 8
    for record in written:
        assert sorted(record["ranking"]) == sorted(f"{record['task']}-{i}" for i in range(6))
        assert record["commit"] == "test"
        assert record["measures"]["MRR@10"] > 0
    dense, radical = written[0], written[1]
    assert dense["flops_saved"] == 0 < radical["flops_saved"]
    assert radical["visual_tokens_left"] < 0.3 * radical["visual_tokens"]
    fresh = provenance()
    assert set(fresh) == {"commit", "versions"}
    assert fresh["versions"]["torch"].startswith("2.")


def test_seeds_shuffle_the_candidates(runner: Runner) -> None:
    seen = []
    rank = Reranker.rank
    data = drawn_lists(queries=1)

    def spy(self: Reranker, query: Any, documents: Any, **options: Any) -> Any:
        seen.append([document.tobytes() for document in documents])
        return rank(self, query, documents, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reranker, "rank", spy)
        cells = [Cell("Dense", "dense", seed=seed) for seed in (1, 2, 1)]
        list(runner.records_of(data, 0, cells))
    assert seen[0] == seen[2] != seen[1]
    assert sorted(seen[0]) == sorted(seen[1])


def test_a_query_without_candidates_is_named(runner: Runner) -> None:
    data = Dataset("bare", [Task("q7", "a red star", {"a": 1})], lambda name: b"", ["a"])
    with pytest.raises(InputError, match=r"q7 .* needs a first stage"):
        list(runner.records_of(data, 0, CELLS[:1]))
    with pytest.raises(InputError, match=r"q7 .* in the pools"):
        list(runner.records_of(data, 0, CELLS[:1], {"q7": []}))
    with pytest.raises(InputError, match="twice"):
        list(runner.records_of(data, 0, CELLS[:1], {"q7": ["a", "a"]}))


def key_with(
    backbone: Backbone, data: Dataset, cell: Cell, profile: Profile = PROFILE, **options: Any
) -> tuple[str, ...]:
    runner = Runner(backbone, {}, options=options, profile=profile)
    return runner.key(cell, 0, work_of(data, 0).content)


def test_the_key_holds_everything_that_changes_a_ranking(
    backbone: Backbone, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("RaDiCal", "radical", 0.5)
    template = PromptTemplate.of(backbone)
    model = str(tiny_folders["qwen3_vl"])
    half = Backbone.from_pretrained(model, dtype="bfloat16")
    seen = Profile.measured("tiny", [0.9, 0.9, 0.97, 0.8, 0.7, 0.55, 0.75, 0.85], 1, "made up for tests")
    keys = {
        "as it is": key_with(backbone, one_query(), cell),
        "data set": key_with(backbone, one_query("other"), cell),
        "pictures": key_with(backbone, one_query(seed=1, text=one_query().tasks[0].text), cell),
        "words": key_with(backbone, one_query(text="a red star"), cell),
        "judgements": key_with(backbone, one_query(relevant={"1": 1}), cell),
        "reference": key_with(backbone, one_query(reference="2"), cell),
        "candidates": key_with(backbone, one_query(candidates=("0", "1", "2")), cell),
        "reference or candidate": key_with(
            backbone, one_query(candidates=("0", "1", "2"), reference="3"), cell
        ),
        "their order": key_with(backbone, one_query(candidates=("1", "0", "2", "3")), cell),
        "dtype": key_with(half, one_query(), cell),
        "scorer": key_with(backbone, one_query(), cell, scorer="generate"),
        "image size": key_with(backbone, one_query(), cell, max_image_tokens=9),
        "template": key_with(backbone, one_query(), cell, template=replace(template, intro="Look: ")),
        "window": key_with(backbone, one_query(), cell, window=3),
        "stride": key_with(backbone, one_query(), cell, window=3, stride=2),
        "method": key_with(backbone, one_query(), Cell("RaDiCal", "random", 0.5)),
        "keep": key_with(backbone, one_query(), replace(cell, keep=0.4)),
        "seed": key_with(backbone, one_query(), replace(cell, seed=7)),
        "options": key_with(backbone, one_query(), replace(cell, options={"gap": 3})),
        "trust profile": key_with(backbone, one_query(), cell, seen),
    }
    with torch.no_grad():
        weight = half.model.lm_head.weight
        weight[0, 0] += 1
    keys["weights"] = key_with(half, one_query(), cell)
    monkeypatch.setattr(backbone.tokenizer, "chat_template", "{{ messages[0].content }}")
    keys["chat template"] = key_with(backbone, one_query(), cell)
    monkeypatch.undo()
    monkeypatch.setattr(backbone.image_processor, "image_mean", [0.1, 0.1, 0.1])
    keys["preprocessing"] = key_with(backbone, one_query(), cell)
    monkeypatch.undo()
    same = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert not same
    # And nothing else: not the object, nor when it was made.
    again = Backbone.from_pretrained(model)
    assert key_with(again, one_query(), Cell("RaDiCal", "radical", 0.5)) == keys["as it is"]


def test_a_method_s_defaults_are_part_of_the_key(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that changes between versions is another setting, though nobody passed it."""
    before = key_with(backbone, one_query(), Cell("SparseVLM", "sparsevlm", 0.5))

    @dataclass(kw_only=True)
    class Changed(SparseVLM):
        recycle: float = 0.1

    monkeypatch.setitem(METHODS, "sparsevlm", Changed)
    assert key_with(backbone, one_query(), Cell("SparseVLM", "sparsevlm", 0.5)) != before


def test_a_picture_that_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    data = Dataset("files", [Task("q", "x", {"a": 1}, candidates=("a",))], lambda name: path)
    with pytest.raises(InputError, match=r"the picture a of files .*a\.png.*: No such file"):
        work_of(data, 0)
    Image.new("RGB", (4, 4)).save(path)
    first = work_of(data, 0).content
    Image.new("RGB", (4, 4), "red").save(path)
    assert work_of(data, 0).content != first


def test_a_query_that_cannot_be_ranked_is_named(backbone: Backbone) -> None:
    options = {"scorer": "generate", "max_new_tokens": 1, "on_unreadable": "raise"}
    runner = Runner(backbone, {}, options=options)
    with pytest.raises(ScoringError, match=r"^tiny, query q, Dense: the model's answer contains none"):
        list(runner.records_of(one_query(), 0, [Cell("Dense", "dense")]))


def test_an_answer_that_cannot_be_read_does_not_end_a_run(backbone: Backbone) -> None:
    """The prompt's order counts, costs are those of the pass, and the table says so."""
    runner = Runner(backbone, {}, options={"scorer": "generate", "max_new_tokens": 1})
    (record,) = runner.records_of(one_query(), 0, [Cell("Dense", "dense")])
    order = list(one_query().tasks[0].candidates or ())
    random.Random(f"42 {one_query().tasks[0].id}").shuffle(order)
    assert record["ranking"] == order
    assert (record["unreadable"], record["repairs"]) == (1, len(order))
    assert record["tokens"] > 0
    (row,) = summarize([record])
    assert row.unreadable == 1
    assert "answers without an order (the prompt's order was kept): Dense 1" in facts_of([row])


def sized_data(sizes: tuple[tuple[int, int], ...]) -> Dataset:
    text, images = draw_list(2, len(sizes))
    shown = [image.resize(size) for image, size in zip(images, sizes, strict=True)]
    names = tuple(str(i) for i in range(len(sizes)))
    task = Task("q", text, {"0": 1}, candidates=names)

    def picture(name: str) -> Image.Image:
        return shown[int(name)]

    return Dataset("sized", [task], picture)


def test_a_record_is_the_ranking_of_the_shuffled_list_under_the_cell_s_seed(backbone: Backbone) -> None:
    """Also the seed of a method that draws: two seeds are two draws."""
    data = sized_data(((64, 64),) * 6)
    runner = Runner(backbone, {}, profile=PROFILE)
    for seed in (0, 7, 123):
        (record,) = runner.records_of(data, 0, [Cell("Random", "random", 0.3, seed=seed)])
        own = Reranker(backbone, Random(keep=0.3, profile=PROFILE, seed=seed))
        order = list(data.tasks[0].candidates or ())
        random.Random(f"{seed} q").shuffle(order)
        ranking = own.rank(data.tasks[0].text, [data.picture(name) for name in order])
        assert record["ranking"] == [order[i] for i in ranking.order]
        assert record["scores"] == pytest.approx([result.score for result in ranking], abs=2e-5)


def test_the_runner_calibrates_on_its_own_prompt(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile measured with other words and sizes than those that are ranked would be another one's."""
    asked: list[Any] = []

    def profile_of(model: Any, **options: Any) -> Any:
        asked.append(model)
        return PROFILE

    monkeypatch.setattr("radical_rerank.lab.runner.profile_of", profile_of)
    template = replace(PromptTemplate.of(backbone), intro="Look: ")
    runner = Runner(backbone, {}, options={"max_image_tokens": 9, "template": template})
    runner.reranker(Cell("FastV", "fastv", 0.5))
    assert not asked
    pruner = runner.reranker(Cell("RaDiCal", "radical", 0.5)).pruner
    assert isinstance(pruner, RaDiCal)
    assert pruner.profile == runner.profile
    assert runner.profile == PROFILE
    (model,) = asked
    assert (model.max_image_tokens, model.template) == (9, template)


def test_savings_of_several_windows_are_those_of_all_their_work(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sized_data(((128, 128), (128, 96), (128, 128), (32, 32), (32, 32), (32, 32)))
    runner = Runner(backbone, {}, options={"window": 3, "stride": 2}, profile=PROFILE)
    rankings: list[Ranking] = []
    rank = Reranker.rank

    def spy(self: Reranker, *args: Any, **options: Any) -> Ranking:
        rankings.append(rank(self, *args, **options))
        return rankings[-1]

    monkeypatch.setattr(Reranker, "rank", spy)
    # LowRes has a grid to respect: its windows save different shares.
    (record,) = runner.records_of(data, 0, [Cell("LowRes", "lowres", 0.3)])
    reports = rankings[0].reports
    assert len(reports) > 1
    assert len({report.tokens for report in reports}) > 1
    for name, cost in (("flops_saved", macs), ("kv_saved", kv_bytes)):
        spent = sum(cost(report.tokens_per_layer, backbone.shape) for report in reports)
        dense = sum(cost([report.tokens] * backbone.shape.num_layers, backbone.shape) for report in reports)
        plain = sum(getattr(report, name) for report in reports) / len(reports)
        assert record[name] == pytest.approx(1 - spent / dense)
        assert record[name] != pytest.approx(plain, rel=1e-3)
