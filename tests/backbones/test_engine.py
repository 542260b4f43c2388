"""The engine against the stock model, against the slow reference, and against its own promises."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank import Dense, RaDiCal, Random
from radical_rerank.errors import LayoutError, UnsupportedModelError
from radical_rerank.method import keep_count
from radical_rerank.pruning import Layout, Merge, Pruner, Stage, StageView
from radical_rerank.reranking.calibration import EntropyProbe
from tests.cases import (
    LAYERS,
    PROFILE,
    Case,
    across,
    first_fast,
    greedy,
    hooks_on,
    make_case,
    model_of,
    placed,
    stack,
)
from tests.reference import Reference, last_row_rule, radical_rule
from tests.tiny import TINY_FAMILIES, on_grid, tiny_config

SHAPES = [(3, 4), (2, 2), (4, 3), (2, 5)]
INTERN = [(1, 1), (2, 1), (1, 1)]


def shapes_of(family: str) -> list[tuple[int, int]]:
    return INTERN if not on_grid(family) else SHAPES


@pytest.mark.parametrize(("family", "attention"), across([("sdpa",), ("eager",)], [("sdpa",)]))
def test_keeping_everything_is_bit_identical_to_the_stock_model(family: str, attention: str) -> None:
    model = model_of(family, attention)
    case = make_case(family, shapes_of(family))
    with torch.no_grad():
        stock = model(**case.inputs).logits
    stock_steps = greedy(model, case.inputs, 32)
    for pruner in (RaDiCal(keep=1.0, profile=PROFILE), EntropyProbe(), Dense()):
        with pruner.on(model, case.layout), torch.no_grad():
            assert torch.equal(model(**case.inputs).logits, stock)
            ours = greedy(model, case.inputs, 32)
        assert len(ours) == 33
        assert all(torch.equal(a, b) for a, b in zip(stock_steps, ours, strict=True))


@dataclass(kw_only=True)
class LastRow(Pruner):
    """A rule of the tests' own, for stages on either side of a layer."""

    places: tuple[tuple[int, Literal["before", "after"]], ...]

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(layer, self.keep, when) for layer, when in self.places]

    def score(self, view: StageView) -> torch.Tensor:
        return view.attention([self_last])[0]


self_last = -1  # set per case: the position of the last text row

# Inside the DeepStack range (features join after layers 0, 1, 2), at its edge, and beyond it.
SCHEDULES = [(0, 2), (1, 2, 3), (2, 5), (4, 6), (3, 4, 5, 7)]


SCHEDULED = list(product(SCHEDULES, ["sdpa", "eager"]))
SOME = [(SCHEDULES[0], "eager"), (SCHEDULES[4], "sdpa")]


@pytest.mark.parametrize(("family", "schedule", "attention"), across(SCHEDULED, SOME))
def test_pruned_logits_equal_the_slow_reference(
    family: str, schedule: tuple[int, ...], attention: str
) -> None:
    model = model_of(family, attention)
    case = make_case(family, shapes_of(family), seed=3)
    pruner = RaDiCal(keep=0.3, layers=schedule, profile=PROFILE)
    stages = placed(family, [(stage.layer, stage.when, stage.keep) for stage in pruner.stages(LAYERS)])
    alpha = {layer: PROFILE.alpha_at(layer) for layer, _, _ in stages}
    reference = Reference(model, case, stages, radical_rule(alpha))
    expected = reference.run(16)
    with pruner.on(model, case.layout) as run:
        actual = greedy(model, case.inputs, 16)
    assert [record.survivors.tolist() for record in run.stages[0]] == reference.survivors
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0, msg=partial("step {}: {}".format, step))


