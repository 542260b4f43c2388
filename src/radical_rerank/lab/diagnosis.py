"""Diagnosis: is the attention of a layer on the candidates that decide the order, more than by chance?

For every list, the contribution RC_g of a candidate is the change of the distribution over the identifiers
(total variation) when its visual tokens are removed. z_l compares two numbers: Spearman's correlation of RC_g
with the mean attention of the candidates in layer l, and the same correlation with the candidates shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones import Backbone, ImageFeatures
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
from radical_rerank.reranking.prompt import Prompt, PromptTemplate, build_prompt, sizes_of

Vector = np.ndarray[Any, Any]

BATCH = 10
"""prompts with a candidate removed that run together"""


@dataclass(kw_only=True)
class AttentionProbe(Pruner):
    """Keeps every token and saves the priors, and the attention of every layer where it can be read."""

    keep: float = 1.0
    attention: dict[int, Tensor] = field(default_factory=dict)
    priors: dict[str, Tensor] = field(default_factory=dict)

    def stages(self, num_layers: int) -> list[Stage]:
        """Return one stage before every layer: they go to the layers that can be read."""
        return [Stage(layer, 1.0) for layer in range(num_layers)]

    def select(self, view: StageView, count: int) -> Tensor:
        """Save the layer's attention and return all tokens."""
        if not self.attention:
            self.priors = {
                "U": candidate_uniqueness(view.vision),
                "Q": query_relevance(view.vision, view.query_embedding),
                "U×Q": discriminative_importance(view.vision, view.query_embedding, view.candidate_of),
            }
        self.attention[view.layer] = text_averaged(view.attention())
        return torch.arange(count, device=view.alive.device)


@dataclass(kw_only=True)
class Without(Pruner):
    """Removes one candidate: the one whose number is the key of the list's layout."""

    reads_attention: ClassVar[bool] = False  # so the first layer will do, whatever it is

    def stages(self, num_layers: int) -> list[Stage]:
        """Return one stage before the first layer."""
        return [Stage(0, 1.0)]

    def select(self, view: StageView, count: int) -> Tensor:
        """Return the tokens of all other candidates."""
        return (view.candidate_of[view.alive] != view.key).nonzero()[:, 0]


@dataclass(frozen=True)
class Diagnosis:
    """Means over lists.

    Args:
        lists: how many lists there were
        layers: those whose attention can be read
        z: reliability of the attention, per layer of these
        h_norm: normalized entropy of the attention, per layer of these
        references: z of three scores that use no attention: U, Q and U×Q
    """

    lists: int
    layers: tuple[int, ...]
    z: tuple[float, ...]
    h_norm: tuple[float, ...]
    references: dict[str, float]

    @property
    def pearson(self) -> float:
        """The correlation of z_l with 1 − H_norm(l): is concentrated attention reliable?"""
        return float(np.corrcoef(self.z, 1 - np.array(self.h_norm))[0, 1])


@dataclass(frozen=True)
class Evidence:
    """The measurements of one list with N candidates, from which z is computed.

    Args:
        contribution: (N,) RC_g
        layers: those whose attention can be read
        attention: (layers, N) mean attention on the tokens of each candidate
        h_norm: (layers,) normalized entropy
        priors: (N,) means over the tokens of each candidate, of the scores that use no attention
    """

    contribution: list[float]
    layers: list[int]
    attention: list[list[float]]
    h_norm: list[float]
    priors: dict[str, list[float]]


def evidence(
    backbone: Backbone,
    query: str,
    images: Sequence[Image.Image],
    *,
    template: PromptTemplate | None = None,
    max_image_tokens: int = MAX_IMAGE_TOKENS,
) -> Evidence:
    """Measure one list: one forward pass with all candidates, and one without each of them.

    Args:
        backbone: the model
        query: the query
        images: the candidates, RGB
        template: the prompt template; by default the model's own
        max_image_tokens: larger images are scaled down to this many visual tokens
    """
    features = backbone.encode([backbone.preprocess(image, max_image_tokens) for image in images])
    template = template or PromptTemplate.of(backbone)
    prompt = build_prompt(backbone, template, query, sizes_of(features))
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
        list(probe.attention),
        [_means(p, owner) for p in probe.attention.values()],
        [float(normalized_entropy(p)) for p in probe.attention.values()],
        {name: _means(values, owner) for name, values in probe.priors.items()},
    )


