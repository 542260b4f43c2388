"""Tables state what they show."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.lab.experiments.definitions import (
    ADAPTIVE,
    EXPERIMENTS,
    Experiment,
    compared,
    run_experiment,
)
from radical_rerank.lab.metrics import MEASURES
from radical_rerank.lab.paper import SEEDS, published
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import Runner
from radical_rerank.lab.tables import summarize, write_tables
from radical_rerank.pruning import build
from tests.lab.data import (
    drawn_lists,
    one_query,
)


def made_up(
    cell: str,
    task: int,
    value: float,
    *,
    in_pool: bool = True,
    seed: int = 42,
    method: str = "radical",
    **options: Any,
) -> dict[str, Any]:
    """A record with this value in all measures, shifted a little for each."""
    measures = {name: value / (1 + place) for place, name in enumerate(MEASURES)} if in_pool else {}
    return {
        "cell": cell,
        "task": str(task),
        "seed": seed,
        "method": method,
        "keep": 1.0 if method == "dense" else 0.2,
        "data": {},
        "options": options,
        "measures": dict.fromkeys(MEASURES, 0.0) | measures,
        "in_pool": in_pool,
        "relevant": {"a": 1},
        "visual_tokens": 100,
        "visual_tokens_left": 20,
        "average_tokens": 50.0,
        "flops_saved": 0.5,
        "kv_saved": 0.4,
        "seconds": {"decoder": 0.1},
    }


def pooled() -> list[dict[str, Any]]:
    """Six queries, two seeds; the pools of two queries miss every match."""
    return [
        made_up(cell, task, (task + 1) / (8 + seed % 5), in_pool=task not in (1, 4), seed=seed, method=method)
        for cell, method in (("Dense", "dense"), ("RaDiCal 20%", "radical"))
        for task in range(6)
        for seed in (42, 123)
    ]


def test_conditional_measures_leave_out_queries_whose_pool_has_no_match(tmp_path: Path) -> None:
    rows = summarize(pooled())
    for row in rows:
        for name in MEASURES:
            everything, inside = [], []
            for task in range(6):
                mine = [r for r in pooled() if r["cell"] == row.name and r["task"] == str(task)]
                value = sum(r["measures"][name] for r in mine) / len(mine)
                everything.append(value)
                if task not in (1, 4):
                    inside.append(value)
            assert row.measures[name] == pytest.approx(100 * sum(everything) / 6)
            assert row.conditional[name] == pytest.approx(100 * sum(inside) / 4)
            assert row.conditional[name] > row.measures[name]
    write_tables(tmp_path, "t", "pools", rows)
    with (tmp_path / "t.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, rows, strict=True):
        for name in ("R@1", "R@5", "R@10", "MRR@10"):
            assert line[f"c{name}"] == f"{row.conditional[name]:.2f}"
            assert line[name] == f"{row.measures[name]:.2f}"
    whole = summarize([r for r in pooled() if r["in_pool"]])
    write_tables(tmp_path, "t", "lists", whole)
    assert "cR@1" not in (tmp_path / "t.csv").read_text()  # they would say nothing


def test_tables_state_queries_seeds_and_sparsevlm_s_budget(tmp_path: Path) -> None:
    records = [made_up("Dense", t, 0.5, seed=s, method="dense") for t in range(3) for s in SEEDS]
    rows = summarize(records)
    write_tables(tmp_path, "t", "a title", rows, "A note.")
    for suffix in ("md", "tex"):
        assert (
            "3 queries per row; mean over seeds 42, 123, 456, 789, 1024."
            in (tmp_path / f"t.{suffix}").read_text()
        )
    assert "42 123 456 789 1024" in (tmp_path / "t.csv").read_text()
    assert json.loads((tmp_path / "t.json").read_text())[0]["seeds_used"] == list(SEEDS)
    assert "SparseVLM" not in (tmp_path / "t.md").read_text()

    def note(*records: dict[str, Any]) -> str:
        write_tables(tmp_path, "t", "a title", summarize(records))
        return (tmp_path / "t.md").read_text().split("\n")[2]

    fixed = made_up("SparseVLM 20%", 0, 0.5, method="sparsevlm")
    adaptive = made_up(ADAPTIVE.name, 0, 0.5, method="sparsevlm", budget="adaptive")
    assert "SparseVLM has the fixed budget" in note(fixed)
    assert "adaptive" not in note(fixed)
    assert "SparseVLM has the fixed budget" not in note(adaptive)
    assert "does not meet R" in note(adaptive)
    assert "fixed budget" in note(fixed, adaptive)
    assert "does not meet R" in note(fixed, adaptive)
    assert "seed 42." in note(fixed)
    assert "seeds 42, 123" in note(fixed, replace_seed(fixed, 123), made_up("FastV", 0, 0.5, method="fastv"))


def replace_seed(record: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**record, "seed": seed}


def test_the_adaptive_row_is_sparsevlm_s_first_version() -> None:
    pruner = build(ADAPTIVE.method, keep=ADAPTIVE.keep, **ADAPTIVE.options)
    assert (pruner.budget, pruner.scale, pruner.bias) == ("adaptive", 13.5, 0.0)  # type: ignore[attr-defined]
    # It meets no budget, so it is nobody's rival at one.
    rivals = [made_up("RaDiCal 20%", 0, 0.4), made_up("FastV 20%", 0, 0.3, method="fastv")]
    best = {**made_up(ADAPTIVE.name, 0, 0.9, method="sparsevlm", budget="adaptive"), "keep": ADAPTIVE.keep}
    alone, beside = (summarize(records) for records in (rivals, [*rivals, best]))
    assert [row.p_best for row in alone] == [row.p_best for row in beside[:2]]
    assert beside[2].p_best is None


@pytest.mark.slow
def test_tables_are_made_from_records(runner: Runner, tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl")
    plan = Experiment("tiny", lambda keeps: compared(["radical", "fastv"], keeps))
    cells = run_experiment(plan, runner, records, keeps=[0.2], seeds=[1, 2], limit=4, data=drawn_lists())
    assert len(cells) == 6
    rows = summarize(records, {"Dense": 84.04})
    assert [row.name for row in rows] == ["Dense", "RaDiCal 20%", "FastV 20%"]
    for row in rows:
        mine = [r["measures"]["MRR@10"] for r in records if r["cell"] == row.name]
        assert row.measures["MRR@10"] == pytest.approx(100 * sum(mine) / len(mine))
        assert row.queries == 4
        assert row.seeds == 2
    assert rows[0].rel_d == pytest.approx(100)
    assert rows[0].paper == 84.04
    assert rows[1].p_dense is not None
    write_tables(tmp_path, "table", "a title", rows, "a note")
    text = (tmp_path / "table.md").read_text()
    assert text.count("|\n") == 5
    assert "84.04" in text
    assert r"\%" in (tmp_path / "table.tex").read_text()
    assert (tmp_path / "table.csv").read_text().startswith("setting,R@1")
    assert published("ablation")["full"] == 83.98
    with pytest.raises(InputError, match="runs only on a testbed"):
        run_experiment(
            EXPERIMENTS["candidates"], runner, records, keeps=[0.2], seeds=[1], limit=1,
            data=drawn_lists(),
        )  # fmt: skip


def test_mixed_records_are_never_averaged(backbone: Backbone, tmp_path: Path) -> None:
    runner = Runner(backbone, {})
    records = Records(tmp_path / "r.jsonl")
    for seed in (0, 1):
        runner.run(one_query(seed=seed), [Cell("Dense", "dense")], records)
    assert len(list(records)) == 2
    with pytest.raises(InputError, match="two records of 'Dense' for query 0 and seed 42"):
        summarize(records)
    runner.run(one_query("other", text="a red star"), [Cell("Dense", "dense")], records)
    with pytest.raises(InputError, match="are of 2 datasets"):
        summarize(records)
