"""Records: one JSON line per query and setting. All tables and plots are made from them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from radical_rerank.errors import InputError
from radical_rerank.lab.paper import SEED

log = logging.getLogger("radical_rerank")


@dataclass(frozen=True)
class Cell:
    """One setting of an experiment: a method with its options at a budget, under a seed.

    Args:
        name: the name of the setting in tables
        method: the name of a pruning method
        keep: the fraction of visual tokens alive at the end
        seed: shuffles the candidates of every prompt, and seeds methods that draw at random
        options: options of the method
        data: options of the data set, for experiments that vary it

    Example:
        >>> cell = Cell("RaDiCal 20%", "radical", 0.2, options={"gap": 3})
        >>> cell.seed
        42
    """

    name: str
    method: str
    keep: float = 1.0
    seed: int = SEED
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The setting as JSON. Equal settings have equal keys."""
        return json.dumps(
            [self.name, self.method, self.keep, self.seed, self.options, self.data], sort_keys=True
        )


Key = tuple[str, str, str]
"""identifies a record: the cell's key, the query's number, and a digest of everything else that matters"""


def digest_of(facts: Any) -> str:
    """Return 16 hexadecimal digits that identify a value.

    Args:
        facts: anything that JSON can hold, and dataclasses

    Example:
        >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
        True
    """
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no digest")


class Records:
    """The records of a file, to which new ones are appended.

    A file can hold records of several runs. A run claims the records that it needs. It adds those that are
    missing and reports only on those that it claimed. If the file ends in an incomplete line, because the
    process was killed while writing it, that line is dropped.

    Args:
        path: the file; None keeps the records in memory
        others: files of other runs, whose records of the same rankings are taken over

    Example:
        >>> records = Records()
        >>> records.claim(("a cell", "0", ""))
        True
        >>> records.add({"cell_key": "a cell", "task": "0"})
        >>> records.claim(("a cell", "0", "")), len(records.claimed())
        (False, 1)
    """

    def __init__(self, path: str | Path | None = None, others: Iterable[Path] = ()) -> None:
        self.path = None if path is None else Path(path)
        self._elsewhere = {key: place for other in others for key, place in _rankings(other)}
        self._memory: list[dict[str, Any]] = []
        self._done: set[Key] = set()
        self._claimed: dict[Key, None] = {}
        if self.path is not None and self.path.is_file():
            _drop_incomplete_line(self.path)
            self._done = {_key(record) for record in self}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self._memory
        if self.path is None or not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _parsed(line, f"{self.path}, line {number}")

    def claim(self, key: Key) -> bool:
        """Make a record part of this run. Returns True if it does not exist yet."""
        self._claimed[key] = None
        return key not in self._done

    def elsewhere(self, key: Key) -> dict[str, Any] | None:
        """Return another run's record of the same ranking, whatever its setting is called; None without one.

        Args:
            key: of the record that is missing
        """
        place = self._elsewhere.get(_ranking(key))
        if place is None:
            return None
        path, offset = place
        with path.open("rb") as file:
            file.seek(offset)
            return _parsed(file.readline(), str(path))

    def claimed(self) -> list[dict[str, Any]]:
        """Return the records of this run, in the order in which they were claimed."""
        known = {key: record for record in self if (key := _key(record)) in self._claimed}
        return [known[key] for key in self._claimed if key in known]

    def unclaimed(self) -> int:
        """Return how many records belong to other runs."""
        return len(self._done - self._claimed.keys())

    def keys(self) -> frozenset[Key]:
        """Return the keys of all records."""
        return frozenset(self._done)

    def add(self, record: dict[str, Any]) -> None:
        """Append one record. If writing fails, nothing of it is left in the file."""
        if self.path is None:
            self._memory.append(record)
        else:
            self._append(self.path, record)
        self._done.add(_key(record))

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        size = path.stat().st_size if path.is_file() else 0
        try:
            with path.open("ab") as file:
                file.write(line)
                file.flush()
        except OSError as error:
            if path.is_file() and path.stat().st_size > size:
                os.truncate(path, size)
            raise InputError(
                f"cannot write the record of query {record['task']} to {path}: {error.strerror}; "
                "earlier records are saved, run the command again to continue"
            ) from None


def _drop_incomplete_line(path: Path) -> None:
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        os.truncate(path, complete)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not a record: {error}") from None
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    missing = [name for name in ("cell_key", "task") if not isinstance(fields.get(name), str)]
    if missing:
        raise InputError(f"{where} is not a record: it has no {missing[0]}")
    return fields


def _key(record: dict[str, Any]) -> Key:
    # Early versions did not write the setting: no run claims their records.
    return record["cell_key"], record["task"], record.get("setting", "")


def _ranking(key: Key) -> Key:
    """Return what identifies a ranking: experiments have different names for the same setting."""
    cell_key, task, setting = key
    return json.dumps(json.loads(cell_key)[-1]), task, setting


def _rankings(path: Path) -> Iterator[tuple[Key, tuple[Path, int]]]:
    """Yield the rankings in a file, and where their records start."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # else it is being written
                record = _parsed(line, str(path))
                if "measures" in record and "setting" in record:
                    yield _ranking(_key(record)), (path, start)
            start += len(line)


@dataclass
class RunFolder:
    """A folder of records, tables and plots, as a context. It refuses a second run at the same time.

    Args:
        path: the folder; it is created if it does not exist
        share: whether rankings of the folders beside it are taken over
    """

    path: Path
    share: bool = False

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
            self._lock.close()  # the file is kept: without it, two runs could lock two different files
        others = sum(records.unclaimed() for records in self._records.values())
        if kind is None and others:
            log.info("ignored %d records of other settings in %s", others, self.path)

    def records(self, name: str = "records") -> Records:
        """Return the records of `name.jsonl` in this folder."""
        if name not in self._records:
            own = self.path / f"{name}.jsonl"
            beside = sorted(self.path.parent.glob("*/*.jsonl")) if self.share else []
            self._records[name] = Records(own, [path for path in beside if path != own])
        return self._records[name]


def _locked(folder: Path) -> IO[str]:
    """Lock the folder. The lock ends when the returned file is closed or the process ends."""
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        import fcntl
    except ImportError:  # not a Unix system: there is no lock that is certain to end with the process
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
    """Return the commit and the versions of the main packages, as every record holds them."""
    here = Path(__file__).parent
    try:
        commit = _git("rev-parse", "HEAD", cwd=here)
        commit += "+changes" if _git("status", "--porcelain", "--", str(here.parent), cwd=here) else ""
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    names = ("radical-rerank", "torch", "transformers")
    versions = {name: metadata.version(name) for name in names}
    return {"commit": commit, "versions": {**versions, "python": platform.python_version()}}


def _git(*arguments: str, cwd: Path) -> str:
    command = ["git", *arguments]
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()
