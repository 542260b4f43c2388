"""The experiment position, and lists to fit scores on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radical_rerank import Backbone
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.errors import InputError
from radical_rerank.lab.experiments.position import PER_LIST, placed
from radical_rerank.lab.experiments.run import run_study
from radical_rerank.lab.judged import draw_reliability, judged_lists
from radical_rerank.lab.runner import Runner, work_of
from radical_rerank.reranking.fitting import measure
from radical_rerank.reranking.scores import LabelledList, ScoreCalibration


def test_the_match_visits_slots_that_are_spread_evenly() -> None:
    data = TESTBED.lists(lists=25)
    seen = []
    for number in (0, 3, 24):
        work = work_of(data, number)
        orders = [placed(work, turn, seed=42) for turn in range(PER_LIST)]
        for order, slot in orders:
            assert sorted(order) == sorted(work.candidates)
            assert order[slot] in work.task.relevant
        slots = [slot for _, slot in orders]
        assert sorted(s % 5 for s in slots) == [number % 5] * PER_LIST
        assert len(set(slots)) == PER_LIST
        rest = {tuple(name for name in order if name not in work.task.relevant) for order, _ in orders}
        assert len(rest) == 1, "only the match moves"
        seen += slots
    assert len(set(seen)) > PER_LIST


def test_the_experiment_has_a_row_per_budget_and_number_of_orders(tmp_path: Path) -> None:
    runner = Runner(Backbone.from_pretrained("scenes"))
    rows = run_study("position", runner, TESTBED, tmp_path, keeps=[1.0, 0.1], seeds=[42], limit=2)
    names = [row["setting"] for row in rows]
    assert names[:5] == [
        "RaDiCal 100%, 1 order",
        "RaDiCal 100%, 4 orders",
        "RaDiCal 10%, 1 order",
        "RaDiCal 10%, 4 orders",
        "RaDiCal 10%, 2 orders",
    ]
    costs = {row["setting"]: row["FLOPs %"] for row in rows}
    assert costs["RaDiCal 100%, 4 orders"] == pytest.approx(400)
    assert costs["RaDiCal 10%, 4 orders"] == pytest.approx(4 * costs["RaDiCal 10%, 1 order"], rel=1e-3)
    if len(rows) > 5:
        assert rows[5]["FLOPs %"] == pytest.approx(costs["RaDiCal 10%, 2 orders"], rel=0.05)
    else:
        assert costs["RaDiCal 10%, 2 orders"] >= 100
    assert all(row["spread"] == 0 for row in rows if row["orders"] > 1)
    written = json.loads((tmp_path / "position" / "position.json").read_text())
    assert len(written["rows"]) == len(rows)


def test_lists_to_fit_on_are_no_lists_of_the_figures() -> None:
    fitting = TESTBED.for_fitting("scenes", 3)
    texts = {task.text for task in TESTBED.lists(lists=3).tasks}
    assert len(fitting.tasks) == 3
    assert not texts & {task.text for task in fitting.tasks}
    with pytest.raises(InputError, match="scores are fitted on scenes or scenes-gallery"):
        TESTBED.for_fitting("scenes-composed", 3)


def test_judged_lists_know_their_relevant_pictures() -> None:
    data = TESTBED.lists(lists=3, count=5)
    lists = judged_lists(data, 2, lambda: pytest.fail("lists need no first stage"))
    assert len(lists) == 2
    task = data.tasks[1]
    assert [name for name, yes in zip(task.candidates or (), lists[1].relevant, strict=True) if yes] == list(
        task.relevant
    )
    assert lists[1].scores is None


def test_judged_lists_of_a_gallery_have_the_first_stage_s_scores() -> None:
    data = TESTBED.gallery(size=30, queries=2, split="validation")
    backbone = Backbone.from_pretrained("scenes")
    lists = judged_lists(data, 5, lambda: TESTBED.embedder(backbone), depth=6)
    assert len(lists) == 2
    for one in lists:
        assert one.scores is not None
        assert list(one.scores) == sorted(one.scores, reverse=True)
        assert len(one.documents) == len(one.relevant) == len(one.scores) == 6


def test_the_reliability_diagram_is_drawn(tmp_path: Path) -> None:
    lists = [LabelledList([-0.1, -2.4], [True, False]), LabelledList([-0.5, -0.9], [False, False])]
    path = draw_reliability(tmp_path / "plot.png", {0.2: measure(ScoreCalibration(), lists)}, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
