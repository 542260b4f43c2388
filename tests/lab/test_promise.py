"""The experiment `promise`: agreement and cost of fixed schedules and of promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.errors import CalibrationError
from radical_rerank.lab.experiments.promise import _rows, wilson
from radical_rerank.lab.experiments.run import run_study
from radical_rerank.lab.runner import Runner
from radical_rerank.pruning import Profile, TunedSchedule
from radical_rerank.reranking.safety import Observed, Safety


def record(cell: str, task: int, best: str, cost: float, prompts: int = 1) -> dict[str, Any]:
    return {"cell": cell, "task": task, "best": best, "cost": cost, "prompts": prompts, "right": best == "a"}


def test_the_cheapest_fixed_schedule_with_the_same_agreement_is_what_counts() -> None:
    tasks = range(100)
    records = [record("Dense", t, "a", 1.0) for t in tasks]
    records += [record("fixed, 20%", t, "b" if t < 5 else "a", 0.2) for t in tasks]
    records += [record("fixed, 50%", t, "b" if t < 1 else "a", 0.5) for t in tasks]
    records += [record("agreement 99%", t, "a", 0.2 + 0.8 * (t < 10), 1 + (t < 10)) for t in tasks]
    records += [record("agreement 95%", t, "b" if t < 2 else "a", 0.25) for t in tasks]
    names = list(dict.fromkeys(r["cell"] for r in records))
    rows = {row["setting"]: row for row in _rows(names, records)}
    assert rows["fixed, 20%"]["same best %"] == 95
    assert rows["fixed, 20%"]["against fixed"] is None
    assert rows["agreement 99%"]["cost %"] == pytest.approx(28)
    assert rows["agreement 99%"]["ranked again %"] == 10
    assert rows["agreement 99%"]["against fixed"] == pytest.approx(0.28)  # only Dense agrees in all
    assert rows["agreement 95%"]["against fixed"] == pytest.approx(0.5)  # 25% against 50%
    assert rows["fixed, 50%"]["at least %"] == pytest.approx(100 * wilson(99, 100))


@pytest.mark.slow
def test_it_runs_and_counts_what_a_second_ranking_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADICAL_CACHE", str(tmp_path / "cache"))
    backbone = Backbone.from_pretrained("scenes")
    found = Profile.find(backbone.identity)
    assert found is not None
    schedules = (TunedSchedule(0.25, (2, 4), (0.5, 1.0)), TunedSchedule(0.5, (4, 8), (0.5, 1.0)))
    untuned = replace(found, schedules=(), safety=())
    untuned.save(Profile.cache_path(backbone.identity))
    options: dict[str, Any] = {"keeps": (0.2,), "seeds": (42,), "limit": 3}
    with pytest.raises(CalibrationError, match="radical tune"):
        run_study("promise", Runner(backbone), TESTBED, tmp_path, **options)
    # Every list is ranked again: no margin is as large as the only one that was seen to be wrong.
    seen = [Observed(1e6, False, True), *[Observed(2e6 + i, True, True) for i in range(999)]]
    safety = Safety.of(seen, (0.25, 0.5), (0.25, 0.5))
    safety = replace(safety, wrong=(1e6,) * 200)
    every = replace(untuned, schedules=schedules, safety=(safety.to_dict(),))
    every.save(Profile.cache_path(backbone.identity))
    rows = run_study("promise", Runner(backbone), TESTBED, tmp_path, **options)
    by_name = {row["setting"]: row for row in rows}
    assert by_name["Dense"]["same best %"] == 100
    assert by_name["Dense"]["cost %"] == pytest.approx(100)
    again = by_name["agreement 99%"]
    assert again["ranked again %"] == 100
    both = (
        by_name["fixed, 25% of the arithmetic"]["cost %"] + by_name["fixed, 50% of the arithmetic"]["cost %"]
    )
    # The second ranking starts before layer 2 of 12: it takes over two layers of all but the query.
    assert both - 100 * 2 / 12 < again["cost %"] < both - 100 * 2 / 12 * 0.9
    assert (tmp_path / "promise" / "promise.md").is_file()
