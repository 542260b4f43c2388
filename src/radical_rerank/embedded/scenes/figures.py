"""Measures the figures of the model card: ranking quality, and the signals that pruning relies on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import composed_lists, scene_lists, scene_questions
from radical_rerank.embedded.scenes.lists import SceneList, make_list
from radical_rerank.embedded.scenes.training.batches import shown_by
from radical_rerank.errors import InputError
from radical_rerank.files import replacing
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.metrics import bootstrap
from radical_rerank.lab.paper import SEED
from radical_rerank.lab.questions import accuracy
from radical_rerank.lab.records import Cell, Records, RunFolder, provenance
from radical_rerank.lab.runner import Runner
from radical_rerank.method import (
    candidate_uniqueness,
    discriminative_importance,
    keep_count,
    query_relevance,
    top_k,
)
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Dense
from radical_rerank.reranking import calibrate
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS

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
    """

    data: Dataset
    cells: Sequence[Cell]
    options: Mapping[str, Any] = field(default_factory=dict)


def comparisons(lists: int, num_layers: int) -> list[Comparison]:
    """Return the comparisons of the card.

    Args:
        lists: lists per comparison
        num_layers: of the model's decoder
    """
    halfway = "Random 20% before the layer at half depth, N = 20"
    return [
        Comparison(
            scene_lists(lists=lists),
            [
                Cell("Dense, N = 20", "dense"),
                Cell("RaDiCal 20%, N = 20", "radical", 0.2),
                Cell("RaDiCal 10%, N = 20", "radical", 0.1),
                Cell("Random 20%, the same layers, N = 20", "random", 0.2),
                Cell(halfway, "random", 0.2, options={"layers": [num_layers // 2]}),
            ],
        ),
        # A picture of 96 × 96 pixels has 36 tokens. With 9 tokens, its sides are halved.
        Comparison(
            scene_lists(lists=lists), [Cell("Dense, sides halved, N = 20", "dense")], {"max_image_tokens": 9}
        ),
        Comparison(composed_lists(lists=lists), [Cell("Dense, composed, N = 20", "dense")]),
        Comparison(scene_lists(lists=lists, count=5), [Cell("Dense, N = 5", "dense")]),
        Comparison(scene_lists(lists=lists, count=10), [Cell("Dense, N = 10", "dense")]),
        Comparison(scene_lists(lists=lists, count=50), [Cell("Dense, N = 50, windows of 20", "dense")]),
    ]


@dataclass(frozen=True)
class Evaluation:
    """Measures all figures of the card. A run that was killed goes on where it stopped.

    Args:
        backbone: the scenes model
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
        for number, comparison in enumerate(comparisons(self.lists, self.backbone.shape.num_layers)):
            names = tuple(cell.name for cell in comparison.cells)
            groups[names] = partial(self._compare, comparison, folder, f"rankings-{number}")
        backbone, progress = self.backbone, self.progress
        groups["signals",] = lambda: {"signals": signals(backbone, self.lists, progress)}
        groups["questions",] = lambda: {"questions": question_accuracy(backbone, self.lists, progress)}
        groups["H_norm",] = lambda: {"H_norm": entropy_curve(backbone, max(1, self.lists // 10), progress)}
        return groups

    def _compare(self, comparison: Comparison, folder: RunFolder | None, name: str) -> Figures:
        runner = Runner(self.backbone, provenance(), options=dict(comparison.options))
        records = Records() if folder is None else folder.records(name)
        return ranking_quality(runner, comparison.data, comparison.cells, records, progress=self.progress)

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
    runner: Runner, data: Dataset, cells: Sequence[Cell], records: Records, *, progress: Progress = silent
) -> Figures:
    """Rank the lists of a data set with every cell, unless there is a record of it.

    Args:
        runner: the model, and options of all Rerankers
        data: lists
        cells: the settings
        records: of earlier rankings, and of the new ones
        progress: shows how far it is

    Returns:
        Per cell MRR@10 with half the width of its 95% bootstrap interval, R@1, and the number of lists.
    """
    runner.run(data, cells, records, progress=progress)
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


def question_accuracy(backbone: Backbone, pictures: int, progress: Progress = silent) -> dict[str, float]:
    """Return the fraction of right answers to each kind of question about single scenes."""
    data = scene_questions(pictures=pictures)
    return accuracy(backbone, {"Dense": Dense()}, data, progress)["Dense"] | {
        "questions": len(data.questions)
    }


def entropy_curve(backbone: Backbone, lists: int, progress: Progress = silent) -> dict[str, float]:
    """Measure H_norm per layer on two data sets with different seeds.

    Args:
        backbone: the scenes model
        lists: lists per data set
        progress: shows how far it is

    Returns:
        The first data set's curve, and how well the two agree (Pearson's r).
    """
    curves = []
    for seed in (1, 2):
        data = scene_lists(lists=lists, seed=seed)
        tasks = (
            (task.text, [data.picture(name) for name in task.candidates or ()])
            for task in progress(data.tasks, f"H_norm, seed {seed}")
        )
        h_norm = calibrate(backbone, tasks).h_norm
        assert h_norm is not None
        curves.append(np.array(h_norm))
    result = {"Pearson r": float(np.corrcoef(np.stack(curves))[0, 1]), "lists": lists}
    return result | {f"layer {layer}": float(value) for layer, value in enumerate(curves[0])}


# Signals before any decoder layer has run.


@dataclass(frozen=True)
class ListSignals:
    """What the priors see in one list.

    Args:
        auc: ROC AUC of cos(token, query) for the tokens that show a thing of the query
        positive: the fraction of tokens with a positive cosine
        kept: per prior, the fraction of the target's evidence that it keeps
    """

    auc: float
    positive: float
    kept: dict[str, float]


def signals(
    backbone: Backbone, lists: int, progress: Progress = silent, *, count: int = 20, split: str = "test"
) -> dict[str, float]:
    """Measure what the priors see.

    Args:
        backbone: the scenes model
        lists: how many lists
        progress: shows how far it is
        count: candidates per list
        split: of the lists

    Returns:
        The mean ROC AUC, the least fraction of tokens with a positive cosine, and per prior the mean fraction
        of the target's evidence that it keeps.
    """
    measured = [
        list_signals(backbone, make_list(split, seed, count), seed)
        for seed in progress(range(lists), "signals")
    ]
    result = {
        "AUC": float(np.mean([one.auc for one in measured])),
        "least positive share": min(one.positive for one in measured),
        "lists": lists,
    }
    return result | {
        f"evidence kept by {name}": float(np.mean([one.kept[name] for one in measured]))
        for name in measured[0].kept
    }


def list_signals(backbone: Backbone, item: SceneList, seed: int, *, keep: float = 0.2) -> ListSignals:
    """Measure what the priors see in one list, for its first description.

    Args:
        backbone: the scenes model
        item: the list
        seed: of the random prior
        keep: the fraction of tokens that each prior keeps
    """
    features = backbone.encode([backbone.preprocess(image, MAX_IMAGE_TOKENS) for image in item.images])
    tokens = torch.cat([feature.tokens for feature in features])
    sizes = torch.tensor([len(feature.tokens) for feature in features])
    owner = torch.arange(len(features)).repeat_interleave(sizes)
    ids = backbone.tokenizer(" " + item.descriptions[0].text(), add_special_tokens=False)["input_ids"]
    query = backbone.model.get_input_embeddings().weight.detach()[ids].mean(0)
    cosine = cosine_similarity(tokens, query[None], dim=-1)
    evidence = evidence_cells(item)
    target = evidence & (owner == item.targets[0])
    scores = {
        "DTI": discriminative_importance(tokens, query, owner),
        "relevance": query_relevance(tokens, query),
        "uniqueness": candidate_uniqueness(tokens),
        "random": torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed)),
    }
    best = {name: top_k(score, keep_count(keep, len(tokens))) for name, score in scores.items()}
    return ListSignals(
        roc_auc(cosine, evidence),
        float((cosine > 0).float().mean()),
        {name: float(target[kept].sum() / target.sum()) for name, kept in best.items()},
    )


def evidence_cells(item: SceneList) -> Tensor:
    """Return (V,): which visual tokens show a thing of the first description, apart from shared things."""
    parts = []
    phrases = item.descriptions[0].phrases
    for scene, (_, cover) in zip(item.scenes, item.rendered, strict=True):
        shown = shown_by(cover)
        named = [i for i, thing in enumerate(scene.things) if any(p.fits(thing) for p in phrases)]
        parts.append(shown[named].any(0) if named else np.zeros(cover[0].size, dtype=bool))
    return torch.from_numpy(np.concatenate(parts))


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive has a higher score than a negative. Ties count half.

    Example:
        >>> roc_auc(torch.tensor([0.1, 0.4, 0.9]), torch.tensor([False, True, True]))
        1.0
    """
    _, rank, count = torch.unique(score, return_inverse=True, return_counts=True)
    upper = count.cumsum(0).double()
    middle = (upper - count.double() / 2 + 0.5)[rank]
    n = int(positive.sum())
    m = len(positive) - n
    return float((middle[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
