"""One JSON line per query and setting: what every table and plot is made from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from radical_rerank.errors import InputError

log = logging.getLogger("radical_rerank")


@dataclass(frozen=True)
class Cell:
    """One setting of an experiment: a method with its options at a budget, under a seed.

    The seed shuffles the candidates of every prompt, and draws for methods that draw.
    """

    name: str
    method: str
    keep: float = 1.0
    seed: int = 42
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """options of the data set, where an experiment varies it"""

    @property
    def key(self) -> str:
        return json.dumps(
            [self.name, self.method, self.keep, self.seed, self.options, self.data], sort_keys=True
        )


Key = tuple[str, str, str]
"""what names a record: its cell, its query's number, and its setting (see `digest_of`)"""


def digest_of(facts: Any) -> str:
    """16 hexadecimal digits that stand for everything that is told here (JSON, or dataclasses in it)."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no digest")


class Records:
    """An append-only file of records. A line that a kill cut short is dropped when it is opened again.

    A file may hold records of several runs. Those that a run claims are its own, whoever made them; all
    others are left alone.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._done: set[Key] = set()
        self._claimed: dict[Key, None] = {}
        if self.path.is_file():
            self._mend()
            self._done = {_key(record) for record in self}

    def _mend(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{self.path}, line {number} is not a record: {error}") from None
                fields = record if isinstance(record, dict) else {}
                missing = [name for name in ("cell_key", "task") if not isinstance(fields.get(name), str)]
                if missing:
                    raise InputError(f"{self.path}, line {number} is not a record: it has no {missing[0]}")
                yield record

    def claim(self, key: Key) -> bool:
        """Make this record one of the run's; True where it is still to be made."""
        self._claimed[key] = None
        return key not in self._done

    def claimed(self) -> list[dict[str, Any]]:
        """The run's records, in the order in which they were claimed."""
        found = {key: record for record in self if (key := _key(record)) in self._claimed}
        return [found[key] for key in self._claimed if key in found]

    def unclaimed(self) -> int:
        """How many records belong to other runs."""
        return len(self._done - self._claimed.keys())

    def keys(self) -> frozenset[Key]:
        """Of all that is there."""
        return frozenset(self._done)

    def add(self, record: dict[str, Any]) -> None:
        """Write one record whole, or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("ab") as file:
                file.write(line)
                file.flush()
        except OSError as error:
            if self.path.is_file() and self.path.stat().st_size > size:
                os.truncate(self.path, size)
            raise InputError(
                f"cannot write the record of query {record['task']} to {self.path}: {error.strerror}; "
                "all before it is kept, run the command again to go on"
            ) from None
        self._done.add(_key(record))


def _key(record: dict[str, Any]) -> Key:
    # Records of versions that did not write the setting are nobody's.
    return record["cell_key"], record["task"], record.get("setting", "")


@dataclass
class RunFolder:
    """A folder of records, tables and plots. It takes one run at a time: a second one is refused."""

    path: Path

    def __post_init__(self) -> None:
        self._records: dict[str, Records] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
        except OSError as error:
            raise InputError(f"cannot run in {self.path}: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._lock is not None:
            self._lock.close()  # the file stays: to remove it would let two runs lock two files
        others = sum(records.unclaimed() for records in self._records.values())
        if kind is None and others:
            log.info("%d records of other settings in %s were left alone", others, self.path)

    def records(self, name: str = "records") -> Records:
        """`name.jsonl` of this folder."""
        if name not in self._records:
            self._records[name] = Records(self.path / f"{name}.jsonl")
        return self._records[name]


def _locked(folder: Path) -> IO[str]:
    """The folder's lock file, held until it is closed or the process ends, however it ends."""
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        import fcntl
    except ImportError:  # not a Unix: there is nothing that a killed process would surely release
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        other = file.read().strip() or "another process"
        file.close()
        raise InputError(
            f"{other} is writing to {folder}: wait until it is done, or choose another folder"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


def provenance() -> dict[str, Any]:
    """Commit and versions, as every record carries them."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", str(here.parent)],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        commit += "+changes" if changed else ""
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    names = ("radical-rerank", "torch", "transformers")
    versions = {name: metadata.version(name) for name in names}
    return {"commit": commit, "versions": {**versions, "python": platform.python_version()}}
