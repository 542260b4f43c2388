"""Decoders of which only some layers have softmax attention: where stages go, and what linear layers see."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from radical_rerank import FastV, RaDiCal, Random, VisionZip, build
from radical_rerank.backbones import Backbone, family_of
from radical_rerank.backbones.engine import at_attention
from radical_rerank.errors import CalibrationError, UnsupportedModelError
from radical_rerank.pruning import Profile, Stage
from radical_rerank.reranking.calibration import calibrate
from tests.cases import PROFILE, draw_list, first_fast, greedy, make_case, model_of, stack
from tests.tiny import READABLE, tiny_config

SHAPES = [(3, 4), (2, 2), (4, 3)]
PART = replace(
    PROFILE,
    layers=(1, 4, 6),
    alpha=tuple(PROFILE.alpha_at(layer) for layer in (1, 4, 6)),
    h_norm=tuple((PROFILE.h_norm or ())[layer] for layer in (1, 4, 6)),
)


class Anywhere(Random):
    """Draws at random, in any layer."""

    reads_attention: ClassVar[bool] = False


def test_stages_go_to_the_nearest_layer_with_attention() -> None:
    stages = [Stage(0, 0.5), Stage(2, 0.5), Stage(3, 0.5), Stage(7, 0.5, "after")]
    moved = at_attention(stages, (1, 4, 6))
    assert moved == [Stage(1, 0.25), Stage(4, 0.5), Stage(6, 0.5, "after")]
    # Two that are equally near: the shallower saves more.
    assert at_attention([Stage(5, 0.5)], (4, 6)) == [Stage(4, 0.5)]
    # Shares of all tokens do not multiply: the last one says what is left.
    shares = [Stage(0, 0.5, of_all=True), Stage(1, 0.2, of_all=True)]
    assert at_attention(shares, (1, 4)) == [Stage(1, 0.2, of_all=True)]
    everywhere = [Stage(layer, 0.9) for layer in range(4)]
    assert at_attention(everywhere, range(4)) == everywhere


def test_published_hybrids_have_attention_in_every_fourth_layer() -> None:
    config = tiny_config("qwen3_5", num_layers=12)
    config.text_config.layer_types = None
    config.text_config.__post_init__()
    assert family_of(config).readable == (3, 7, 11)


@pytest.mark.parametrize("name", ["fastv", "pyramiddrop", "sparsevlm", "dart"])
def test_every_method_reads_where_there_is_attention(name: str) -> None:
    model, case = model_of("qwen3_5"), make_case("qwen3_5", SHAPES)
    pruner = build(name, keep=0.3)
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        model(**case.inputs)
    assert {record.layer for record in run.stages[0]} <= set(READABLE["qwen3_5"])
    assert run.stages[0][-1].after == pruner.budget_of(len(case.layout.positions))


def test_a_method_that_reads_no_attention_prunes_anywhere() -> None:
    model, case = model_of("qwen3_5"), make_case("qwen3_5", SHAPES)
    assert not VisionZip.reads_attention
    assert FastV.reads_attention
    with torch.no_grad(), Anywhere(keep=0.3, layers=(0, 2)).on(model, case.layout) as run:
        steps = greedy(model, case.inputs, 3)
    assert [record.layer for record in run.stages[0]] == [0, 2]
    assert all(logits.isfinite().all() for logits in steps)


def test_attention_is_not_read_where_there_is_none() -> None:
    class Liar(RaDiCal):
        reads_attention: ClassVar[bool] = False

    for family in ("qwen3_5", "gemma3"):
        model, case = model_of(family), make_case(family, SHAPES)
        liar = Liar(keep=0.3, layers=(2,), alpha=0.5)
        with (
            torch.no_grad(),
            pytest.raises(UnsupportedModelError, match="layer 2 has no attention over the whole prompt"),
            liar.on(model, case.layout),
        ):
            model(**case.inputs)


def test_alpha_maximin_chooses_among_the_layers_that_were_measured() -> None:
    chosen = [stage.layer for stage in RaDiCal(profile=PART).stages(8)]
    assert chosen == [1, 4, 6]  # K is 4, but there are three
    assert [stage.keep for stage in RaDiCal(keep=0.3, profile=PART).stages(8)] == [0.3 ** (1 / 3)] * 3
    assert len(RaDiCal(profile=PART, num_stages=2, gap=1).stages(8)) == 2
    assert RaDiCal(profile=PART, strategy="max_gradient", num_stages=2).stages(8)
    with pytest.raises(CalibrationError, match="no value for layer 2"):
        RaDiCal(profile=PART, layers=(2,)).stages(8)
    with pytest.raises(CalibrationError, match="the model has 6 layers"):
        RaDiCal(profile=PART).stages(6)


@pytest.mark.slow
def test_calibration_measures_the_layers_with_attention(backbones: dict[str, Backbone]) -> None:
    profile = calibrate(backbones["qwen3_5"], [draw_list(seed, 3) for seed in range(2)])
    assert profile.layers == READABLE["qwen3_5"]
    assert profile.lists == 2
    assert min(profile.alpha) == 0
    assert (
        Profile._parse(profile.save(profile.cache_path(backbones["qwen3_5"].identity)).read_text()) == profile
    )


def test_a_window_covers_the_same_part_of_the_prompt_after_pruning() -> None:
    """A window of 20 positions: with all but one token of each image gone, more than 20 survivors do not
    come into reach, and fewer than 20 do not let it reach further back."""
    model, case = model_of("gemma3"), make_case("gemma3", [(1, 1)] * 3)
    masks: dict[int, torch.Tensor] = {}
    with torch.no_grad(), Anywhere(keep=0.1, layers=(2,)).on(model, case.layout) as run:
        layers = model.model.language_model.layers
        handles = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, at=at: masks.__setitem__(at, kwargs["attention_mask"][0, 0]),
                with_kwargs=True,
            )
            for at, layer in enumerate(layers)
        ]
        model(**case.inputs)
        for handle in handles:
            handle.remove()
        place = run._state.index[0]  # type: ignore[attr-defined]
    image = torch.tensor([token == 255 for token in case.ids])[place]
    run_of = torch.tensor([sum(span.start <= p for span in case.layout.candidates) for p in place.tolist()])
    together = image[:, None] & image[None] & (run_of[:, None] == run_of[None])
    back = place[:, None] - place[None]
    assert int(back.max()) > 20
    assert torch.equal(masks[3], ((back >= 0) & (back < 20)) | together)
    assert torch.equal(masks[4], (back >= 0) | together)


@pytest.mark.parametrize("family", first_fast(["qwen3_5", "qwen3_5_moe"]))
def test_padding_never_enters_a_linear_layers_state(family: str) -> None:
    """Recurrent and convolution state of a padded prompt, pruned to another length, are the prompt's own."""
    model = model_of(family)
    cases = [make_case(family, SHAPES, text=12, seed=1), make_case(family, SHAPES[:1], text=5, seed=2)]
    for pruner in (
        RaDiCal(keep=0.3, layers=(1, 4), profile=PROFILE),
        Anywhere(keep=0.3, layers=(0, 3)),
    ):
        with torch.no_grad():
            with pruner.on(model, [case.layout for case in cases]) as run:
                together = model(**stack(cases), use_cache=True).past_key_values
            assert len({records[-1].after for records in run.stages}) == 2
            for row, case in enumerate(cases):
                with pruner.on(model, case.layout):
                    alone = model(**case.inputs, use_cache=True).past_key_values
                linear = [layer for layer in range(8) if layer not in READABLE[family]]
                for layer in linear:
                    for state in ("get_conv_state", "get_recurrent_state"):
                        ours = getattr(together, state)(layer, state_idx=0)[row]
                        theirs = getattr(alone, state)(layer, state_idx=0)[0]
                        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
