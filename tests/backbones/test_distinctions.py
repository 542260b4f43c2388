"""Things that look alike and differ: masks of one length, draws of two layers, entries of one picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radical_rerank import RaDiCal, Random, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.reranking.encoding import VisionCache
from tests.cases import PROFILE, draw_list, first_fast, greedy, make_case, model_of, stack
from tests.tiny import TINY_FAMILIES, on_grid


@pytest.mark.slow
@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_layers_of_one_length_may_hold_different_tokens(family: str) -> None:
    """The longest list keeps its length at every stage, the other loses tokens behind it: decoding must not
    take one layer's mask for another's."""
    model = model_of(family)
    shapes = [(1, 1)] if not on_grid(family) else [(1, 2)]
    text = 80 if not on_grid(family) else 60
    long = make_case(family, shapes, text=text, seed=1)
    short = make_case(family, [(1, 1), (1, 1)] if not on_grid(family) else [(3, 4), (4, 3)], seed=2)
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
    if on_grid(family):
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


@pytest.mark.slow
def test_the_encoder_s_signals_are_cached_apart(backbone: Backbone) -> None:
    """A picture that was seen without signals is encoded again for a method that reads them, and back."""
    query, images = draw_list(4, 5)
    alone = Reranker(backbone, "visionzip", keep=0.5).rank(query, images)
    plain = Reranker(backbone, "dense").rank(query, images)
    for first, second, expected in (("dense", "visionzip", alone), ("visionzip", "dense", plain)):
        cache = VisionCache(1 << 30)
        for name in (first, second):
            ranking = Reranker(backbone, name, keep=0.5, vision_cache=cache).rank(query, images)
        assert ranking.order == expected.order
        assert [r.score for r in ranking] == pytest.approx([r.score for r in expected], abs=1e-5)
        assert cache.misses == 10
        assert len(cache) == 10
