"""`radical eval` and `radical experiment`."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radical_rerank.cli import main, spread
from radical_rerank.lab.experiments.definitions import (
    ADAPTIVE,
    EXPERIMENTS,
    seeded,
)
from radical_rerank.lab.paper import SEEDS
from radical_rerank.lab.records import Records, RunFolder
from radical_rerank.lab.runner import Runner
from radical_rerank.lab.testbed import Testbed
from radical_rerank.reranking.prompt import PromptTemplate
from tests.cases import PROFILE
from tests.lab.data import (
    blank_pictures,
    evaluate,
    write_data,
    write_pool,
)
from tests.tiny import write_tiny


def test_options_take_several_values() -> None:
    assert spread(["eval", "--keep", "0.2", "0.1", "--out", "x", "--methods", "a", "b"]) == [
        "eval", "--keep", "0.2", "--keep", "0.1", "--out", "x", "--methods", "a", "--methods", "b",
    ]  # fmt: skip
    assert spread(["rank", "--keep", "0.2", "a.png"]) == ["rank", "--keep", "0.2", "a.png"]


def test_the_commands_name_what_they_do_not_know(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["experiment", "alchemy"], "unknown experiment 'alchemy'"),
        (["eval", "--dataset", "imagenet", "--out", str(tmp_path)], "unknown data set"),
        (["eval", "--methods", "magic", "--out", str(tmp_path)], "unknown method 'magic'"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["experiment", "--json"])
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert names == {
        "main", "ablation", "layers", "stages", "gap", "candidates", "similarity", "retrievers", "dynres",
        "position", "composed", "costs", "promise", "nucleus", "transfer", "pareto", "diagnose", "cases",
    }  # fmt: skip


def test_graded_relevance_reaches_the_table(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    blank_pictures(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    (tmp_path / "token.txt").write_text("a.jpg#0\tA dog .\nb.jpg#0\tA car .\nc.jpg#0\tA cat .\n")
    (tmp_path / "expert.txt").write_text("b.jpg\ta.jpg#0\t3\t3\t2\n")
    (tmp_path / "pool.run").write_text(
        "".join(
            f"{q} Q0 {d}.jpg {rank} {1 / rank} x\n"
            for q in ("a.jpg#0", "b.jpg#0", "c.jpg#0")
            for rank, d in enumerate("abc", start=1)
        )
    )
    command = [
        "eval", "--dataset", "flickr8k", "--images", str(tmp_path),
        "--annotations", str(tmp_path / "token.txt"),
        "--expert", str(tmp_path / "expert.txt"), "--pool", str(tmp_path / "pool.run"), "--methods", "fastv",
        "--keep", "0.5", "--model", str(tiny_folders["qwen3_vl"]), "--out", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)
    assert all(row["graded"] and 0 < row["measures"]["nDCG@10"] <= 100 for row in rows)
    assert "nDCG@10" in (tmp_path / "out" / "table.md").read_text()


def other_words(data: Path, model: Path) -> None:
    write_data(data, words=("A red star .", "A blue ring .", "A green heart .", "A car ."))


def other_pictures(data: Path, model: Path) -> None:
    write_data(data, shift=1)


def other_pool(data: Path, model: Path) -> None:
    write_pool(data, (1, 0, 3))


def other_weights(data: Path, model: Path) -> None:
    write_tiny(model, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [other_words, other_pictures, other_pool, other_weights])
def test_a_second_run_into_a_folder_reports_its_own_figures(
    change: Callable[[Path, Path], None],
    tmp_path: Path,
    tiny_folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, model, out = tmp_path / "data", tmp_path / "model", tmp_path / "out"
    write_data(data)
    shutil.copytree(tiny_folders["qwen3_vl"], model)
    before, said = evaluate(capsys, data, model, out)
    assert "ignored" not in said
    change(data, model)
    after, said = evaluate(capsys, data, model, out)
    fresh, _ = evaluate(capsys, data, model, tmp_path / "fresh")
    assert after == fresh
    assert f"ignored 8 records of other settings in {out}" in said
    assert after != before  # else the change tests nothing
    lines = (out / "records.jsonl").read_text().splitlines()
    assert len(lines) == 16


@pytest.mark.slow
def test_a_smaller_limit_tabulates_fewer_queries(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data")
    model = tiny_folders["qwen3_vl"]
    for limit in (4, 2, 3):
        rows, said = evaluate(capsys, tmp_path / "data", model, tmp_path / "out", "--limit", str(limit))
        assert [row["queries"] for row in rows] == [limit, limit]
        assert ("ignored" in said) == (limit < 4)
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 8  # nothing ran twice


def test_the_commands_hold_the_lock(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data")
    model = str(tiny_folders["qwen3_vl"])
    for command, folder in (
        (["experiment", "dynres", "--limit", "1", "--out", str(tmp_path)], tmp_path / "dynres"),
        (["eval", "--limit", "1", "--out", str(tmp_path / "out")], tmp_path / "out"),
    ):
        with RunFolder(folder), pytest.raises(SystemExit) as stop:
            main([*command, "--model", model])
        assert stop.value.code == 2
        assert f"is writing to {folder}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_model_may_write_the_order_in_an_evaluation(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data")
    template = json.loads(json.dumps(vars(PromptTemplate.load("qwen3_vl"))))
    (tmp_path / "template.json").write_text(json.dumps({**template, "intro": "Look at these. "}))
    for extra in ([], ["--scorer", "generate"], ["--template", str(tmp_path / "template.json")]):
        evaluate(
            capsys, tmp_path / "data", tiny_folders["qwen3_vl"], tmp_path / "out", "--limit", "1", *extra
        )
    records = list(Records(tmp_path / "out" / "records.jsonl"))
    assert [record["scorer"] for record in records] == ["logits"] * 2 + ["generate"] * 2 + ["logits"] * 2
    assert records[0]["template"] == records[2]["template"] != records[4]["template"]
    assert records[0]["scores"] != records[4]["scores"]
    with pytest.raises(SystemExit):
        main(["eval", "--scorer", "guess", "--out", str(tmp_path / "x"), "--limit", "1"])
    assert "scorer must be one of" in capsys.readouterr().err


def test_experiments_have_the_paper_s_five_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    asked: dict[str, Any] = {}

    def run_study(name: str, runner: Runner, testbed: Testbed, out: Path, **options: Any) -> list[Any]:
        asked.update(options, runner=runner)
        return []

    monkeypatch.setattr("radical_rerank.lab.experiments.run.run_study", run_study)
    command = ["experiment", "main", "--out", str(tmp_path), "--model", str(tiny_folders["qwen3_vl"])]
    with pytest.raises(SystemExit):
        main([*command, "--scorer", "generate", "--max-image-tokens", "99"])
    assert tuple(asked["seeds"]) == SEEDS == (42, 123, 456, 789, 1024)
    assert asked["runner"].options == {"scorer": "generate", "max_image_tokens": 99}
    with pytest.raises(SystemExit):
        main([*command, "--seeds", "7", "8"])
    assert asked["seeds"] == [7, 8]
    cells = seeded(EXPERIMENTS["main"].cells([0.2]), SEEDS)
    rows = {cell.name for cell in cells}
    assert all([c.seed for c in cells if c.name == name] == list(SEEDS) for name in rows)
    assert ADAPTIVE.name in rows
    assert len(seeded(EXPERIMENTS["main"].cells([0.2]), [1, 1])) == len(rows)


@pytest.mark.slow
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
