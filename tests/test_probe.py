"""The row probe against the attention that the model itself reports, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from radical_rerank.backbones.tiny import TINY_FAMILIES
from radical_rerank.bench.memory import PeakMemory
from radical_rerank.method import normalized_entropy, text_averaged
from radical_rerank.pruning import Pruner, Stage, StageView
from radical_rerank.reranking.calibration import EntropyProbe
from tests.cases import LAYERS, Case, make_case, model_of, stack


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
        return super().select(view, count)


def expected_p(attention: torch.Tensor, case: Case, offset: int = 0) -> torch.Tensor:
    """attention: (heads, S, S) -> the paper's p, written out."""
    rows = torch.tensor(case.layout.rows) + offset
    columns = case.layout.positions + offset
    weights = attention.mean(dim=0)[rows][:, columns]
    return (weights / weights.sum(dim=1, keepdim=True)).mean(dim=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_p_and_entropy_equal_those_from_output_attentions(family: str, attention: str) -> None:
    shapes = [(1, 1), (2, 1)] if family.startswith("internvl") else [(3, 4), (5, 2), (2, 2)]
    case = make_case(family, shapes, reference=(2, 2), seed=4)
    with torch.no_grad():
        full = model_of(family, "eager")(**case.inputs, output_attentions=True).attentions
        recorder, probe = Recorder(), EntropyProbe()
        for pruner in (recorder, probe):
            with pruner.on(model_of(family, attention), case.layout):
                model_of(family, attention)(**case.inputs)
    assert len(full) == LAYERS
    for layer in range(LAYERS):
        p = expected_p(full[layer][0], case)
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


@pytest.mark.parametrize("rows", [40, 338])
def test_a_probe_at_4000_tokens_takes_under_5_percent_of_a_full_attention_matrix(rows: int) -> None:
    case = make_case("qwen3_vl", [(12, 15)] * 20, text=337)
    layout = replace(case.layout, rows=case.layout.rows[-rows:])
    model = model_of("qwen3_vl", layers=2)
    meter = Metered()
    with torch.no_grad(), meter.on(model, layout):
        model(**case.inputs)
    heads, length = model.config.text_config.num_attention_heads, layout.length
    full = heads * length * length * 4
    print(f"{length} tokens, {len(layout.rows)} rows: {meter.peak / full:.2%} of {full / 2**20:.0f} MiB")
    assert length == 4000
    assert meter.p
    assert 0 < meter.peak < 0.05 * full
