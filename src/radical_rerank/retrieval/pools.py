"""Candidate pools as TREC run files, so that any retriever's run can be read in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from radical_rerank.errors import InputError
from radical_rerank.files import replacing

Pool = Mapping[str, Sequence[tuple[str, float]]]
"""per query (picture, score), best first"""


def write_run(path: str | Path, pool: Pool, tag: str) -> Path:
    """`query Q0 picture rank score tag`, one line each. Ids must not contain spaces."""
    path = Path(path)
    with replacing(path) as file:
        for query, ranked in pool.items():
            for rank, (name, score) in enumerate(ranked, start=1):
                if any(c.isspace() for c in query + name):
                    raise InputError(
                        f"a run file cannot hold the id {name!r} of query {query!r}: it has spaces"
                    )
                file.write(f"{query} Q0 {name} {rank} {score:.6f} {tag}\n")
    return path


def read_run(
    path: str | Path, *, known: Collection[str] | None = None, depth: int | None = None
) -> dict[str, list[str]]:
    """Per query its pictures by falling score, ties by rank.

    known: the data set's ids; another id is an error that names the line
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the run {path}: {error}") from None
    pools: dict[str, list[tuple[float, int, str]]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            query, _, name, rank, score = parts[:5]
            entry = (-float(score), int(rank), name)
        except ValueError:
            raise InputError(f"{path}, line {number}: not `query Q0 id rank score tag`: {line!r}") from None
        if known is not None and name not in known:
            raise InputError(f"{path}, line {number}: {name!r} is not a picture of the data set")
        if any(name == other for _, _, other in pools.setdefault(query, [])):
            raise InputError(f"{path}, line {number}: query {query} names {name!r} twice")
        pools[query].append(entry)
    if not pools:
        raise InputError(f"the run {path} is empty")
    return {query: [name for _, _, name in sorted(entries)][:depth] for query, entries in pools.items()}
