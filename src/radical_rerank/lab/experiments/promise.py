"""Does `agreement=` keep its promise on fresh lists, and what does it cost?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from radical_rerank.errors import CalibrationError
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.records import Cell, Records, digest_of
from radical_rerank.lab.runner import QueryWork, work_of
from radical_rerank.lab.tables import write_facts
from radical_rerank.reranking import Ranking, Reranker
from radical_rerank.reranking.calibration import profile_of

AGREEMENTS = (0.98, 0.99)
CACHED = 64 << 20
"""bytes of the prompt cache: a list is ranked again at once, so a few lists are enough"""


def promise(setup: Setup) -> list[dict[str, Any]]:
    """Rank fresh lists without pruning, with every tuned schedule, and with `agreement=`."""
    profile = profile_of(setup.runner.plain)
    if not profile.schedules or not profile.safety:
        raise CalibrationError(f"{setup.runner.backbone.name} is not tuned: run `radical tune` first")
    data, records = setup.testbed.lists(lists=setup.limit), setup.folder.records()
    ways: list[tuple[Cell, Reranker]] = [(Cell("Dense", "dense"), _reranker(setup, "dense"))]
    for one in profile.schedules:
        name = f"fixed, {one.flops:.0%} of the arithmetic"
        cell = Cell(name, "radical", options={"flops": one.flops})
        ways.append((cell, _reranker(setup, "radical", flops=one.flops)))
    tuned = digest_of([list(map(repr, profile.schedules)), *profile.safety])
    for agreement in AGREEMENTS:
        cell = Cell(f"agreement {agreement:.0%}", "radical", data={"tuned": tuned, "agreement": agreement})
        ways.append((cell, _reranker(setup, "radical", agreement=agreement)))
    _run(setup, data, records, ways)
    rows = _rows([cell.name for cell, _ in ways], list(records.claimed()))
    note = (
        f"`{setup.command}` on {setup.runner.backbone.name}: {len(data.tasks)} lists that were not used to "
        "tune. Same best: lists whose best document is Dense's, with the lower end of a 95% interval "
        "(Wilson). Cost: multiply-accumulates of the decoder, in percent of Dense; of a list that is ranked "
        "again, both rankings without what the second one took over from the first. Against fixed: this "
        "cost over that of the cheapest fixed schedule with at least the same agreement (Dense, if none has)."
    )
    write_facts(setup.folder.path, "promise", "a promise about the best document", note, rows, 2)
    return rows


def _reranker(setup: Setup, method: str, **budget: float) -> Reranker:
    runner = setup.runner
    options: dict[str, Any] = {**budget, **runner.options}
    cache = runner.plain.vision_cache
    return Reranker(runner.backbone, method, vision_cache=cache, prompt_cache_bytes=CACHED, **options)


def _run(setup: Setup, data: Dataset, records: Records, ways: Sequence[tuple[Cell, Reranker]]) -> None:
    rerankers = {cell.key: reranker for cell, reranker in ways}
    for number in setup.progress(range(len(data.tasks)), data.name):
        work = work_of(data, number)
        documents = [work.documents[name] for name in work.candidates]
        for cell in setup.runner.missing(work, [cell for cell, _ in ways], records):
            ranking = rerankers[cell.key].rank(work.query, documents)
            records.add(_record(setup, data, work, cell, ranking))


def _record(setup: Setup, data: Dataset, work: QueryWork, cell: Cell, ranking: Ranking) -> dict[str, Any]:
    reports = ranking.reports
    return {
        "dataset": data.name,
        "query": work.task.text,
        **setup.runner.named(cell, work.number, work.content),
        "best": work.candidates[ranking[0].index],
        "right": work.candidates[ranking[0].index] in work.task.relevant,
        "cost": sum(one.macs - one.macs_reused for one in reports) / reports[-1].macs_dense,
        "prompts": len(reports),
        **setup.runner.provenance,
    }


def _rows(names: Sequence[str], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {name: {r["task"]: r for r in records if r["cell"] == name} for name in names}
    dense = by_name["Dense"]
    rows: list[dict[str, Any]] = []
    for name, own in by_name.items():
        same = sum(record["best"] == dense[task]["best"] for task, record in own.items())
        rows.append(
            {
                "setting": name,
                "same best %": 100 * same / len(own),
                "at least %": 100 * wilson(same, len(own)),
                "cost %": 100 * sum(record["cost"] for record in own.values()) / len(own),
                "ranked again %": 100 * sum(r["prompts"] > 1 for r in own.values()) / len(own),
                "R@1": 100 * sum(r["right"] for r in own.values()) / len(own),
                "lists": len(own),
            }
        )
    fixed = [row for row in rows if not row["setting"].startswith("agreement")]
    for row in rows:
        enough = [one["cost %"] for one in fixed if one["same best %"] >= row["same best %"]]
        row["against fixed"] = None if row in fixed else row["cost %"] / min(enough)
    return rows


def wilson(right: int, count: int, z: float = 1.96) -> float:
    """Return the lower end of Wilson's interval of a share.

    Example:
        >>> round(wilson(990, 1000), 4)
        0.9817
    """
    share = right / count
    centre = share + z**2 / (2 * count)
    return (centre - z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))) / (1 + z**2 / count)
