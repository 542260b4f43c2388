"""Studies are made from records and go on after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radical_rerank import Random
from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.lab.experiments.run import command_of, run_study
from radical_rerank.lab.paper import SEEDS
from radical_rerank.lab.records import Records
from radical_rerank.lab.runner import Runner
from tests.cases import PROFILE
from tests.lab.data import (
    KilledError,
)

pytestmark = pytest.mark.slow


def runner_of(backbone: Backbone, **options: Any) -> Runner:
    return Runner(backbone, {"commit": "test"}, options={"max_image_tokens": 9, **options}, profile=PROFILE)


def study(name: str, runner: Runner, out: Path, seeds: tuple[int, ...] = (42, 7)) -> list[Any]:
    options: dict[str, Any] = {"keeps": [0.3], "seeds": list(seeds), "limit": 2}
    return run_study(name, runner, TESTBED, out, **options)


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


def test_a_study_of_another_image_size_is_another_study(
    backbone: Backbone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runners = [runner_of(backbone), runner_of(backbone, max_image_tokens=16)]
    caplog.set_level("INFO", "radical_rerank")
    first = study("diagnose", runners[0], tmp_path)
    assert not caplog.messages
    assert study("diagnose", runners[1], tmp_path) != first
    assert caplog.messages == [f"ignored 4 records of other settings in {tmp_path / 'diagnose'}"]


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
    command = command_of("main", runner, TESTBED, keeps=[0.2, 0.1], seeds=SEEDS, limit=5)
    assert command == (
        f"radical experiment main --limit 5 --max-image-tokens 9 --scorer generate --model {backbone.name}"
    )
    command = command_of("main", runner, TESTBED, keeps=[0.02], seeds=[42], limit=5)
    assert command.startswith("radical experiment main --limit 5 --keep 0.02 --seeds 42 --max-image-tokens 9")
