"""The benchmarks measure what they say. Figures themselves are not tests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone, decoder_shape
from radical_rerank.errors import ScoringError
from radical_rerank.lab.bench.end_to_end import EndToEnd, growth, paper_backbone, run_end_to_end
from radical_rerank.lab.bench.prefill import PROMPT_SHAPES, Bench, run_once, run_prefill
from radical_rerank.lab.bench.throughput import run_throughput
from radical_rerank.lab.bench.timing import Ratio, StepTimes, Times, interleaved, lockstep, phases
from radical_rerank.method import keep_count, macs
from radical_rerank.pruning import build
from tests.cases import PROFILE, draw_list

SMALL = replace(PROMPT_SHAPES["small"](128), num_layers=5, candidates=4, rows=4, columns=5, text=60)


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    ran: list[str] = []
    variants = {name: partial(ran.append, name) for name in "abc"}
    seen: list[str] = []

    def progress(items: Iterable[Any], label: str, *, total: int | None = None) -> Iterable[Any]:
        seen.append(label)
        return items

    times = interleaved(variants, 3, progress=progress, label="here")
    assert "".join(ran) == "abcbcacababc"
    assert seen == ["here"]
    assert all(len(values) == 3 for values in times.seconds.values())


def test_in_lockstep_one_module_of_each_runs_in_turn() -> None:
    ran: list[str] = []

    class Step(nn.Module):
        def __init__(self, name: str, seconds: float) -> None:
            super().__init__()
            self.name, self.seconds = name, seconds

        def forward(self) -> None:
            ran.append(self.name)
            time.sleep(self.seconds)

    def variant(name: str, seconds: float, count: int) -> tuple[Any, list[nn.Module]]:
        steps: list[nn.Module] = [Step(f"{name}{i}", seconds) for i in range(count)]
        return lambda: [step() for step in steps], steps

    times = lockstep({"a": variant("a", 0.01, 3), "b": variant("b", 0.03, 2)}, 2)
    assert [sorted(ran[i : i + 2]) for i in (0, 2)] == [["a0", "b0"], ["a1", "b1"]]
    assert len(ran) == 15
    assert 0.3 < times.ratio("a", "b").median < 0.8  # 3 × 0.01 over 2 × 0.03, not what both waited

    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        lockstep({"a": variant("a", 0.0, 1), "b": (broken, [])}, 1)


def test_ratios_are_of_the_same_round() -> None:
    times = Times({"a": [1.0, 10.0, 3.0], "b": [2.0, 20.0, 3.0]})
    assert times.ratio("a", "b").median == 0.5
    assert times.ratio("b", "a").best == 2.0
    assert times.median("a") == 3.0
    assert Times({"a": [1.0], "b": [4.0]}).ratio("a", "b") == Ratio(0.25, 0.25, 0.25, 0.25)


def test_a_disturbed_step_does_not_count() -> None:
    steps = {"a": [[1.0, 2.0], [9.0, 2.0], [1.0, 7.0]], "b": [[2.0, 4.0], [2.0, 4.0], [2.0, 4.0]]}
    times = StepTimes(steps)
    assert times.seconds == {"a": [3.0, 11.0, 8.0], "b": [6.0, 6.0, 6.0]}
    assert times.median("a") == 3.0
    assert times.ratio("a", "b").median == times.ratio("a", "b").best == 0.5
    assert times.ratio("a", "b").high == pytest.approx(11 / 6)


@pytest.mark.slow
def test_the_prompt_has_the_shape_it_says() -> None:
    shape = PROMPT_SHAPES["paper"](128)
    bench = Bench(replace(shape, num_layers=4))
    assert bench.layout.length == 3904
    assert len(bench.layout.positions) == 3600
    assert [len(candidate) for candidate in bench.layout.candidates] == [180] * 20


@pytest.mark.slow
def test_a_stage_holds_a_twentieth_of_eager_attention_at_most() -> None:
    """At every stage of the paper's shape, also the late ones, whose matrix has become small."""
    bench = Bench(replace(PROMPT_SHAPES["paper"](512), num_layers=8))
    stages = bench.stage_memory(build("radical", keep=0.2, layers=(1, 3, 4, 6), alpha=0.5))
    assert [stage.tokens for stage in stages] == [3904, 2712, 1915, 1382]
    assert max(stage.peak / stage.eager for stage in stages) <= 0.05


def test_a_twin_shares_the_weights_and_not_the_hooks() -> None:
    bench = Bench(SMALL)
    twin = bench.twin()
    assert [id(p) for p in twin.model.parameters()] == [id(p) for p in bench.model.parameters()]
    expected = bench.forward()
    with build("random", keep=0.25, layers=(1, 3), alpha=1.0).on(bench.model, bench.layout):
        assert torch.equal(twin.forward(), expected)
        assert not torch.equal(bench.forward(), expected)


