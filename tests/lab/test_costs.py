"""The experiment `costs`: every method at the same arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.lab.experiments import costs, nucleus
from radical_rerank.lab.experiments.run import run_study
from radical_rerank.lab.runner import Runner
from radical_rerank.pruning import Profile, TunedSchedule


@pytest.mark.slow
def test_all_methods_meet_the_cost_that_they_are_compared_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "SAVED", (0.6, 0.8))
    monkeypatch.setattr(costs, "OTHERS", ("fastv", "qi-ei", "lowres"))
    monkeypatch.setattr(costs, "SCREENS", (1, 2))
    backbone = Backbone.from_pretrained("scenes")
    found = Profile.find(backbone.identity)
    assert found is not None
    schedules = tuple(TunedSchedule(flops, (1, 3), (0.5, 1.0), nucleus=0.9) for flops in (0.2, 0.4))
    runner = Runner(backbone, profile=replace(found, schedules=schedules, scores=()))
    table = run_study("costs", runner, TESTBED, tmp_path, keeps=(0.2, 0.1), seeds=(42,), limit=3)
    by_name = {row["setting"]: row for row in table}
    for saved in (0.6, 0.8):
        planned = by_name[f"RaDiCal, {saved:.0%} saved"]
        assert planned["saved, measured %"] == pytest.approx(100 * saved, abs=100 * (1 - saved) * 0.03)
        assert planned["lists"] == 3
        assert planned["p"] is None
        other = by_name[f"QI-EI, {saved:.0%} saved"]
        assert other["saved, measured %"] == pytest.approx(100 * saved, abs=4)
        assert other["scoring s"] > 0
        assert 0 < other["p"] <= 1
        twice = by_name[f"RaDiCal, two orders, {saved:.0%} saved"]
        assert 0 < twice["saved, measured %"] <= 100 * saved + 20  # three lists: the mean may be far off
    assert f"RaDiCal as in the paper, {0.6:.0%} saved" in by_name
    for name in ("costs.md", "area.md", "costs.png"):
        assert (tmp_path / "costs" / name).is_file()
    assert costs.saved_at((0.2, 0.1)) == (0.6, 0.8)
    assert costs.saved_at((0.2, 0.15)) == [0.8, 0.85]


def test_the_area_is_the_mean_of_the_best_at_each_cost() -> None:
    front = costs.front_area([(0.2, 50.0), (0.4, 90.0), (0.45, 80.0)], low=0.1, high=0.5)
    by_hand = (0.1 * 0 + 0.2 * 50 + 0.1 * 90) / 0.4  # nothing below 0.2, the worse one at 0.45 does not count
    assert front == pytest.approx(by_hand, abs=1.5)  # a cost may be 0.005 over
    assert costs.front_area([(0.6, 90.0)], low=0.1, high=0.5) == 0


@pytest.mark.slow
def test_a_nucleus_costs_as_much_as_the_fixed_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nucleus, "FITTED", 8)
    rows = run_study(
        "nucleus",
        Runner(Backbone.from_pretrained("scenes")),
        TESTBED,
        tmp_path,
        keeps=(0.1,),
        seeds=(42,),
        limit=4,
    )
    fixed, other = rows
    assert fixed["p (fixed)"] is None
    assert 0 < other["p (fixed)"] <= 1
    assert other["cost %"] == pytest.approx(fixed["cost %"], rel=0.3)  # fitted on eight other lists
    assert other["tokens left"] != fixed["tokens left"]
    assert (tmp_path / "nucleus" / "nucleus.md").is_file()
