"""All methods at the same arithmetic: which keeps the order best for its cost?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.experiments.definitions import TITLES, seeded
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.paper import KEEPS
from radical_rerank.lab.plots import fronts
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import work_of
from radical_rerank.lab.tables import TableRow, paired, per_query, summarize, write_facts
from radical_rerank.reranking.encoding import Document

SAVED = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""the parts of Dense's arithmetic that are saved; `--keep` names other ones, by what is left"""
OTHERS = (
    "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres",
    "qi-ei", "cdpruner", "divprune", "scope", "v2drop", "trimtokenator-lc",
)  # fmt: skip
SCREENS = (60, 500)
"""every method is tried on so many lists, then those that are left on so many"""
BEHIND = 0.01
"""methods that are behind RaDiCal on those, with a p below this, are not ranked on more"""
FLOPS, TIME = (0.1, 0.5), (0.2, 0.8)
"""from where to where the area under a front goes, as parts of Dense's arithmetic and of its time"""
AREA = (
    "The mean, over costs from 10 to 50% of Dense's arithmetic (20 to 80% of its time, which holds what "
    "pruning cannot save), of the best MRR@10 at this cost or below it, on the lists that every method has "
    "ranked. Nothing counts as 0."
)
WITHIN = 0.02
"""how far a method's cost may be from the one it is compared at, as a part of Dense's"""


def costs(setup: Setup) -> list[dict[str, Any]]:
    """Run every method at several costs. Write the table, the plot and the area under each front."""
    data = setup.testbed.lists(lists=setup.limit)
    records = setup.folder.records()
    saved = saved_at(setup.keeps)
    cells = {one: _cells(setup, data, one) for one in saved}
    dense = Cell("Dense", "dense")
    left = [dense, *(cell for own in cells.values() for cell in own)]
    common: set[str] = set()
    for lists in sorted({*(min(screen, setup.limit) for screen in SCREENS), setup.limit}):
        _run(setup, data, records, left, lists)
        claimed = list(records.claimed())
        common = common or {record["task"] for record in claimed}
        rows = summarize(claimed)
        table = _compared(rows, claimed, cells)
        behind = {row["setting"] for row in table if _is_behind(row)}
        left = [cell for cell in left if cell.name not in behind]
    # Only on the lists that every method has ranked: the others may be easier.
    shared = summarize(record for record in claimed if record["task"] in common)
    note = (
        f"`{setup.command}` on {setup.runner.backbone.name}. Every method is tried on {len(common)} lists. "
        f"Those that are behind RaDiCal there, with p < {BEHIND}, are not ranked on more; on {SCREENS[1]} "
        "lists they are chosen again. p: paired randomisation test against the best mode of RaDiCal, on the "
        "lists that both have. A method is missing where it cannot save so much. Seconds include the "
        "method's own scoring."
    )
    write_facts(setup.folder.path, "costs", "all methods at the same arithmetic", note, table, 3)
    if tuple(setup.keeps) == KEEPS:  # a front needs more costs than the few of --keep
        write_facts(setup.folder.path, "area", "the area under each method's front", AREA, _areas(shared), 1)
        fronts(setup.folder.path / "costs.png", shared, "quality at the same arithmetic")
    return table


def saved_at(keeps: Sequence[float]) -> Sequence[float]:
    """Return the costs to compare at: all of them by default, or what `--keep` leaves of the arithmetic.

    Example:
        >>> saved_at((0.2, 0.15))
        [0.8, 0.85]
    """
    return SAVED if tuple(keeps) == KEEPS else [round(1 - keep, 4) for keep in keeps]


def _is_behind(row: dict[str, Any]) -> bool:
    p = row["p"]
    return p is not None and p < BEHIND and row["MRR@10"] < row["RaDiCal's on the same lists"]


def _run(setup: Setup, data: Dataset, records: Records, cells: Sequence[Cell], limit: int) -> None:
    own = seeded(cells, setup.seeds)
    setup.runner.run(data, own, records, limit=limit, progress=setup.progress)