PLACES = [
    ((0, "after"),),
    ((1, "after"), (4, "after")),
    ((2, "after"), (2, "before")),
    ((0, "before"), (1, "after"), (5, "before"), (7, "after")),
]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "internvl_llama", "internvl_qwen2", "qwen3_5"]))
def test_stages_before_and_after_a_layer(
    family: str, places: tuple[tuple[int, Literal["before", "after"]], ...]
) -> None:
    global self_last
    model = model_of(family)
    case = make_case(family, shapes_of(family), seed=5, reference=(2, 3))
    self_last = case.layout.rows[-1]
    pruner = LastRow(keep=0.6, places=places)
    stages = placed(family, [(layer, when, 0.6) for layer, when in places])
    reference = Reference(model, case, stages, last_row_rule)
    expected = reference.run(16)
    with pruner.on(model, case.layout) as run:
        actual = greedy(model, case.inputs, 16)
    assert [record.survivors.tolist() for record in run.stages[0]] == reference.survivors
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_the_reference_without_stages_is_the_stock_model() -> None:
    """Else it would prove nothing."""
    for family in TINY_FAMILIES:
        case = make_case(family, shapes_of(family), seed=2)
        model = model_of(family)
        expected = Reference(model, case, [], last_row_rule).run(4)
        for a, b in zip(greedy(model, case.inputs, 4), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "attention"), across([("sdpa",), ("eager",)], [("sdpa",)]))
