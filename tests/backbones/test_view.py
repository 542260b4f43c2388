"""The row probe against the attention that the model itself reports, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from radical_rerank.backbones.model import last_row_only
from radical_rerank.lab.bench.memory import PeakMemory
from radical_rerank.method import normalized_entropy, text_averaged
from radical_rerank.pruning import Dense, Pruner, RaDiCal, Random, Stage, StageView
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
    stack,
)
from tests.tiny import READABLE, TINY_FAMILIES, on_grid


@dataclass(kw_only=True)
class Recorder(Pruner):
    """Writes down p at every layer and keeps everything."""

    keep: float = 1.0
    p: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(layer, 1.0) for layer in range(num_layers)]

    def select(self, view: StageView, count: int) -> torch.Tensor:
        number = sum(1 for layer, _ in self.p if layer == view.layer)
        self.p[view.layer, number] = text_averaged(view.attention())
        kept = super().select(view, count)
        assert isinstance(kept, torch.Tensor)
        return kept


class Fixed(Pruner):
    """Keeps the first tokens, after the last layer."""

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(num_layers - 1, self.keep, "after")]

    def select(self, view: StageView, count: int) -> torch.Tensor:
        return torch.arange(count)


def expected_p(attention: torch.Tensor, case: Case, offset: int = 0) -> torch.Tensor:
    """attention: (heads, S, S) -> the paper's p, written out."""
    rows = torch.tensor(case.layout.rows) + offset
    columns = case.layout.positions + offset
    weights = attention.mean(dim=0)[rows][:, columns]
    return (weights / weights.sum(dim=1, keepdim=True)).mean(dim=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_p_and_entropy_equal_those_from_output_attentions(family: str, attention: str) -> None:
    shapes = [(1, 1), (2, 1)] if not on_grid(family) else [(3, 4), (5, 2), (2, 2)]
    case = make_case(family, shapes, reference=(2, 2), seed=4)
    with torch.no_grad():
        full = model_of(family, "eager")(**case.inputs, output_attentions=True).attentions
        recorder, probe = Recorder(), EntropyProbe()
        for pruner in (recorder, probe):
            with pruner.on(model_of(family, attention), case.layout):
                model_of(family, attention)(**case.inputs)
    readable = READABLE.get(family, range(LAYERS))
    if family == "gemma3":  # windows have attention, too, but not over the whole prompt
        full = [full[layer] for layer in readable]
    assert len(full) == len(readable) == len(recorder.p)
    for layer, weights in zip(readable, full, strict=True):
        p = expected_p(weights[0], case)
        torch.testing.assert_close(recorder.p[layer, 0], p, atol=1e-5, rtol=0)
        entropy = -(p * p.log()).sum() / torch.tensor(float(len(p))).log()
        assert probe.h_norm[layer] == pytest.approx([float(entropy)], abs=1e-5)
        assert float(normalized_entropy(p)) == pytest.approx(float(entropy), abs=1e-6)


def test_padding_is_not_seen() -> None:
    cases = [make_case("qwen3_vl", [(3, 3)], seed=1, text=5), make_case("qwen3_vl", [(4, 4), (2, 3)], seed=2)]
    recorder = Recorder()
    model = model_of("qwen3_vl")
    with torch.no_grad():
        with recorder.on(model, [case.layout for case in cases]):
            model(**stack(cases))
        for number, case in enumerate(cases):
            full = model_of("qwen3_vl", "eager")(**case.inputs, output_attentions=True).attentions
            for layer in range(LAYERS):
                p = expected_p(full[layer][0], case)
                torch.testing.assert_close(recorder.p[layer, number], p, atol=1e-5, rtol=0)


def test_the_memory_meter_sees_a_full_attention_matrix() -> None:
    with PeakMemory() as meter:
        scores = torch.randn(4, 100, 16) @ torch.randn(4, 16, 100)
        scores.softmax(dim=-1)
    assert 2 * 4 * 100 * 100 * 4 <= meter.peak < 2.5 * 4 * 100 * 100 * 4


@dataclass(kw_only=True)
class Metered(Recorder):
    peak: int = 0

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(1, 1.0)]

    def select(self, view: StageView, count: int) -> torch.Tensor:
        with PeakMemory() as meter:
            kept = super().select(view, count)
        self.peak = meter.peak
        return kept


