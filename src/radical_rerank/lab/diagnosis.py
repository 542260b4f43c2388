"""z_l: does a layer's attention go to the candidates that decide the order, more than chance would have it?

Per list, a candidate's contribution RC_g is how much the distribution over the identifiers changes (total
variation) when its visual tokens are taken out. z_l compares Spearman's correlation of RC_g with the
candidates' mean attention in layer l against the same with the candidates shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radical_rerank.backbones import Backbone
from radical_rerank.method import (
    candidate_uniqueness,
    discriminative_importance,
    normalized_entropy,
    query_relevance,
    text_averaged,
)
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Pruner, Stage, StageView
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS
from radical_rerank.reranking.prompt import PromptTemplate, build_prompt

BATCH = 10
"""Masked variants of a prompt that run together"""


@dataclass(kw_only=True)
class AttentionProbe(Pruner):
    """Keeps every token and writes down p of every layer, and the priors."""

    keep: float = 1.0
    layers: list[Tensor] = field(default_factory=list)
    priors: dict[str, Tensor] = field(default_factory=dict)

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(layer, 1.0) for layer in range(num_layers)]

    def select(self, view: StageView, count: int) -> Tensor:
        if not self.layers:
            self.priors = {
                "U": candidate_uniqueness(view.vision),
                "Q": query_relevance(view.vision, view.query_embedding),
                "U×Q": discriminative_importance(view.vision, view.query_embedding, view.candidate_of),
            }
        self.layers.append(text_averaged(view.attention()))
        return torch.arange(count, device=view.alive.device)


@dataclass(kw_only=True)
class Without(Pruner):
    """Takes out the candidate whose number is the list's key."""

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(0, 1.0)]

    def select(self, view: StageView, count: int) -> Tensor:
        return (view.candidate_of[view.alive] != view.key).nonzero()[:, 0]


@dataclass(frozen=True)
class Diagnosis:
    """Means over lists: z and H_norm per layer, z of the three attention-free references."""

    lists: int
    z: tuple[float, ...]
    h_norm: tuple[float, ...]
    references: dict[str, float]

    @property
    def pearson(self) -> float:
        """r of z_l with 1 − H_norm(l): is concentrated attention reliable attention?"""
        return float(np.corrcoef(self.z, 1 - np.array(self.h_norm))[0, 1])


@dataclass(frozen=True)
class Evidence:
    """What one list says, candidate by candidate (N): all that z is made of.

    contribution: (N,) RC_g; attention: (layers, N) mean p of its tokens; h_norm: (layers,)
    priors: the attention-free references, (N,) means over its tokens
    """

    contribution: list[float]
    attention: list[list[float]]
    h_norm: list[float]
    priors: dict[str, list[float]]


def evidence(
    backbone: Backbone,
    query: str,
    images: Sequence[Any],
    *,
    template: PromptTemplate | None = None,
    max_image_tokens: int = MAX_IMAGE_TOKENS,
) -> Evidence:
    """One pass over the list, and one without each of its candidates. images: RGB."""
    features = backbone.encode([backbone.preprocess(image, max_image_tokens) for image in images])
    template = template or PromptTemplate.of(backbone)
    prompt = build_prompt(backbone, template, query, [len(f.tokens) for f in features])
    probe = AttentionProbe()
    with probe.on(backbone.model, prompt.layout):
        logits = backbone.next_token_logits(backbone.inputs([prompt.ids], features))[0]
    base = logits[prompt.identifiers].softmax(-1)
    owner = prompt.layout.candidate_of
    return Evidence(
        [
            float((masked[prompt.identifiers].softmax(-1) - base).abs().sum() / 2)
            for masked in _masked(backbone, prompt, features)
        ],
        [_means(p, owner) for p in probe.layers],
        [float(normalized_entropy(p)) for p in probe.layers],
        {name: _means(values, owner) for name, values in probe.priors.items()},
    )


def summary(found: Iterable[Evidence], *, permutations: int = 200, seed: int = 0) -> Diagnosis:
    """Means over lists. The same lists in the same order give the same figures."""
    rng = np.random.default_rng(seed)
    rows: list[list[float]] = []
    entropies: list[list[float]] = []
    references: dict[str, list[float]] = {}
    for one in found:
        contribution = np.array(one.contribution)
        rows.append([z_score(np.array(p), contribution, permutations, rng) for p in one.attention])
        entropies.append(one.h_norm)
        for name, values in one.priors.items():
            references.setdefault(name, []).append(z_score(np.array(values), contribution, permutations, rng))
    return Diagnosis(
        len(rows),
        tuple(np.mean(rows, axis=0).tolist()),
        tuple(np.mean(entropies, axis=0).tolist()),
        {name: float(np.mean(values)) for name, values in references.items()},
    )


def diagnose(
    backbone: Backbone,
    lists: Iterable[tuple[str, Sequence[Any]]],
    *,
    permutations: int = 200,
    seed: int = 0,
    max_image_tokens: int = MAX_IMAGE_TOKENS,
    progress: Progress = silent,
) -> Diagnosis:
    """Diagnose a model on (query, RGB images) pairs."""
    gathered = [
        evidence(backbone, query, images, max_image_tokens=max_image_tokens)
        for query, images in progress(lists, "diagnosis")
    ]
    return summary(gathered, permutations=permutations, seed=seed)


def _masked(backbone: Backbone, prompt: Any, features: Sequence[Any]) -> Iterable[Tensor]:
    """Logits of the prompt without each candidate in turn."""
    count = len(prompt.identifiers)
    for start in range(0, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        layouts = [replace(prompt.layout, key=number) for number in numbers]
        with Without().on(backbone.model, layouts):
            inputs = backbone.inputs([prompt.ids] * len(layouts), list(features) * len(layouts))
            yield from backbone.next_token_logits(inputs)


def _means(values: Tensor, owner: Tensor) -> list[float]:
    """(V,) per token -> (N,) mean per candidate."""
    values, owner = values.float().cpu(), owner.cpu()
    total = torch.zeros(int(owner.max()) + 1).index_add(0, owner, values)
    return (total / owner.bincount()).tolist()


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side does not vary."""
    x, y = _ranks(a), _ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[place]


def z_score(
    saliency: np.ndarray, contribution: np.ndarray, permutations: int, rng: np.random.Generator
) -> float:
    """(ρ − mean of the null) / its deviation, the null being ρ with the candidates shuffled."""
    null = [spearman(saliency, rng.permutation(contribution)) for _ in range(permutations)]
    spread = float(np.std(null))
    return (spearman(saliency, contribution) - float(np.mean(null))) / spread if spread else 0.0
