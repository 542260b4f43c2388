"""Tables say what they show and fit a terminal; studies are made from records and go on after a kill."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.cli import main
from radical_rerank.lab.experiments.definitions import ADAPTIVE
from radical_rerank.lab.experiments.run import command_of, run_study
from radical_rerank.lab.metrics import MEASURES, SEEDS
from radical_rerank.lab.records import Records
from radical_rerank.lab.runner import Runner
from radical_rerank.lab.tables import summarize, write_tables
from radical_rerank.pruning import Random, build
from tests.cases import PROFILE


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


# On the terminal.


@pytest.mark.parametrize("name", ["experiment", "eval"])
def test_eighty_columns_show_the_table(
    name: str,
    tmp_path: Path,
    tiny_folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = str(tiny_folders["qwen3_vl"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("radical_rerank.lab.runner.profile_of", lambda *args, **options: PROFILE)
    command = {
        "experiment": ["experiment", "dynres", "--seeds", "1", "--max-image-tokens", "16"],
        "eval": ["eval", "--methods", "dynres-qrel", "--keep", "0.2", "--max-image-tokens", "16"],
    }[name]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--limit", "1", "--out", str(tmp_path), "--model", model])
    assert not stop.value.code
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "…" not in out
    head = next(line for line in out.splitlines() if "setting" in line)
    assert [part.strip() for part in head.strip("┃ ").split("┃")] == [
        "setting", "MRR@10", "Rel_D", "p (Dense)", "FLOPs saved",
    ]  # fmt: skip
    line = next(line for line in out.splitlines() if "DynRes-QRel 20%" in line)
    cells = [part.strip() for part in line.strip("│ ").split("│")]
    file = next(tmp_path.rglob("*.csv"))
    with file.open() as opened:
        known = next(row for row in csv.DictReader(opened) if row["setting"] == "DynRes-QRel 20%")
    assert cells == [known[head] for head in ("setting", "MRR@10", "Rel_D", "p (Dense)", "FLOPs saved")]
    assert len(known) > 12  # the files keep all


# Studies.


def runner_of(backbone: Backbone, **options: Any) -> Runner:
    return Runner(backbone, {"commit": "test"}, options={"max_image_tokens": 9, **options}, profile=PROFILE)


class KilledError(Exception):
    pass


def study(name: str, runner: Runner, out: Path, seeds: tuple[int, ...] = (42, 7)) -> list[Any]:
    options: dict[str, Any] = {"keeps": [0.3], "seeds": list(seeds), "limit": 2}
    return run_study(name, runner, out, track=lambda items, label: items, **options)


@pytest.mark.parametrize("name", ["transfer", "diagnose", "cases"])
def test_studies_write_records_and_go_on_after_a_kill(
    name: str, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = study(name, runner_of(backbone), tmp_path / "whole")
    whole = (tmp_path / "whole" / name / "records.jsonl").read_text().splitlines()
    counts = {"transfer": 4 * (1 + 5 + 2), "diagnose": 2 * 2, "cases": 2 * 8}
    assert len(whole) == counts[name]
    add = Records.add
    for lives in (1, 2):
        left = [None] * lives

        def dying(self: Records, record: dict[str, Any], left: list[None] = left) -> None:
            if not left:
                raise KilledError
            left.pop()
            add(self, record)

        monkeypatch.setattr(Records, "add", dying)
        with pytest.raises(KilledError):
            study(name, runner_of(backbone), tmp_path / "killed")
    monkeypatch.undo()
    assert study(name, runner_of(backbone), tmp_path / "killed") == expected
    killed = (tmp_path / "killed" / name / "records.jsonl").read_text().splitlines()
    key = lambda line: [json.loads(line)[part] for part in ("cell_key", "task", "setting")]  # noqa: E731
    assert sorted(map(key, killed)) == sorted(map(key, whole))
    files = sorted(path.name for path in (tmp_path / "whole" / name).iterdir() if path.suffix != ".jsonl")
    for file in files:
        if file != ".lock":
            same = (tmp_path / "whole" / name / file).read_bytes()
            assert (tmp_path / "killed" / name / file).read_bytes() == same, file

    # What is there is not run again: tables and pictures are made from the records alone.
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the model ran again")

    monkeypatch.setattr(Backbone, "next_token_logits", refuse)
    assert study(name, runner_of(backbone), tmp_path / "killed") == expected


def test_a_study_of_another_image_size_is_another_study(backbone: Backbone, tmp_path: Path) -> None:
    said: list[str] = []
    runners = [runner_of(backbone), runner_of(backbone, max_image_tokens=16)]
    runners[1].say = said.append
    first, second = (study("diagnose", runner, tmp_path) for runner in runners)
    assert first != second
    assert said == [f"4 records of other settings in {tmp_path / 'diagnose'} were left alone"]


def test_transfer_counts_right_answers(backbone: Backbone, tmp_path: Path) -> None:
    rows = study("transfer", runner_of(backbone), tmp_path)
    records = [
        json.loads(line) for line in (tmp_path / "transfer" / "records.jsonl").read_text().splitlines()
    ]
    assert [row["method"] for row in rows[:2]] == ["Dense", "RaDiCal 30%"]
    for row in rows:
        asked = 0
        for kind in ("yes/no", "colour"):
            mine = [r["right"] for r in records if r["cell"] == row["method"] and r["kind"] == kind]
            assert row[kind] == pytest.approx(100 * sum(mine) / len(mine))
            asked += len(mine)
        assert asked == (8 if row["method"].startswith("Random") else 4)
    radical = [record for record in records if record["method"] == "radical"]
    assert all(record["options"] == {"prior": "relevance"} for record in radical)
    text = (tmp_path / "transfer" / "transfer.md").read_text()
    assert "Random: mean over seeds 42, 7" in text
    assert "SparseVLM has the fixed budget" in text


def test_random_draws_anew_for_every_question(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it keeps the same places of every picture, and is no control."""
    keys: dict[tuple[int, float], list[int]] = {}
    on = Random.on

    def spy(self: Random, model: Any, layout: Any, *rest: Any) -> Any:
        keys.setdefault((self.seed, self.keep), []).append(layout.key)
        return on(self, model, layout, *rest)

    monkeypatch.setattr(Random, "on", spy)
    study("transfer", runner_of(backbone), tmp_path)
    assert keys == {(42, 0.3): [0, 1, 2, 3], (7, 0.3): [0, 1, 2, 3]}


def test_the_note_is_the_command_that_makes_the_table_again(backbone: Backbone) -> None:
    runner = runner_of(backbone, scorer="generate")
    command = command_of("main", runner, keeps=[0.2, 0.1], seeds=SEEDS, limit=5)
    assert command == (
        f"radical experiment main --limit 5 --max-image-tokens 9 --scorer generate --model {backbone.name}"
    )
    command = command_of("main", runner, keeps=[0.02], seeds=[42], limit=5)
    assert command.startswith("radical experiment main --limit 5 --keep 0.02 --seeds 42 --max-image-tokens 9")
