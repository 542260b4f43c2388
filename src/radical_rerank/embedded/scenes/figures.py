"""The figures of the embedded model's card: ranking quality, and the signals that pruning relies on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import composed_lists, scene_lists, scene_questions
from radical_rerank.embedded.scenes.lists import SceneList, make_list
from radical_rerank.embedded.scenes.training.batches import shown_by
from radical_rerank.errors import InputError
from radical_rerank.files import replacing
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.metrics import measure
from radical_rerank.lab.questions import accuracy
from radical_rerank.lab.runner import Track
from radical_rerank.method import (
    candidate_uniqueness,
    discriminative_importance,
    keep_count,
    query_relevance,
    top_k,
)
from radical_rerank.pruning import Dense, Pruner, RaDiCal, Random
from radical_rerank.reranking import Query, Reranker, calibrate
from radical_rerank.reranking.calibration import profile_of
from radical_rerank.reranking.encoding import VisionCache


@dataclass(frozen=True)
class Card:
    """Measures group after group; a file keeps those that are done, so that a killed run goes on."""

    backbone: Backbone
    lists: int
    path: Path | None
    track: Track

    def run(self) -> dict[str, dict[str, float]]:
        done = self._load()
        for names, figures in self.groups().items():
            if not set(names) <= set(done["figures"]):
                done["figures"] |= figures()
                self._save(done)
        return done["figures"]

    def groups(self) -> dict[tuple[str, ...], Callable[[], dict[str, dict[str, float]]]]:
        """By the names of its figures, what measures them: settings that share their lists run together."""
        backbone, lists, track = self.backbone, self.lists, self.track
        profile = profile_of(backbone)
        plans: list[tuple[Dataset, dict[str, tuple[Pruner, dict[str, Any]]]]] = [
            (
                scene_lists(lists=lists),
                {
                    "Dense, N = 20": (Dense(), {}),
                    "RaDiCal 20%, N = 20": (RaDiCal(keep=0.2, profile=profile), {}),
                    "RaDiCal 10%, N = 20": (RaDiCal(keep=0.1, profile=profile), {}),
                    "Random 20%, the same layers, N = 20": (Random(keep=0.2, profile=profile), {}),
                    "Random 20% before the layer at half depth, N = 20": (
                        Random(keep=0.2, layers=[backbone.shape.num_layers // 2]),
                        {},
                    ),
                    # 96 x 96 pixels are 36 tokens: at most 9 are half the side.
                    "Dense, sides halved, N = 20": (Dense(), {"max_image_tokens": 9}),
                },
            ),
            (composed_lists(lists=lists), {"Dense, composed, N = 20": (Dense(), {})}),
            (scene_lists(lists=lists, count=5), {"Dense, N = 5": (Dense(), {})}),
            (scene_lists(lists=lists, count=10), {"Dense, N = 10": (Dense(), {})}),
            (scene_lists(lists=lists, count=50), {"Dense, N = 50, windows of 20": (Dense(), {})}),
        ]

        def quality(data: Dataset, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
            cache = VisionCache(1 << 28)
            rerankers = {
                name: Reranker(backbone, pruner, vision_cache=cache, **options)
                for name, (pruner, options) in settings.items()
            }
            return ranking_quality(rerankers, data, lambda items: track(items, next(iter(settings))))

        def alone(
            name: str, measure: Callable[..., dict[str, float]], count: int
        ) -> Callable[[], dict[str, dict[str, float]]]:
            return lambda: {name: measure(backbone, count, lambda items: track(items, name))}

        groups: dict[tuple[str, ...], Callable[[], dict[str, dict[str, float]]]] = {
            tuple(settings): partial(quality, data, settings) for data, settings in plans
        }
        groups[("signals",)] = alone("signals", signals, lists)
        groups[("questions",)] = alone("questions", question_accuracy, lists)
        groups[("H_norm",)] = alone("H_norm", entropy_profiles, max(1, lists // 10))
        return groups

    def _load(self) -> dict[str, Any]:
        settings = {"model": self.backbone.name, "lists": self.lists}
        if self.path is None or not self.path.is_file():
            return {**settings, "figures": {}}
        done = json.loads(self.path.read_text(encoding="utf-8"))
        if {key: done[key] for key in settings} != settings:
            raise InputError(f"{self.path} holds the figures of another model or number of lists")
        return done

    def _save(self, done: dict[str, Any]) -> None:
        if self.path is not None:
            with replacing(self.path) as file:
                json.dump(done, file, indent=1)
                file.write("\n")


def ranking_quality(
    rerankers: dict[str, Reranker], data: Dataset, track: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> dict[str, dict[str, float]]:
    """Per reranker MRR@10 with the half width of its 95% interval, and R@1; one relevant picture per list."""
    rankings: dict[str, dict[str, list[str]]] = {name: {} for name in rerankers}
    relevant = {}
    for task in track(data.tasks):
        assert task.candidates is not None
        relevant[task.id] = task.relevant
        reference = None if task.reference is None else data.picture(task.reference)
        images = [data.picture(name) for name in task.candidates]
        for name, reranker in rerankers.items():
            order = reranker.rank(Query(task.text, reference), images).order
            rankings[name][task.id] = [task.candidates[i] for i in order]
    result = {}
    for name, found in rankings.items():
        measures = list(measure(found, relevant).values())
        mrr = np.array([values["MRR@10"] for values in measures])
        result[name] = {
            "MRR@10": float(mrr.mean()),
            "±": float(1.96 * mrr.std(ddof=min(1, len(mrr) - 1)) / len(mrr) ** 0.5),
            "R@1": float(np.mean([values["R@1"] for values in measures])),
            "lists": len(mrr),
        }
    return result


def question_accuracy(
    backbone: Backbone, count: int, track: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> dict[str, float]:
    """Share of right answers to yes/no and to colour questions about single scenes."""
    data = scene_questions(pictures=count)
    return accuracy(backbone, {"Dense": Dense()}, data, track)["Dense"] | {"questions": len(data.questions)}


def entropy_profiles(
    backbone: Backbone, lists: int, track: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> dict[str, float]:
    """H_norm per layer on two differently seeded data sets, and how alike the two curves are."""
    curves = []
    for seed in (1, 2):
        data = scene_lists(lists=lists, seed=seed)
        tasks = (
            (task.text, [data.picture(name) for name in task.candidates or ()]) for task in track(data.tasks)
        )
        h_norm = calibrate(backbone, tasks).h_norm
        assert h_norm is not None
        curves.append(np.array(h_norm))
    result = {"Pearson r": float(np.corrcoef(np.stack(curves))[0, 1]), "lists": lists}
    return result | {f"layer {layer}": float(value) for layer, value in enumerate(curves[0])}


# Signals: before any layer has run.


def evidence_cells(item: SceneList) -> torch.Tensor:
    """(V,) which tokens show a thing that the first description's own phrases name."""
    parts = []
    phrases = item.descriptions[0].phrases
    for scene, (_, cover) in zip(item.scenes, item.rendered, strict=True):
        shown = shown_by(cover)
        named = [i for i, thing in enumerate(scene.things) if any(p.fits(thing) for p in phrases)]
        parts.append(shown[named].any(0) if named else np.zeros(cover[0].size, dtype=bool))
    return torch.from_numpy(np.concatenate(parts))


