"""One JSON line per query and setting: what every table and plot is made from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from radical_rerank.errors import InputError


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


class Records:
    """An append-only file of records. A line that a kill cut short is dropped when it is opened again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._done: set[tuple[str, str]] = set()
        if self.path.is_file():
            self._mend()
            self._done = {(record["cell_key"], record["task"]) for record in self}

    def _mend(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"{self.path}, line {number} is not a record: {error}") from None

    def of(self, cells: Iterable[Cell], limit: int) -> list[dict[str, Any]]:
        """The records of these cells, cell by cell, of the first `limit` queries."""
        place = {cell.key: number for number, cell in enumerate(cells)}
        found = [r for r in self if r["cell_key"] in place and int(r["task"]) < limit]
        return sorted(found, key=lambda r: place[r["cell_key"]])

    def has(self, cell: Cell, task: str) -> bool:
        return (cell.key, task) in self._done

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
        self._done.add((record["cell_key"], record["task"]))


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