def summary(lists: Iterable[Evidence], *, permutations: int = 200, seed: int = 0) -> Diagnosis:
    """Compute z of every list and average over lists.

    Args:
        lists: the measurements, one per list
        permutations: how often the candidates are shuffled
        seed: seeds the shuffling; the same lists in the same order give the same figures
    """
    rng = np.random.default_rng(seed)
    layers: list[int] = []
    rows: list[list[float]] = []
    entropies: list[list[float]] = []
    references: dict[str, list[float]] = {}
    for one in lists:
        layers, contribution = one.layers, np.array(one.contribution)
        rows.append([z_score(np.array(p), contribution, permutations, rng) for p in one.attention])
        entropies.append(one.h_norm)
        for name, values in one.priors.items():
            references.setdefault(name, []).append(z_score(np.array(values), contribution, permutations, rng))
    return Diagnosis(
        len(rows),
        tuple(layers),
        tuple(np.mean(rows, axis=0).tolist()),
        tuple(np.mean(entropies, axis=0).tolist()),
        {name: float(np.mean(values)) for name, values in references.items()},
    )


def diagnose(
    backbone: Backbone,
    lists: Iterable[tuple[str, Sequence[Image.Image]]],
    *,
    permutations: int = 200,
    seed: int = 0,
    max_image_tokens: int = MAX_IMAGE_TOKENS,
    progress: Progress = silent,
) -> Diagnosis:
    """Measure how reliable a model's attention is, layer by layer.

    Args:
        backbone: the model
        lists: (query, RGB images) pairs
        permutations, seed: as in `summary`
        max_image_tokens: larger images are scaled down to this many visual tokens
        progress: shows the progress over lists

    Returns:
        z and H_norm per layer, averaged over lists.

    Example:
        >>> from radical_rerank import generated_list
        >>> diagnosis = diagnose(Backbone.from_pretrained("scenes"), [generated_list(0, candidates=4)])
        >>> diagnosis.lists, len(diagnosis.z)
        (1, 12)
    """
    measured = [
        evidence(backbone, query, images, max_image_tokens=max_image_tokens)
        for query, images in progress(lists, "diagnosis")
    ]
    return summary(measured, permutations=permutations, seed=seed)


def _masked(backbone: Backbone, prompt: Prompt, features: Sequence[ImageFeatures]) -> Iterator[Tensor]:
    """Yield the logits of the prompt without each candidate in turn."""
    count = len(prompt.identifiers)
    for start in range(0, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        layouts = [replace(prompt.layout, key=number) for number in numbers]
        with Without().on(backbone.model, layouts):
            inputs = backbone.inputs([prompt.ids] * len(layouts), list(features) * len(layouts))
            yield from backbone.next_token_logits(inputs)


def _means(values: Tensor, owner: Tensor) -> list[float]:
    """Average (V,) values of tokens over the tokens of each candidate. owner: (V,) their candidates"""
    values, owner = values.float().cpu(), owner.cpu()
    total = torch.zeros(int(owner.max()) + 1).index_add(0, owner, values)
    means: list[float] = (total / owner.bincount()).tolist()
    return means


def spearman(a: Vector, b: Vector) -> float:
    """Return Spearman's rank correlation. Ties get their mean rank; a constant input gives 0.

    Example:
        >>> round(spearman(np.array([1, 2, 3]), np.array([10, 20, 90])), 6)
        1.0
    """
    x, y = _ranks(a), _ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: Vector) -> Vector:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Vector = (count.cumsum() - (count - 1) / 2)[place]
    return ranks


def z_score(saliency: Vector, contribution: Vector, permutations: int, rng: np.random.Generator) -> float:
    """Return how far Spearman's ρ lies above chance, in standard deviations of ρ with shuffled candidates.

    Args:
        saliency: (N,) a score of each candidate
        contribution: (N,) RC_g
        permutations: how often the candidates are shuffled
        rng: draws the permutations
    """
    null = [spearman(saliency, rng.permutation(contribution)) for _ in range(permutations)]
    spread = float(np.std(null))
    return (spearman(saliency, contribution) - float(np.mean(null))) / spread if spread else 0.0