@pytest.mark.parametrize("rows", first_fast([40, 338]))
def test_a_probe_at_4000_tokens_takes_under_5_percent_of_a_full_attention_matrix(rows: int) -> None:
    case = make_case("qwen3_vl", [(12, 15)] * 20, text=337)
    layout = replace(case.layout, rows=case.layout.rows[-rows:])
    model = model_of("qwen3_vl", num_layers=2)
    meter = Metered()
    with torch.no_grad(), meter.on(model, layout):
        model(**case.inputs)
    heads, length = model.config.text_config.num_attention_heads, layout.length
    full = heads * length * length * 4
    print(f"{length} tokens, {len(layout.rows)} rows: {meter.peak / full:.2%} of {full / 2**20:.0f} MiB")
    assert length == 4000
    assert meter.p
    assert 0 < meter.peak < 0.05 * full


@pytest.mark.parametrize(("family", "attention"), across([("sdpa",), ("eager",)], [("sdpa",)]))
def test_the_last_layer_for_one_row_gives_that_rows_logits(family: str, attention: str) -> None:
    """Alone and in a ragged batch, dense and pruned, with a cache and without."""
    model = model_of(family, attention)
    shapes = [(1, 1), (2, 1)] if not on_grid(family) else [(3, 4), (5, 2)]
    cases = [make_case(family, shapes, seed=4), make_case(family, shapes[:1], text=6, seed=5)]
    hooks = hooks_on(model)
    # Hugging Face's own recorders, once asked for attentions, stay and read every layer's rows.
    # A linear layer needs them all for its state.
    whole_last = LAYERS - 1 not in READABLE.get(family, range(LAYERS))
    rows = cases[0].layout.length if hooks or whole_last else 1
    pruner = Random(keep=0.5, layers=(2, LAYERS - 1))
    for chosen in (cases[:1], cases):
        inputs = stack(chosen)
        layouts = [case.layout for case in chosen]
        for method in (Dense(), pruner):
            for use_cache in (False, True):
                with torch.no_grad(), method.on(model, layouts):
                    whole = model(**inputs, use_cache=use_cache)
                    with last_row_only(model):
                        last = model(**inputs, use_cache=use_cache)
                assert last.logits.shape[1] <= rows
                torch.testing.assert_close(last.logits[:, -1], whole.logits[:, -1], atol=2e-5, rtol=0)
                if use_cache:
                    layers = zip(last.past_key_values.layers, whole.past_key_values.layers, strict=True)
                    for ours, theirs in layers:
                        if hasattr(ours, "keys"):
                            torch.testing.assert_close(ours.keys, theirs.keys, atol=2e-5, rtol=0)
                            torch.testing.assert_close(ours.values, theirs.values, atol=2e-5, rtol=0)
    assert hooks_on(model) == hooks


def test_a_stage_after_the_last_layer_has_all_rows() -> None:
    model, case = model_of("qwen3_vl"), make_case("qwen3_vl", [(3, 4), (5, 2)])
    pruner = Fixed(keep=0.5)
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        whole = model(**case.inputs).logits[:, -1]
        with last_row_only(model):
            assert torch.equal(model(**case.inputs).logits[:, -1], whole)
    assert run.stages[0][0].after == 11


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_decoding_goes_on_after_a_prompt_whose_last_layer_ran_for_one_row(family: str) -> None:
    model, case = model_of(family), make_case(family, [(2, 1), (1, 1)], seed=9)
    with RaDiCal(keep=0.3, profile=PROFILE).on(model, case.layout):
        expected = greedy(model, case.inputs, 4)
        with last_row_only(model):
            actual = greedy(model, case.inputs, 4)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
