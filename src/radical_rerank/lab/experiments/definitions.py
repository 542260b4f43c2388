"""The paper's experiments as lists of settings: what runs, on which data, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import Pools, Runner
from radical_rerank.method import STRATEGIES
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import build

KEEPS = (0.2, 0.1)
"""the paper's budgets"""
COMPARED = ("radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres", "random")
TITLES = {
    "dense": "Dense",
    "radical": "RaDiCal",
    "random": "Random",
    "fastv": "FastV",
    "pyramiddrop": "PyramidDrop",
    "sparsevlm": "SparseVLM",
    "dart": "DART",
    "visionzip": "VisionZip",
    "lowres": "LowRes",
    "dynres-qrel": "DynRes-QRel",
    "dynres-dti": "DynRes-DTI",
}
ABLATION: dict[str, dict[str, Any]] = {
    "full": {},
    "w/o DTI (α = 0)": {"alpha": 0.0},
    "fixed α = 0.5": {"alpha": 0.5},
    "w/o α-Maximin": {"strategy": "random"},
    "w/o geometric fusion": {"fusion": "arithmetic"},
    "DTI only (α = 1)": {"alpha": 1.0},
    "QRel only": {"prior": "relevance"},
    "CCU only": {"prior": "uniqueness"},
    "w/o token scoring": {"prior": "random", "alpha": 1.0},
}


ADAPTIVE = Cell("SparseVLM, adaptive", "sparsevlm", options={"budget": "adaptive"})
"""SparseVLM's first version sets its own budget: it stands beside the methods that meet R, not among them"""


@dataclass(frozen=True)
class Experiment:
    """`cells` are built from the budgets asked for; every cell runs under every seed."""

    about: str
    cells: Callable[[Sequence[float]], list[Cell]]
    axis: str = ""
    """what varies, where the result is a curve: the name among the cells' `data` or `options`"""


def compared(names: Sequence[str], keeps: Sequence[float], **data: Any) -> list[Cell]:
    """Dense, and these methods at these budgets, on data of these options."""
    for name in names:
        build(name)  # an unknown one is told at once
    return [Cell("Dense", "dense", data=data)] + [
        Cell(f"{TITLES[name]} {keep:.0%}", name, keep, data=data)
        for keep in keeps
        for name in names
        if name != "dense"
    ]


def seeded(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Cell]:
    """Every cell under every seed, once."""
    every = [replace(cell, seed=seed) for cell in cells for seed in seeds]
    return list({cell.key: cell for cell in every}.values())


def _variants(variants: dict[str, dict[str, Any]], keep: float) -> list[Cell]:
    """Dense, and RaDiCal with each of these options."""
    return compared([], []) + [
        Cell(name, "radical", keep, options=options) for name, options in variants.items()
    ]


def _candidates(keeps: Sequence[float]) -> list[Cell]:
    names = ("radical", "pyramiddrop", "fastv", "random")
    return [cell for count in (5, 10, 20, 50) for cell in compared(names, keeps, count=count)]


def _pareto(keeps: Sequence[float]) -> list[Cell]:
    cells = compared(("fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres"), keeps)
    for keep in sorted({0.05, 0.1, 0.2, 0.3, 0.5, *keeps}):
        for stages in (2, 3, 4, 5):
            cells.append(
                Cell(f"RaDiCal {keep:.0%}, K = {stages}", "radical", keep, options={"num_stages": stages})
            )
    return cells


EXPERIMENTS: dict[str, Experiment] = {
    "main": Experiment(
        "all methods at the same budgets", lambda keeps: [*compared(COMPARED, keeps), ADAPTIVE]
    ),
    "ablation": Experiment("RaDiCal without each of its parts", lambda keeps: _variants(ABLATION, keeps[0])),
    "layers": Experiment(
        "seven ways to choose the layers",
        lambda keeps: _variants({name: {"strategy": name} for name in STRATEGIES}, keeps[0]),
    ),
    "stages": Experiment(
        "K, the number of stages",
        lambda keeps: _variants({f"K = {k}": {"num_stages": k} for k in (2, 3, 4, 5)}, keeps[0]),
        axis="num_stages",
    ),
    "gap": Experiment(
        "g, the least distance between stages",
        lambda keeps: _variants({f"g = {g}": {"gap": g} for g in range(1, 7)}, keeps[0]),
        axis="gap",
    ),
    "candidates": Experiment(
        "N, the number of candidates", lambda keeps: _candidates(keeps[:1]), axis="count"
    ),
    "dynres": Experiment(
        "resolution per candidate instead of tokens",
        lambda keeps: compared(("radical", "lowres", "dynres-qrel", "dynres-dti"), keeps[:1]),
    ),
    "pareto": Experiment("quality against cost", _pareto),
}


def run_experiment(
    experiment: Experiment,
    runner: Runner,
    records: Records,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    data: Dataset | Callable[..., Dataset],
    pools: Pools | None = None,
    progress: Progress = silent,
) -> list[Cell]:
    """Run what is missing; returns all cells.

    data: a data set, or a function that opens one (by the cells' `data` options)
    """
    cells = seeded(experiment.cells(keeps), seeds)
    if isinstance(data, Dataset) and any(cell.data for cell in cells):
        raise InputError("this experiment varies its data set: it runs on a testbed only")
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(repr(sorted(cell.data.items())), []).append(cell)
    for group in groups.values():
        source = data if isinstance(data, Dataset) else data(lists=limit, **group[0].data)
        runner.run(source, group, records, pools=pools, limit=limit, progress=progress)
    return cells
