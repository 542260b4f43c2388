"""Things that look alike and differ: masks of one length, draws of two layers, entries of one picture."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from radical_rerank import RaDiCal, Random, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.records import Cell
from radical_rerank.lab.runner import Runner
from radical_rerank.method import kv_bytes, macs
from radical_rerank.reranking import Ranking
from radical_rerank.reranking.encoding import VisionCache
from radical_rerank.reranking.prompt import PromptTemplate
from tests.cases import PROFILE, draw_list, greedy, make_case, model_of, stack
from tests.tiny import TINY_FAMILIES


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_layers_of_one_length_may_hold_different_tokens(family: str) -> None:
    """The longest list keeps its length at every stage, the other loses tokens behind it: decoding must not
    take one layer's mask for another's."""
    model = model_of(family)
    shapes = [(1, 1)] if family.startswith("internvl") else [(1, 2)]
    text = 80 if family.startswith("internvl") else 60
    long = make_case(family, shapes, text=text, seed=1)
    short = make_case(family, [(1, 1), (1, 1)] if family.startswith("internvl") else [(3, 4), (4, 3)], seed=2)
    assert long.layout.length > short.layout.length
    # The long list's tokens: 2 or 16, of which one stage takes some, and the next none.
    pruner = RaDiCal(keep=0.3, layers=(1, 3, 5), profile=PROFILE)
    with torch.no_grad(), pruner.on(model, [long.layout, short.layout]) as run:
        together = model.generate(
            **stack([long, short]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    for row, case in enumerate((long, short)):
        with pruner.on(model, case.layout) as alone:
            steps = greedy(model, case.inputs, 5)
        assert [r.after for r in run.stages[row]] == [r.after for r in alone.stages[0]]
        for a, b in zip(together.logits, steps, strict=True):
            torch.testing.assert_close(a[row], b, atol=1e-4, rtol=0)
    lost = [[record.before - record.after for record in records] for records in run.stages]
    if not family.startswith("internvl"):
        assert any(not a and b for a, b in zip(*lost, strict=True)), lost  # equal lengths, other tokens


def test_random_draws_anew_at_every_layer() -> None:
    def draw(layer: int, seed: int = 0) -> torch.Tensor:
        view: Any = SimpleNamespace(layer=layer, key=3, alive=torch.arange(50), note=lambda **facts: None)
        view.candidate_of = torch.zeros(50, dtype=torch.long)
        return Random(keep=0.5, profile=PROFILE, seed=seed).score(view)

    assert torch.equal(draw(2), draw(2))
    assert not torch.equal(draw(2), draw(5))
    # Not the same numbers in another order either, nor shifted.
    assert len(set(draw(2).tolist()) & set(draw(5).tolist())) < 5
    assert not torch.equal(draw(2), draw(2, seed=1))


def test_the_encoder_s_signals_are_cached_apart(backbone: Backbone) -> None:
    """A picture that was seen without signals is encoded again for a method that reads them, and back."""
    query, images = draw_list(4, 5)
    alone = Reranker(backbone, "visionzip", keep=0.5).rank(query, images)
    plain = Reranker(backbone, "dense").rank(query, images)
    for first, second, expected in (("dense", "visionzip", alone), ("visionzip", "dense", plain)):
        cache = VisionCache(1 << 30)
        for name in (first, second):
            found = Reranker(backbone, name, keep=0.5, vision_cache=cache).rank(query, images)
        assert found.order == expected.order
        assert [r.score for r in found] == pytest.approx([r.score for r in expected], abs=1e-5)
        assert cache.misses == 10
        assert len(cache) == 10


# The runner.


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
    assert pruner.profile is runner.profile is PROFILE
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
