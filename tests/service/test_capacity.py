"""Plans of a deployment: the queue against simple formulas, the costs against real reports."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from radical_rerank import Reranker
from radical_rerank.cli import main
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.errors import InputError
from radical_rerank.service.capacity import (
    Prompt,
    fewest,
    known_footprint,
    list_cost,
    plan_replicas,
    schedule_of,
    simulate,
)

PATIENT: dict[str, Any] = {"patience": 1e9, "places": 10**9, "max_batch": 1, "spread": 1e-9}


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_without_limits_it_is_a_simple_queue(load: float) -> None:
    """Lindley's recursion: W' = max(0, W + S − A)."""
    draw, wait, waits = random.Random(5), 0.0, []
    for _ in range(60_000):
        waits.append(wait)
        wait = max(0.0, wait + 1.0 - draw.expovariate(load))
    waits.sort()
    found = simulate(1.0, load, requests=60_000, **PATIENT)
    assert found.refused == 0
    assert found.p50 == pytest.approx(1 + waits[30_000], rel=0.08, abs=0.02)
    assert found.p95 == pytest.approx(1 + waits[57_000], rel=0.08)
    assert found.busy == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("load", [0.5, 2.0])
def test_without_patience_it_refuses_as_erlang_says(load: float) -> None:
    """A place for one request: ρ / (1 + ρ) of all are lost."""
    found = simulate(1.0, load, patience=0.0, max_batch=1, spread=1e-6)
    assert found.refused == pytest.approx(load / (1 + load), rel=0.03)
    assert found.p50 == pytest.approx(1.0, rel=0.1)


def test_patience_bounds_the_wait() -> None:
    for patience in (0.7, 2.0):
        found = simulate(0.1, 30.0, patience=patience, spread=0.01)
        # A request waits, and its batch of at most four may hold others.
        assert found.p95 <= 0.1 * (patience + 1 + 3) * 1.05
        assert found.refused > 0.5
    assert simulate(0.1, 30.0, places=1).refused > simulate(0.1, 30.0, places=4).refused


def test_replicas_share_the_load() -> None:
    one, four = simulate(0.1, 5.0), simulate(0.1, 20.0, 4)
    assert four.refused < one.refused
    assert four.busy == pytest.approx(one.busy, abs=0.2)
    counts = [fewest(0.1, qps, 0.5)[0] for qps in (1.0, 20.0, 100.0)]
    assert None not in counts
    assert counts == sorted(counts, key=lambda n: n or 0)
    assert counts[-1] is not None
    assert counts[-1] >= 10
    assert fewest(0.1, 20.0, 0.09) == (None, None, None)


def test_costs_are_those_of_real_rankings() -> None:
    item = make_list("test", 0, 20)
    size = known_footprint("scenes")
    pruned: dict[str, Any] = {"layers": [3, 6], "keep": 0.2}
    for method, options in (("dense", dict[str, Any]()), ("radical", pruned)):
        report = Reranker("scenes", method, **options).rank("a red star", item.images).report
        assert report is not None
        text = report.tokens - report.visual_tokens
        prompt = Prompt(1, report.visual_tokens, text)
        cost = list_cost(size, prompt, options.get("layers", ()), options.get("keep", 1.0))
        assert cost.decoder == pytest.approx(report.macs, rel=0.002)
        assert cost.cache == pytest.approx(report.kv_bytes, rel=0.002)


def test_the_size_of_a_large_model() -> None:
    size = known_footprint("Qwen/Qwen3-VL-4B-Instruct")
    assert size.parameters == 4_437_815_808
    assert size.shape.num_layers == 36
    assert schedule_of("Qwen/Qwen3-VL-4B-Instruct", size.shape) == (7, 22, 24, 29)
    assert size.vision_macs(180) > 180 * 4 * 24 * (
        4 * 1024**2 + 2 * 1024 * 4096
    )  # the blocks' matrices alone
    with pytest.raises(InputError, match="no configuration"):
        known_footprint("/no/such/folder")


def test_pruning_needs_fewer_replicas() -> None:
    settings: dict[str, Any] = {"qps": 10.0, "p95": 1.0, "utilisation": 0.4, "keep": 0.2}
    dense, pruned = plan_replicas(
        "Qwen/Qwen3-VL-4B-Instruct", Prompt(20, 300), tflops=400.0, cached=0.5, **settings
    )
    assert dense.replicas is not None
    assert pruned.replicas is not None
    assert 1 <= pruned.replicas < dense.replicas
    for one in (dense, pruned):
        assert one.outcome is not None
        assert one.outcome.p95 <= 1.0
        assert one.outcome.refused <= 0.011
        assert 8.8e9 < one.memory < 16e9
    cold = plan_replicas("Qwen/Qwen3-VL-4B-Instruct", Prompt(20, 300), tflops=400.0, **settings)
    assert cold[1].seconds > pruned.seconds
    measured = plan_replicas("scenes", Prompt(20, 38), tflops=1.0, seconds=0.3, **settings)
    assert measured[0].seconds == pytest.approx(0.3)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "scenes", "--qps", "2", "--p95", "1", "--seconds", "0.3", "--image-tokens", "38"]
    with pytest.raises(SystemExit):
        main(["plan", *options, "--json"])
    plans = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in plans] == ["Dense", "RaDiCal 20%"]
    assert plans[1]["replicas"] <= plans[0]["replicas"]
    with pytest.raises(SystemExit):
        main(["plan", *options[:-4], "--seconds", "3", "--image-tokens", "38"])
    shown = capsys.readouterr()
    assert "none" in shown.out
    assert "no number of replicas holds 1 s" in shown.err
