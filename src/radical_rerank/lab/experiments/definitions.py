"""The settings of the paper's experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.paper import COUNTS
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import Pools, Runner
from radical_rerank.method import STRATEGIES
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import build

COMPARED = ("radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres", "random")
"""the methods that the paper compares"""
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
    "qi-ei": "QI-EI",
    "cdpruner": "CDPruner",
    "divprune": "DivPrune",
    "scope": "SCOPE",
    "v2drop": "V2Drop",
    "trimtokenator-lc": "TrimTokenator-LC",
}
"""the methods' names in tables"""
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
"""RaDiCal's options for each row of the ablation"""
ADAPTIVE = Cell("SparseVLM, adaptive", "sparsevlm", options={"budget": "adaptive"})
"""SparseVLM's first version, which sets its own budget: it is not compared at the budget R"""


@dataclass(frozen=True)
class Experiment:
    """An experiment that is a list of settings. Every setting runs under every seed.

    Args:
        about: what it shows
        cells: makes the settings from the budgets
        axis: the option that varies, if the result is a curve: a key of the cells' `data` or `options`
    """

    about: str
    cells: Callable[[Sequence[float]], list[Cell]]
    axis: str = ""


def compared(names: Sequence[str], keeps: Sequence[float], **data: Any) -> list[Cell]:
    """Return Dense and these methods at these budgets.

    Args:
        names: names of methods; an unknown one is an InputError
        keeps: the budgets
        data: options of the data set

    Example:
        >>> [cell.name for cell in compared(["radical"], [0.2, 0.1])]
        ['Dense', 'RaDiCal 20%', 'RaDiCal 10%']
    """
    for name in names:
        build(name)
    return [Cell("Dense", "dense", data=data)] + [
        Cell(f"{TITLES[name]} {keep:.0%}", name, keep, data=data)
        for keep in keeps
        for name in names
        if name != "dense"
    ]


def seeded(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Cell]:
    """Return every setting under every seed, without repetition."""
    every = [replace(cell, seed=seed) for cell in cells for seed in seeds]
    return list({cell.key: cell for cell in every}.values())


def _variants(variants: dict[str, dict[str, Any]], keep: float) -> list[Cell]:
    """Return Dense and RaDiCal with each of these options."""
    return compared([], []) + [
        Cell(name, "radical", keep, options=options) for name, options in variants.items()
    ]


def _candidates(keeps: Sequence[float]) -> list[Cell]:
    names = ("radical", "pyramiddrop", "fastv", "random")
    return [cell for count in COUNTS for cell in compared(names, keeps, count=count)]


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
"""the experiments that are a list of settings, by name"""


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
    """Run an experiment, except where a record exists already.

    Args:
        experiment: the experiment
        runner: the model and its options
        records: where existing records are looked up and new ones are added
        keeps: the budgets
        seeds: the seeds
        limit: queries per setting
        data: a data set, or a function that opens one with the cells' `data` as options
        pools: the candidates of a first stage, if the data set has no lists of its own
        progress: shows the progress over queries

    Returns:
        All settings, under all seeds.
    """
    cells = seeded(experiment.cells(keeps), seeds)
    if isinstance(data, Dataset) and any(cell.data for cell in cells):
        raise InputError("this experiment varies its data set, so it runs only on a testbed")
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(repr(sorted(cell.data.items())), []).append(cell)
    for group in groups.values():
        source = data if isinstance(data, Dataset) else data(lists=limit, **group[0].data)
        runner.run(source, group, records, pools=pools, limit=limit, progress=progress)
    return cells