def signals(
    backbone: Backbone,
    lists: int,
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    *,
    count: int = 20,
    split: str = "test",
) -> dict[str, float]:
    """What the priors see: ROC AUC of cos(token, query) for the cells that show a queried thing; the least
    share of tokens with a positive cosine; the target's evidence that each prior keeps at a 20% budget."""
    embedding = backbone.model.get_input_embeddings().weight.detach()
    auc, positive = [], []
    kept: dict[str, list[float]] = {name: [] for name in ("DTI", "relevance", "uniqueness", "random")}
    for seed in track(range(lists)):
        item = make_list(split, seed, count)
        features = backbone.encode([backbone.preprocess(image, 384) for image in item.images])
        tokens = torch.cat([f.tokens for f in features])
        owner = torch.arange(count).repeat_interleave(torch.tensor([len(f.tokens) for f in features]))
        ids = backbone.tokenizer(" " + item.descriptions[0].text(), add_special_tokens=False)["input_ids"]
        query = embedding[ids].mean(0)
        cosine = torch.nn.functional.cosine_similarity(tokens, query[None], dim=-1)
        evidence = evidence_cells(item)
        auc.append(roc_auc(cosine, evidence))
        positive.append(float((cosine > 0).float().mean()))
        target = evidence & (owner == item.targets[0])
        draw = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed))
        scores: dict[str, Any] = {
            "DTI": discriminative_importance(tokens, query, owner),
            "relevance": query_relevance(tokens, query),
            "uniqueness": candidate_uniqueness(tokens),
            "random": draw,
        }
        for name, score in scores.items():
            best = top_k(score, keep_count(0.2, len(tokens)))
            kept[name].append(float(target[best].sum() / target.sum()))
    result = {"AUC": float(np.mean(auc)), "least positive share": min(positive), "lists": lists}
    return result | {f"evidence kept by {name}": float(np.mean(v)) for name, v in kept.items()}


def roc_auc(score: torch.Tensor, positive: torch.Tensor) -> float:
    """The probability that a positive scores above a negative, ties counted half."""
    _, rank, count = torch.unique(score, return_inverse=True, return_counts=True)
    upper = count.cumsum(0).double()
    middle = (upper - count.double() / 2 + 0.5)[rank]
    n = int(positive.sum())
    m = len(positive) - n
    return float((middle[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