@pytest.mark.slow
def test_prefill_counts_what_ran() -> None:
    methods = [("radical", 0.25), ("random", 0.25), ("fastv", 0.5), ("visionzip", 0.5)]
    result = run_prefill(SMALL, methods, rounds=1)
    results = {m.method: m for m in result.methods}
    assert results["radical"].visual_tokens_left == results["random"].visual_tokens_left
    assert results["fastv"].visual_tokens_left == keep_count(0.5, 80)
    assert results["radical"].over_random is not None
    assert results["fastv"].over_random is None
    for method in result.methods:
        assert method.predicted > 1
        assert min(method.seconds, method.speedup.median, method.efficiency.median) > 0
    assert result.stages[0].tokens == 80 + 60
    assert all(stage.peak > 0 for stage in result.stages)
    assert result.stages[0].eager == 4 * 3 * 140**2
    assert json.loads(json.dumps(result.to_dict()))["memory"] == result.memory


def test_one_pass_of_each_method_counts_what_ran() -> None:
    methods = [("random", 0.25), ("fastv", 0.5)]
    result = run_once(SMALL, methods, dtype=torch.bfloat16)
    assert result.dtype == "bfloat16"
    bench = Bench(SMALL)
    for one, (name, keep) in zip(result.methods, methods, strict=True):
        options: dict[str, Any] = {"layers": [1, 3, 4], "alpha": 1.0} if name == "random" else {}
        pruner = build(name, keep=keep, **options)
        expected = bench.counts(pruner)
        assert one.tokens_per_layer[-1] == expected[-1]
        assert one.speedup == pytest.approx(result.dense_seconds / one.seconds)
        cost = decoder_shape(bench.model.config)
        own = macs([140] * SMALL.num_layers, cost) / macs(one.tokens_per_layer, cost)
        assert one.predicted == pytest.approx(own)
        assert one.predicted > 1
        assert 0 < one.scoring < 1


def test_the_bare_layers_run_on_exactly_the_tokens_of_the_schedule() -> None:
    bench = Bench(SMALL)
    pruner = build("random", keep=0.25, layers=(1, 3), alpha=1.0)
    counts = bench.counts(pruner)
    assert counts == [140, 100, 100, 80, 80]
    seen: list[int] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
        for layer in bench.decoder.layers
    ]
    bench.bare(counts)
    for handle in handles:
        handle.remove()
    assert seen == counts


def test_phases_tell_prefill_from_decode(backbone: Backbone) -> None:
    query, images = draw_list(1, 3)
    reranker = Reranker(backbone, "radical", keep=0.5, profile=PROFILE, scorer="generate", max_new_tokens=4)
    with phases(backbone.model) as spent, suppress(ScoringError):
        reranker.rank(query, images)
    assert len(spent["prefill"]) == 1
    assert 0 < len(spent["decode"]) <= 3


@pytest.mark.slow
def test_end_to_end_and_its_growth(backbone: Backbone) -> None:
    results = run_end_to_end(
        backbone, counts=(2, 4), scorers=("logits", "generate"), rounds=1, method="fastv"
    )
    assert [(r.scorer, r.candidates) for r in results] == [
        ("logits", 2), ("logits", 4), ("generate", 2), ("generate", 4),
    ]  # fmt: skip
    for result in results:
        assert min(result.seconds.values()) > 0
        assert (result.phases["pruned_warm"]["decode"] > 0) == (result.scorer == "generate")
        assert sum(result.parts.values()) <= result.seconds["pruned_warm"]
        assert not result.parts or result.parts["vision"] == 0
        assert result.again.median > 0
    square = [
        EndToEnd(n, "logits", {"dense_cold": 3.0 * n**2}, Ratio(1, 1, 1, 1), {}, {}, Ratio(1, 1, 1, 1))
        for n in (5, 10, 20, 50)
    ]
    assert growth(square, "dense_cold") == pytest.approx(2)


@pytest.mark.slow
def test_the_papers_shape_end_to_end() -> None:
    backbone = paper_backbone(128)
    (result,) = run_end_to_end(backbone, counts=(2,), size=(480, 384), rounds=1)
    assert result.seconds["pruned_warm"] > 0
    image = draw_list(1, 1)[1][0].resize((480, 384))
    assert backbone.count_tokens(image, 384) == 180


def test_throughput(tiny_folders: dict[str, Path]) -> None:
    results = run_throughput(
        str(tiny_folders["qwen3_vl"]),
        lists=2,
        candidates=3,
        batch_sizes=(1, 2),
        clients=(),
        methods=(("fastv", 0.5),),
        rounds=1,
    )
    assert [(r.through, r.method, r.at_once) for r in results] == [
        ("rank_many", "fastv 50%", 1),
        ("rank_many", "fastv 50%", 2),
    ]
    assert all(r.lists_per_second > 0 for r in results)


@pytest.mark.slow
def test_throughput_of_the_service() -> None:
    pytest.importorskip("fastapi", reason="the service is an extra")
    results = run_throughput("scenes", lists=2, candidates=3, batch_sizes=(2,), clients=(1, 2), rounds=2)
    assert [(r.through, r.method, r.at_once) for r in results] == [
        ("rank_many", "dense", 2),
        ("rank_many", "radical 20%", 2),
        *(("service", method, clients) for method in ("dense", "radical 20%") for clients in (1, 2)),
    ]
    assert all(r.lists_per_second > 0 for r in results)
