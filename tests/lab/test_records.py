"""Records: kills, full disks, bad lines, one run at a time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.lab.records import Cell, Records, RunFolder, digest_of
from radical_rerank.lab.runner import Runner
from radical_rerank.lab.tables import summarize
from tests.cases import PROFILE
from tests.lab.data import (
    CELLS,
    drawn_lists,
    one_query,
    without_time,
)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_records(runner: Runner, tmp_path: Path) -> None:
    whole = Records(tmp_path / "whole.jsonl")
    runner.run(drawn_lists(), CELLS, whole)
    assert len(list(whole)) == 16
    expected = without_time(whole)
    rng = random.Random(3)
    path = tmp_path / "killed.jsonl"
    for _ in range(20):  # killed at random places, also in the middle of a line
        records = Records(path)
        left = rng.randint(0, 5)

        class KilledError(Exception):
            pass

        class Dying(Records):
            def add(self, record: dict[str, Any]) -> None:
                nonlocal left
                if left == 0:
                    raise KilledError
                left -= 1
                super().add(record)

        records = Dying(path)
        try:
            runner.run(drawn_lists(), CELLS, records)
            break
        except KilledError:
            if path.is_file() and rng.random() < 0.7:
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.truncate(size - rng.randint(0, 60))
    final = without_time(Records(path))
    key = lambda r: (int(r["task"]), [c.key for c in CELLS].index(r["cell_key"]))  # noqa: E731
    assert sorted(final, key=key) == sorted(expected, key=key)
    assert len(final) == 16


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path / "r.jsonl")
    records.add({"task": "1", "cell_key": "a"})
    real_open = Path.open

    def full(self: Path, mode: str = "r", **options: Any) -> Any:
        file = real_open(self, mode, **options)
        if mode == "ab":
            write = file.write

            class Full:
                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *args: Any) -> None:
                    file.close()

                def write(self, data: bytes) -> int:
                    write(data[:5])
                    file.flush()
                    raise OSError(28, "No space left on device")

                def flush(self) -> None: ...

            return Full()
        return file

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(InputError, match=r"query 2 .* No space left"):
        records.add({"task": "2", "cell_key": "a"})
    monkeypatch.undo()
    assert [record["task"] for record in Records(tmp_path / "r.jsonl")] == ["1"]


HOLD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from radical_rerank.lab.records import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_two_runs_into_one_folder_are_refused_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError) as refused, RunFolder(folder):
            pass
        assert str(folder) in str(refused.value)
        assert f"process {other.pid} " in str(refused.value)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    for _ in range(2):  # killed, or ended: the folder is free again
        with RunFolder(folder), pytest.raises(InputError, match=f"process {os.getpid()} "), RunFolder(folder):
            pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot run in .*file/out: Not a directory"),
        RunFolder(tmp_path / "file" / "out"),
    ):
        pass


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "it has no cell_key"),
        (b'"text"', "it has no cell_key"),
        (b'{"task": "1"}', "it has no cell_key"),
        (b'{"cell_key": "a"}', "it has no task"),
        (b'{"cell_key": "a", "task": 1}', "it has no task"),
        (b"{", "is not a record"),
        (b"\xff\xfe", "is not a record"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"cell_key": "a", "task": "1"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        Records(path)
    assert f"{path}, line 2 " in str(error.value)


def test_records_of_versions_without_a_setting_are_ignored(
    backbone: Backbone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, cell = tmp_path / "records.jsonl", Cell("Dense", "dense")
    caplog.set_level("INFO", "radical_rerank")
    path.write_text(json.dumps({"cell_key": cell.key, "task": "0", "measures": {}}) + "\n")
    with RunFolder(tmp_path) as folder:
        Runner(backbone, {}).run(one_query(), [cell], folder.records())
        assert [record["query"] for record in folder.records().claimed()] == [one_query().tasks[0].text]
    assert caplog.messages == [f"ignored 1 records of other settings in {tmp_path}"]


def test_digests_refuse_what_they_cannot_tell_apart() -> None:
    assert digest_of([1, {"b": 1, "a": PROFILE}]) == digest_of([1, {"a": PROFILE, "b": 1}])
    with pytest.raises(TypeError, match="object has no digest"):
        digest_of([object()])


def test_records_in_memory_make_the_same_rows(runner: Runner, tmp_path: Path) -> None:
    """For programs that need figures but no files."""
    memory, file = Records(), Records(tmp_path / "records.jsonl")
    for records in (memory, file):
        runner.run(drawn_lists(queries=2), CELLS[:2], records)
    first, second = (
        [replace(row, seconds=0.0, scoring=0.0) for row in summarize(r.claimed())] for r in (memory, file)
    )
    assert first == second
    assert len(list(memory)) == 4
    assert list(tmp_path.rglob("*.jsonl")) == [tmp_path / "records.jsonl"]


def test_a_ranking_of_another_experiment_is_taken_over_under_its_new_name(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path / "main", share=True) as folder:
        runner.run(drawn_lists(), CELLS, folder.records())
        made = {record["cell"]: record for record in folder.records().claimed() if record["task"] == "0"}

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the model ran again")

    monkeypatch.setattr(Backbone, "next_token_logits", refuse)
    same = Cell("K = 4", "radical", 0.2, options={"num_stages": 4})  # 4 is the default
    with RunFolder(tmp_path / "stages", share=True) as folder:
        runner.run(drawn_lists(), [same], folder.records())
        taken = folder.records().claimed()
    assert [record["cell"] for record in taken] == ["K = 4"] * 4
    named = ("cell", "cell_key", "options")
    assert taken[0]["options"] == {"num_stages": 4}
    assert without(taken[0], named) == without(made["RaDiCal 20%"], named)

    for other in (replace(same, seed=1), replace(same, keep=0.1), replace(same, data={"weight": 1.0})):
        with (
            RunFolder(tmp_path / "other", share=True) as folder,
            pytest.raises(AssertionError, match="again"),
        ):
            runner.run(drawn_lists(), [other], folder.records())
    with RunFolder(tmp_path / "alone") as folder, pytest.raises(AssertionError):
        runner.run(drawn_lists(), [same], folder.records())


def without(record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}
