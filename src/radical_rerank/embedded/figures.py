"""Measures the figures of a model card. A run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.files import replacing
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.metrics import bootstrap
from radical_rerank.lab.paper import SEED
from radical_rerank.lab.records import Cell, Records, RunFolder, provenance
from radical_rerank.lab.runner import Pools, Runner
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking import calibrate

log = logging.getLogger("radical_rerank")

Figures = dict[str, dict[str, float]]
"""by the name of a figure, its values by their names"""

PROTOCOL = f"Candidates are shuffled with seed {SEED}; ± is half the width of a 95% bootstrap interval."
"""how the ranking quality is measured, for the card"""


@dataclass(frozen=True)
class Comparison:
    """Settings that rank the same lists.

    Args:
        data: the lists
        cells: the settings, each with its name on the card
        options: options of all Rerankers
        pools: the candidates of a first stage, if the data has no lists of its own
    """

    data: Dataset
    cells: Sequence[Cell]
    options: Mapping[str, Any] = field(default_factory=dict)
    pools: Pools | None = None


@dataclass(frozen=True)
class Evaluation(ABC):
    """Measures all figures of a card. A subclass says which.

    Args:
        backbone: the model
        lists: lists per figure
        path: where to keep the figures, with the records of all rankings in a folder beside it; None for
            nowhere
        progress: shows how far it is
    """

    backbone: Backbone
    lists: int
    path: Path | None = None
    progress: Progress = silent

    def run(self) -> Figures:
        """Measure the figures that are missing. Returns all of them."""
        done = self._load()
        figures: Figures = done["figures"]
        path = self.path
        with RunFolder(path.with_name(f"{path.stem}-records")) if path else nullcontext() as folder:
            for names, measured in self.groups(folder).items():
                if not set(names) <= set(figures):
                    log.info("measuring: %s", "; ".join(names))
                    figures |= measured()
                    self._save(done)
        return figures

    def groups(self, folder: RunFolder | None = None) -> dict[tuple[str, ...], Callable[[], Figures]]:
        """Return what measures the figures of each group, by their names.

        Args:
            folder: of the records of all rankings; None keeps them in memory
        """
        groups: dict[tuple[str, ...], Callable[[], Figures]] = {}
        for number, comparison in enumerate(self.comparisons()):
            names = tuple(cell.name for cell in comparison.cells)
            groups[names] = partial(self._compare, comparison, folder, f"rankings-{number}")
        for name, measured in self.others().items():
            groups[name,] = partial(_named, name, measured)
        return groups

    @abstractmethod
    def comparisons(self) -> list[Comparison]:
        """Return the comparisons of the card."""

    @abstractmethod
    def others(self) -> dict[str, Callable[[], dict[str, float]]]:
        """Return what measures the other figures, by their names."""

    def _compare(self, comparison: Comparison, folder: RunFolder | None, name: str) -> Figures:
        runner = Runner(self.backbone, provenance(), options=dict(comparison.options))
        records = Records() if folder is None else folder.records(name)
        return ranking_quality(
            runner,
            comparison.data,
            comparison.cells,
            records,
            pools=comparison.pools,
            progress=self.progress,
        )

    def _load(self) -> dict[str, Any]:
        facts = {"model": self.backbone.name, "lists": self.lists, "protocol": PROTOCOL}
        if self.path is None or not self.path.is_file():
            return {**facts, "figures": {}}
        done = read_figures(self.path)
        if {key: done.get(key) for key in facts} != facts:
            raise InputError(
                f"{self.path} holds the figures of another model or number of lists, or of another protocol"
            )
        return done

    def _save(self, done: dict[str, Any]) -> None:
        if self.path is not None:
            with replacing(self.path) as file:
                json.dump(done, file, indent=1, ensure_ascii=False)
                file.write("\n")


def _named(name: str, measured: Callable[[], dict[str, float]]) -> Figures:
    return {name: measured()}


def read_figures(path: Path) -> dict[str, Any]:
    """Read a file of figures."""
    try:
        done = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the figures in {path}: {error}") from None
    if not isinstance(done, dict) or not isinstance(done.get("figures"), dict):
        raise InputError(f"{path} holds no figures")
    return done


def ranking_quality(
    runner: Runner,
    data: Dataset,
    cells: Sequence[Cell],
    records: Records,
    *,
    pools: Pools | None = None,
    progress: Progress = silent,
) -> Figures:
    """Rank the lists of a data set with every cell, unless there is a record of it.

    Args:
        runner: the model, and options of all Rerankers
        data: lists
        cells: the settings
        records: of earlier rankings, and of the new ones
        pools: the candidates of a first stage, if the data has no lists of its own
        progress: shows how far it is

    Returns:
        Per cell MRR@10 with half the width of its 95% bootstrap interval, R@1, and the number of lists.
    """
    runner.run(data, cells, records, pools=pools, progress=progress)
    measures: dict[str, list[dict[str, float]]] = {cell.name: [] for cell in cells}
    for record in records.claimed():
        measures[record["cell"]].append(record["measures"])
    quality = {}
    for name, values in measures.items():
        mrr = [value["MRR@10"] for value in values]
        low, high = bootstrap(mrr)
        quality[name] = {
            "MRR@10": float(np.mean(mrr)),
            "±": (high - low) / 2,
            "R@1": float(np.mean([value["R@1"] for value in values])),
            "lists": len(values),
        }
    return quality


def entropy_curves(
    backbone: Backbone, first: Dataset, second: Dataset, progress: Progress = silent
) -> dict[str, float]:
    """Measure H_norm per layer on two data sets of lists.

    Returns:
        The first data set's curve, and how well the two agree (Pearson's r).
    """
    curves = []
    for number, data in enumerate((first, second), start=1):
        tasks = (
            (task.text, [data.picture(name) for name in task.candidates or ()])
            for task in progress(data.tasks, f"H_norm, data set {number}")
        )
        h_norm = calibrate(backbone, tasks).h_norm
        assert h_norm is not None
        curves.append(np.array(h_norm))
    result = {"Pearson r": float(np.corrcoef(np.stack(curves))[0, 1]), "lists": len(first.tasks)}
    return result | {f"layer {layer}": float(value) for layer, value in enumerate(curves[0])}
