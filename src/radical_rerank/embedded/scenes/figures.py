"""The figures of the scenes model: ranking quality, and the signals that pruning relies on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.figures import Comparison, Evaluation, entropy_curves
from radical_rerank.embedded.scenes.datasets import composed_lists, scene_lists, scene_questions
from radical_rerank.embedded.scenes.lists import SceneList, make_list
from radical_rerank.embedded.scenes.training.batches import shown_by
from radical_rerank.lab.questions import accuracy
from radical_rerank.lab.records import Cell
from radical_rerank.method import (
    candidate_uniqueness,
    discriminative_importance,
    keep_count,
    query_relevance,
    top_k,
)
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Dense
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS


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
class SceneEvaluation(Evaluation):
    """Measures all figures of the scenes model's card."""

    def comparisons(self) -> list[Comparison]:
        """Return the comparisons of the card."""
        return comparisons(self.lists, self.backbone.shape.num_layers)

    def others(self) -> dict[str, Callable[[], dict[str, float]]]:
        """Return what measures the other figures, by their names."""
        backbone, progress = self.backbone, self.progress
        return {
            "signals": lambda: signals(backbone, self.lists, progress),
            "questions": lambda: question_accuracy(backbone, self.lists, progress),
            "H_norm": lambda: entropy_curve(backbone, max(1, self.lists // 10), progress),
        }


def question_accuracy(backbone: Backbone, pictures: int, progress: Progress = silent) -> dict[str, float]:
    """Return the fraction of right answers to each kind of question about single scenes."""
    data = scene_questions(pictures=pictures)
    return accuracy(backbone, {"Dense": Dense()}, data, progress)["Dense"] | {
        "questions": len(data.questions)
    }


def entropy_curve(backbone: Backbone, lists: int, progress: Progress = silent) -> dict[str, float]:
    """Measure H_norm per layer on two data sets with different seeds. lists: per data set"""
    first, second = (scene_lists(lists=lists, seed=seed) for seed in (1, 2))
    return entropy_curves(backbone, first, second, progress)


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