def _cells(setup: Setup, data: Dataset, saved: float) -> list[Cell]:
    """Return RaDiCal's modes and every other method that can save this much."""
    flops = round(1 - saved, 4)
    cells = [
        Cell(f"RaDiCal, {saved:.0%} saved", "radical", options={"flops": flops}),
        Cell(f"RaDiCal, nucleus, {saved:.0%} saved", "radical", options={"flops": flops, "nucleus": "auto"}),
        Cell(
            f"RaDiCal, two orders, {saved:.0%} saved",
            "radical",
            options={"flops": flops},
            data={"permutations": "auto"},
        ),
    ]
    titles = {**TITLES, "radical": "RaDiCal as in the paper"}
    for name in ("radical", *OTHERS):
        keep = keep_at(setup, data, name, flops)
        if keep is not None:
            cells.append(Cell(f"{titles.get(name, name)}, {saved:.0%} saved", name, keep))
    return cells


def keep_at(setup: Setup, data: Dataset, method: str, flops: float) -> float | None:
    """Return the budget at which a method costs this part of Dense on the first list; None if none does."""
    work = work_of(data, 0)
    pictures: list[Document] = [work.documents[name] for name in work.candidates]

    def cost_at(keep: float) -> float:
        report = (
            setup.runner.reranker(Cell("cost", method, keep, setup.seeds[0]))
            .rank(work.task.text, pictures)
            .report
        )
        assert report is not None
        return report.macs / report.macs_dense

    low, high = 0.002, 1.0
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (middle, high) if cost_at(middle) < flops else (low, middle)
    keep = round(high, 4)
    return keep if abs(cost_at(keep) - flops) <= WITHIN else None


def _compared(
    rows: Sequence[TableRow], records: Sequence[dict[str, Any]], cells: dict[float, list[Cell]]
) -> list[dict[str, Any]]:
    by_name = {row.name: row for row in rows}
    scores = {
        name: per_query([record for record in records if record["cell"] == name], "MRR@10")
        for name in by_name
    }
    table: list[dict[str, Any]] = []
    for own in cells.values():
        ours = [cell.name for cell in own if cell.method == "radical"]
        best = max(ours, key=lambda name: by_name[name].measures["MRR@10"])
        for cell in sorted(own, key=lambda cell: -by_name[cell.name].measures["MRR@10"]):
            row = by_name[cell.name]
            common = set(scores[best]) & set(scores[cell.name])
            table.append(
                {
                    "setting": cell.name,
                    "MRR@10": row.measures["MRR@10"],
                    "RaDiCal's on the same lists": 100 * float(np.mean([scores[best][q] for q in common])),
                    "p": None if cell.method == "radical" else paired(scores[cell.name], scores[best]),
                    "saved, measured %": 100 * row.flops_saved,
                    "s / list": row.seconds,
                    "scoring s": row.scoring,
                    "lists": row.queries,
                }
            )
    return table


def _areas(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    dense = next(row for row in rows if row.name == "Dense")
    areas = []
    for label in dict.fromkeys(row.name.rsplit(",", 1)[0] for row in rows if row.name != "Dense"):
        own = [row for row in rows if row.name.rsplit(",", 1)[0] == label]
        quality = [row.measures["MRR@10"] for row in own]
        flops, time = [1 - row.flops_saved for row in own], [row.seconds / dense.seconds for row in own]
        areas.append(
            {
                "method": label,
                "area, arithmetic": front_area(zip(flops, quality, strict=True), *FLOPS),
                "area, time": front_area(zip(time, quality, strict=True), *TIME),
                "points": len(own),
            }
        )
    return sorted(areas, key=lambda one: -one["area, arithmetic"])


def front_area(points: Iterable[tuple[float, float]], low: float, high: float) -> float:
    """Return the mean, over costs from `low` to `high`, of the best quality at this cost or below it.

    points: (cost, quality)
    """
    known = list(points)
    grid = np.linspace(low, high, 401)
    return float(
        np.mean([max((q for cost, q in known if cost <= c + WITHIN / 4), default=0.0) for c in grid])
    )
