"""The figures of the embedded model's card: ranking quality, and the signals that pruning relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from radical_rerank.method import (
    candidate_uniqueness,
    discriminative_importance,
    keep_count,
    query_relevance,
    top_k,
)
from radical_rerank.pruning import Pruner
from radical_rerank.reranking import Query, Reranker
from radical_rerank.scenes.batches import shown_by
from radical_rerank.scenes.drawing import render
from radical_rerank.scenes.lists import SceneList, make_composed, make_list, make_questions

Track = Callable[[Iterable[int]], Iterable[int]]


def reciprocal_rank(order: list[int], target: int, cut: int = 10) -> float:
    rank = order.index(target) + 1
    return 1 / rank if rank <= cut else 0.0


def ranking_quality(
    reranker: Reranker,
    lists: int,
    count: int,
    *,
    similarity: float = 0.7,
    split: str = "test",
    track: Track = iter,
) -> dict[str, float]:
    """MRR@10 and R@1 on controlled lists, one query each."""
    ranks = []
    for seed in track(range(lists)):
        item = make_list(split, seed, count, similarity=similarity)
        order = reranker.rank(item.descriptions[0].text(), item.images).order
        ranks.append((reciprocal_rank(order, item.targets[0]), float(order[0] == item.targets[0])))
    return _means(ranks)


def composed_quality(
    reranker: Reranker, lists: int, count: int, *, split: str = "test", track: Track = iter
) -> dict[str, float]:
    """MRR@10 and R@1 on composed queries."""
    ranks = []
    for seed in track(range(lists)):
        item = make_composed(split, seed, count)
        change = item.changes[0]
        order = reranker.rank(Query(change.text, item.rendered[0][0]), item.images).order
        ranks.append((reciprocal_rank(order, change.target), float(order[0] == change.target)))
    return _means(ranks)


def _means(pairs: list[tuple[float, float]]) -> dict[str, float]:
    values = np.array(pairs)
    return {"MRR@10": float(values[:, 0].mean()), "R@1": float(values[:, 1].mean()), "lists": len(pairs)}


def question_accuracy(
    reranker: Reranker, scenes: int, *, split: str = "test", pruner: Pruner | None = None
) -> dict[str, float]:
    """Share of right answers to yes/no and colour questions about single scenes."""
    from radical_rerank.backbones import layout_of
    from radical_rerank.pruning import Dense
    from radical_rerank.scenes.training import Packer, word_ids
    from radical_rerank.scenes.world import COLOURS

    backbone = reranker.backbone
    packer = Packer(backbone.model, backbone.tokenizer)
    choices = {
        "yes-no": word_ids(backbone.tokenizer, ["yes", "no"]).tolist(),
        "colour": word_ids(backbone.tokenizer, COLOURS).tolist(),
    }
    right: dict[str, list[bool]] = {kind: [] for kind in choices}
    for seed in range(scenes):
        for question in make_questions(split, seed, 2):
            image, _ = render(question.scene)
            features = backbone.encode([backbone.preprocess(image, 384)])
            ids = [packer.open, *[packer.image] * len(features[0].tokens), packer.close]
            ids += packer.encode(f"question: {question.text} answer:")
            kind = "yes-no" if question.answer in ("yes", "no") else "colour"
            with (pruner or Dense()).on(backbone.model, layout_of(backbone.model, ids)):
                logits = backbone.next_token_logits(backbone.inputs([ids], features))[0]
            best = choices[kind][int(logits[choices[kind]].argmax())]
            answer = int(word_ids(backbone.tokenizer, [question.answer])[0])
            right[kind].append(best == answer)
    return {kind: sum(values) / len(values) for kind, values in right.items() if values}


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


def signals(reranker: Reranker, lists: int, count: int = 20, *, split: str = "test") -> dict[str, float]:
    """What the priors see: ROC AUC of cos(token, query) for the cells that show a queried thing; the least
    share of tokens with a positive cosine; the target's evidence that each prior keeps at a 20% budget."""
    backbone = reranker.backbone
    embedding = backbone.model.get_input_embeddings().weight.detach()
    auc, positive = [], []
    kept: dict[str, list[float]] = {name: [] for name in ("DTI", "relevance", "uniqueness", "random")}
    for seed in range(lists):
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
    result = {"AUC": float(np.mean(auc)), "least positive share": min(positive)}
    return result | {f"evidence kept by {name}": float(np.mean(v)) for name, v in kept.items()}


def roc_auc(score: torch.Tensor, positive: torch.Tensor) -> float:
    """The probability that a positive scores above a negative, ties counted half."""
    _, rank, count = torch.unique(score, return_inverse=True, return_counts=True)
    upper = count.cumsum(0).double()
    middle = (upper - count.double() / 2 + 0.5)[rank]
    n = int(positive.sum())
    m = len(positive) - n
    return float((middle[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