def test_a_batch_of_different_lengths_equals_one_at_a_time(family: str, attention: str) -> None:
    model = model_of(family, attention)
    shapes = shapes_of(family)
    cases = [
        make_case(
            family, shapes[: 1 + seed], text=6 + 3 * seed, seed=seed, reference=(2, 2) if seed == 1 else None
        )
        for seed in range(3)
    ]
    pruner = RaDiCal(keep=0.25, layers=(0, 1, 4, 6), profile=PROFILE)
    with torch.no_grad(), pruner.on(model, [case.layout for case in cases]) as run:
        together = model.generate(
            **stack(cases),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for row, case in enumerate(cases):
        with pruner.on(model, case.layout) as alone:
            steps = greedy(model, case.inputs, 7)
        for record, other in zip(run.stages[row], alone.stages[0], strict=True):
            assert record.survivors.tolist() == other.survivors.tolist()
        for a, b in zip(together.logits, steps, strict=True):
            torch.testing.assert_close(a[row], b, atol=1e-4, rtol=0)


def test_beams_share_their_prompt() -> None:
    model = model_of("qwen3_vl")
    case = make_case("qwen3_vl", SHAPES)
    pruner = RaDiCal(keep=0.4, layers=(2, 5), profile=PROFILE)
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        one = model.generate(**case.inputs, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)
    assert one.shape[1] > case.layout.length
    survivors = {tuple(records[-1].survivors.tolist()) for records in run.stages}
    assert len(run.stages) == 3
    assert len(survivors) == 1


# Invariants over random layouts.


@dataclass(kw_only=True)
class Watched(RaDiCal):
    """RaDiCal that remembers what it was asked and what it answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def select(self, view: StageView, count: int) -> torch.Tensor:
        kept = super().select(view, count)
        assert isinstance(kept, torch.Tensor)
        self.seen.append((len(view.alive), self.score(view), kept))
        return kept


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, Case, float, list[int]]:
    family = draw(st.sampled_from(["qwen3_vl", "internvl_qwen2"]))
    side = st.integers(1, 4)
    shapes = draw(st.lists(st.tuples(side, side), min_size=1, max_size=6))
    if not on_grid(family):
        shapes = [(min(a, 2), 1) for a, _ in shapes]
    reference = draw(st.none() | st.tuples(st.integers(1, 2), side))
    text = draw(st.integers(3, 12))
    keep = draw(st.sampled_from([0.05, 0.1, 0.2, 0.33, 0.5, 0.9, 1.0]))
    schedule = draw(st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=4, unique=True))
    seed = draw(st.integers(0, 1000))
    return family, make_case(family, shapes, reference=reference, text=text, seed=seed), keep, schedule


@given(layouts())
def test_survivors_are_the_right_number_the_best_and_in_order(
    drawn: tuple[str, Case, float, list[int]],
) -> None:
    family, case, keep, schedule = drawn
    model = model_of(family)
    pruner = Watched(keep=keep, layers=schedule, profile=PROFILE)
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        output = model(**case.inputs, output_hidden_states=True)
    visual = len(case.layout.positions)
    other = case.layout.length - visual
    ratio = keep ** (1 / len(schedule))
    alive, before = visual, list(range(visual))
    for record, (count, score, kept) in zip(run.stages[0], pruner.seen, strict=True):
        assert record.before == count == alive
        alive = record.after
        assert alive == keep_count(ratio, count)
        survivors = record.survivors.tolist()
        assert survivors == sorted(set(survivors))
        assert set(survivors) <= set(before)
        # The highest-fused: no dropped token scores above a kept one.
        dropped = sorted(set(range(count)) - set(kept.tolist()))
        if dropped:
            assert score[kept].min() >= score[dropped].max()
        before = survivors
    # Text and the reference image always survive.
    assert output.logits.shape[1] == other + alive
    assert run.tokens_per_layer[-1] == other + alive


@given(
    st.floats(0.01, 1.0),
    st.integers(0, 5000),
)
def test_keep_count_is_the_exact_ceiling(keep: float, alive: int) -> None:
    from fractions import Fraction
    from math import ceil

    percent = Fraction(round(keep * 1000), 1000)
    count = keep_count(float(percent), alive)
    assert count == (max(1, ceil(percent * alive)) if alive else 0)


def test_text_and_reference_tokens_keep_their_hidden_place() -> None:
    """With every candidate token but one gone, what is left is text, reference and that one, in order."""
    model = model_of("qwen3_vl")
    case = make_case("qwen3_vl", [(2, 2), (2, 2)], reference=(3, 2))
    entering: list[torch.Tensor] = []
    handle = model.model.language_model.layers[1].register_forward_pre_hook(
        lambda module, args: entering.append(args[0])
    )
    with torch.no_grad():
        model(**case.inputs)
        with RaDiCal(keep=0.01, layers=(1,), alpha=1.0).on(model, case.layout) as run:
            later = model.model.language_model.layers[1].register_forward_pre_hook(
                lambda module, args: entering.append(args[0])
            )
            model(**case.inputs)
            later.remove()
    handle.remove()
    stock, pruned = entering[0][0], entering[-1][0]
    kept = case.layout.positions[run.stages[0][0].survivors]
    gone = set(case.layout.positions.tolist()) - set(kept.tolist())
    stay = [p for p in range(case.layout.length) if p not in gone]
    assert len(kept) == 1
    assert torch.equal(pruned, stock[stay])


# Leaving the context.


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_the_model_is_restored(family: str) -> None:
    model = model_of(family)
    case = make_case(family, shapes_of(family))
    with torch.no_grad():
        first = model(**case.inputs).logits
        before = hooks_on(model)  # after the first pass: transformers puts hooks of its own on some encoders
        with RaDiCal(keep=0.2, layers=(1, 4), profile=PROFILE).on(model, case.layout):
            assert hooks_on(model) > before
            assert not torch.equal(model(**case.inputs).logits[:, -1], first[:, -1])
        assert hooks_on(model) == before
        assert torch.equal(model(**case.inputs).logits, first)


class BoomError(RuntimeError):
    pass


@dataclass(kw_only=True)
class Failing(RaDiCal):
    def select(self, view: StageView, count: int) -> torch.Tensor | Merge:
        if view.layer == 4:
            raise BoomError
        return super().select(view, count)


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_the_model_is_restored_after_an_exception_inside_a_pass(family: str) -> None:
    model = model_of(family)
    case = make_case(family, shapes_of(family))
    before = hooks_on(model)
    with torch.no_grad():
        first = model(**case.inputs).logits
        pruner = Failing(keep=0.2, layers=(1, 4), profile=PROFILE)
        with pytest.raises(BoomError), pruner.on(model, case.layout):
            model(**case.inputs)
        assert hooks_on(model) == before
        assert torch.equal(model(**case.inputs).logits, first)
        with RaDiCal(keep=0.2, layers=(1, 4), profile=PROFILE).on(model, case.layout):
            model(**case.inputs)  # and it can be pruned again


def test_two_prompts_in_one_context() -> None:
    model = model_of("internvl_llama")
    case = make_case("internvl_llama", INTERN)
    with torch.no_grad(), RaDiCal(keep=0.3, layers=(2,), profile=PROFILE).on(model, case.layout):
        assert torch.equal(model(**case.inputs).logits, model(**case.inputs).logits)


# What must fail, and how.


def test_misuse_is_told_plainly() -> None:
    model = model_of("qwen3_vl")
    case = make_case("qwen3_vl", SHAPES)
    other = make_case("qwen3_vl", SHAPES[:2])
    pruner = RaDiCal(keep=0.2, layers=(1, 4), profile=PROFILE)
    with torch.no_grad():
        with pytest.raises(LayoutError, match="its layout describes"), pruner.on(model, other.layout):
            model(**case.inputs)
        two = pruner.on(model, [case.layout, other.layout])
        with pytest.raises(LayoutError, match="2 layouts cannot describe a batch of 1"), two:
            model(**case.inputs)
        again = pruner.on(model, case.layout)
        with pruner.on(model, case.layout), pytest.raises(RuntimeError, match="already being pruned"), again:
            pass
        with pytest.raises(UnsupportedModelError, match="StaticCache"), pruner.on(model, case.layout):
            model.generate(**case.inputs, max_new_tokens=2, cache_implementation="static")
        cache = model(**case.inputs, use_cache=True).past_key_values
        step = {"input_ids": torch.tensor([[7]]), "past_key_values": cache}
        with pytest.raises(LayoutError, match="did not run inside"), pruner.on(model, case.layout):
            model(**step)
    with pytest.raises(LayoutError, match="layer 8: the model has 8 layers"):
        RaDiCal(keep=0.2, layers=(8,), alpha=0.5).on(model, case.layout)


def test_right_padding_is_refused() -> None:
    model = model_of("qwen3_vl")
    cases = [make_case("qwen3_vl", SHAPES), make_case("qwen3_vl", SHAPES[:2])]
    batch = stack(cases)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        batch[name][1] = batch[name][1].roll(-(cases[0].layout.length - cases[1].layout.length))
    pruner = RaDiCal(keep=0.2, layers=(1,), profile=PROFILE)
    layouts = [case.layout for case in cases]
    with pytest.raises(LayoutError, match="padded on the left"), pruner.on(model, layouts), torch.no_grad():
        model(**batch)


def test_manual_decoding_after_pruning_before_layer_0_needs_positions() -> None:
    model = model_of("internvl_llama")
    case = make_case("internvl_llama", INTERN)
    pruner = RaDiCal(keep=0.3, layers=(0,), profile=PROFILE)
    with torch.no_grad(), pruner.on(model, case.layout):
        output = model(**case.inputs, use_cache=True)
        step = {"input_ids": torch.tensor([[7]]), "past_key_values": output.past_key_values}
        with pytest.raises(LayoutError, match="position_ids"):
            model(**step)
        model(**step, position_ids=torch.tensor([[case.layout.length]]))


def test_unsupported_architectures_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    layout = Layout(4, (range(0, 2),), (3,))
    with pytest.raises(UnsupportedModelError, match="'llama' is not supported"):
        RaDiCal(keep=0.5, layers=(0,), alpha=0.5).on(model, layout)
    with pytest.raises(UnsupportedModelError, match="not a Hugging Face model"):
        RaDiCal(keep=0.5, layers=(0,), alpha=0.5).on(torch.nn.Linear(2, 2), layout)


def test_what_is_in_the_way_of_a_model_is_told() -> None:
    from transformers import Gemma4Config

    from radical_rerank.backbones import family_of

    with pytest.raises(UnsupportedModelError, match=r"'gemma4' is not supported \(its layers share"):
        family_of(Gemma4Config())
    windows = tiny_config("llava_next")
    windows.text_config.sliding_window = 12
    with pytest.raises(UnsupportedModelError, match="llava_next with layers of sliding attention"):
        family_of(windows)
    other = tiny_config("internvl_qwen2")
    other.text_config.model_type = "gpt_oss"
    with pytest.raises(UnsupportedModelError, match="internvl on a 'gpt_oss' text model is not supported"):
        family_of(other)


def test_random_draws_differ_between_lists_and_seeds_but_not_between_runs() -> None:
    model = model_of("qwen3_vl")
    case = make_case("qwen3_vl", SHAPES)

    def survivors(seed: int, key: int) -> list[int]:
        layout = Layout(case.layout.length, case.layout.candidates, case.layout.query, key=key)
        with torch.no_grad(), Random(keep=0.3, layers=(2,), seed=seed).on(model, layout) as run:
            model(**case.inputs)
        return run.stages[0][0].survivors.tolist()

    assert survivors(0, 0) == survivors(0, 0)
    assert len({tuple(survivors(seed, key)) for seed in range(3) for key in range(3)}) == 9
