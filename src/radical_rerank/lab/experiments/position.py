"""Does the order of the candidates matter? The match in different slots, one order or several."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import QueryWork, Runner, work_of
from radical_rerank.lab.tables import write_facts
from radical_rerank.reranking.encoding import Document

ORDERS = (1, 4)
PER_LIST = 4
"""slots in which each list has its match, a quarter of the list apart"""
QUARTERS = 4


def position(setup: Setup) -> list[dict[str, Any]]:
    """Measure MRR@10 by the match's slot, for one order of the candidates and for several."""
    data, records = setup.testbed.lists(lists=setup.limit), setup.folder.records()
    rows = [_measured(setup, data, records, keep, orders) for keep in setup.keeps for orders in ORDERS]
    # At equal cost: two orders at the smallest budget, and one pass at the budget that costs as much.
    rows.append(_measured(setup, data, records, min(setup.keeps), 2))
    equal = _keep_at(setup, data, rows[-1]["FLOPs %"] / 100)
    if equal is not None:
        rows.append(_measured(setup, data, records, equal, 1))
    count = len(data.tasks[0].candidates or ())
    note = (
        f"`{setup.command}`: MRR@10 in percent, by the quarter of the prompt that the match stands in (of "
        f"{count} slots), over {len(data.tasks)} lists. Each has its match in {PER_LIST} slots in turn. The "
        "spread is the largest minus the smallest quarter. With several orders the result does not depend on "
        "the slot, so each list is ranked once. FLOPs are the decoder's, in percent of one pass that keeps "
        "everything. The last row is one pass that costs as much as the two orders above it."
    )
    write_facts(setup.folder.path, "position", "the order of the candidates", note, rows, 1)
    return rows


def _measured(setup: Setup, data: Dataset, records: Records, keep: float, orders: int) -> dict[str, Any]:
    """Return the row of a budget and a number of orders."""
    runner = setup.runner
    if orders > 1:
        options = {**runner.options, "permutations": orders}
        runner = Runner(runner.backbone, runner.provenance, options, runner.known_profile)
    name = f"RaDiCal {keep:.0%}, {orders} order{'s' * (orders > 1)}"
    cells = [
        Cell(name, "radical", keep, setup.seeds[0], data={"turn": turn, "orders": orders})
        for turn in range(PER_LIST if orders == 1 else 1)
    ]
    wanted = set()
    for number in setup.progress(range(len(data.tasks)), name):
        work = work_of(data, number)
        for cell in runner.missing(work, cells, records):
            records.add(_record(runner, data, work, cell))
        wanted |= {runner.key(cell, number, work.content) for cell in cells}
    mine = [r for r in records.claimed() if (r["cell_key"], r["task"], r["setting"]) in wanted]
    return _row(name, keep, orders, mine)


def _record(runner: Runner, data: Dataset, work: QueryWork, cell: Cell) -> dict[str, Any]:
    order, slot = placed(work, cell.data["turn"], cell.seed)
    ranking = runner.reranker(cell).rank(work.query, [work.documents[name] for name in order])
    reports = ranking.reports
    return {
        "dataset": data.name,
        "query": work.task.text,
        **runner.named(cell, work.number, work.content),
        "slot": slot,
        "slots": len(order),
        "rank": ranking.order.index(slot) + 1,
        "cost": sum(report.macs for report in reports) / reports[0].macs_dense,
        **runner.provenance,
    }


def placed(work: QueryWork, turn: int, seed: int) -> tuple[list[str], int]:
    """Return the candidates with the match in its slot of this turn, and the slot.

    Lists begin with different slots, and the turns of a list are spread evenly over it. The order of the
    other candidates is the same in all turns.
    """
    match = next(name for name in work.candidates if name in work.task.relevant)
    others = [name for name in work.candidates if name != match]
    random.Random(f"{seed} {work.task.id}").shuffle(others)
    slot = (work.number + turn * len(work.candidates) // PER_LIST) % len(work.candidates)
    return [*others[:slot], match, *others[slot:]], slot


def _row(name: str, keep: float, orders: int, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def mrr(own: Sequence[dict[str, Any]]) -> float:
        return 100 * float(np.mean([1 / r["rank"] if r["rank"] <= 10 else 0.0 for r in own]))

    by_quarter: list[list[dict[str, Any]]] = [[] for _ in range(QUARTERS)]
    for record in records:
        by_quarter[record["slot"] * QUARTERS // record["slots"]].append(record)
    quarters = [mrr(own) for own in by_quarter if own]
    if orders > 1:  # the slot does not matter: there is one ranking per list
        quarters = [mrr(records)] * QUARTERS
    return {
        "setting": name,
        "kept %": 100 * keep,
        "orders": orders,
        "MRR@10": mrr(records),
        **{f"quarter {number}": value for number, value in enumerate(quarters, start=1)},
        "spread": max(quarters) - min(quarters),
        "FLOPs %": 100 * float(np.mean([r["cost"] for r in records])),
    }


def _keep_at(setup: Setup, data: Dataset, cost: float) -> float | None:
    """Return the budget at which one pass costs this fraction of Dense, on the first list; None above 1."""
    if cost >= 1:
        return None
    work = work_of(data, 0)
    pictures: list[Document] = [work.documents[name] for name in work.candidates]

    def cost_at(keep: float) -> float:
        cell = Cell("cost", "radical", keep, setup.seeds[0])
        report = setup.runner.reranker(cell).rank(work.task.text, pictures).report
        assert report is not None
        return report.macs / report.macs_dense

    low, high = min(setup.keeps), 1.0
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if cost_at(middle) < cost else (low, middle)
    return round((low + high) / 2, 2)
