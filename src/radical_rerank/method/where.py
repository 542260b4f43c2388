"""Where to prune: the layers of a schedule, how many tokens pass each, and what the schedule costs.

A strategy takes the trust curve as two parallel sequences, `layers` (the candidate layers) and
`alpha` (their α), and returns K of those layers in order of depth. The paper names the six
alternatives to α-Maximin and what each chose; the rules written here are the plainest that fit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

# Differences in α below this are ties: published curves carry two decimals.
_TIE = 1e-9


def keep_ratio(R: float, K: int) -> float:
    """keep(l_h) = R^(1/K): K equal steps that together keep R."""
    return float(R ** (1 / K))


def keep_count(keep: float, alive: int) -> int:
    """⌈keep · alive⌉, at least one token where there is one; safe against 0.1 · 30 = 3.0000000000000004."""
    return min(alive, max(math.ceil(keep * alive - 1e-9), min(alive, 1)))


def top_k(score: Tensor, count: int, ties: Sequence[Tensor] = ()) -> Tensor:
    """Indices of the `count` highest scores, in their original order.

    score: (n,) -> (count,), ascending. Ties are broken by each of `ties` (n,) in turn,
    then by the earlier index.
    """
    order = torch.arange(len(score), device=score.device)
    for key in (*reversed(ties), score):
        order = order[key[order].argsort(descending=True, stable=True)]
    return order[:count].sort().values


def nucleus_count(score: Tensor, share: float) -> int:
    """How many of the highest scores hold `share` of their sum: the smallest such set, at least one token.

    score: (n,), none below 0
    """
    held = score.double().sort(descending=True).values.cumsum(0)
    return min(len(score), int((held < share * held[-1] - 1e-12).sum()) + 1)


def allot(prior: Tensor, candidate_of: Tensor, counts: Sequence[int], least: Tensor) -> list[list[int]]:
    """How many tokens of each of N candidates pass each stage, if `counts` of the whole list do.

    The list's tokens are put in one order, the highest prior first, but for the best `least` of every
    candidate, which come before all others. The first counts[h] of them pass stage h. So each stage's numbers
    sum to its count, and none grows from a stage to the next.

    prior, candidate_of: (V,), least: (N,), with Σ least ≤ counts[h] ≤ V -> per stage, N numbers.
    """
    order = prior.argsort(descending=True, stable=True)
    owner = candidate_of[order]
    sizes = owner.bincount(minlength=len(least))
    grouped = owner.argsort(stable=True)
    place = torch.empty_like(owner)  # of each token among its candidate's own, by prior
    place[grouped] = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[owner[grouped]]
    later = place >= least.to(owner.device)[owner]
    owner = owner[later.int().argsort(stable=True)]
    return [owner[:count].bincount(minlength=len(least)).tolist() for count in counts]


class Strategy(Protocol):
    """A way to choose K layers from the trust curve."""

    def __call__(
        self, layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
    ) -> list[int]: ...


def alpha_maximin(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """Greedy farthest-first selection in α-space, anchored where attention is most reliable.

    l₁ = argmin α(l); then K−1 times l* = argmax over l ∈ F of min over chosen l' of |α(l) − α(l')|,
    F the layers at least `gap` from every chosen one, or all that are left when there is none.
    Ties go to the shallower layer: at equal trust, an earlier stage saves more.
    """
    value = dict(zip(layers, alpha, strict=True))
    chosen = [_first(layers, lambda layer: -value[layer])]
    while len(chosen) < min(K, len(layers)):
        rest = [layer for layer in layers if layer not in chosen]
        far = [layer for layer in rest if all(abs(layer - other) >= gap for other in chosen)]
        chosen.append(
            _first(far or rest, lambda layer: min(abs(value[layer] - value[other]) for other in chosen))
        )
    return sorted(chosen)


def _first(layers: Iterable[int], score: Callable[[int], float]) -> int:
    """The shallowest of the layers whose score is the highest."""
    scores = {layer: score(layer) for layer in sorted(layers)}
    best = max(scores.values())
    return next(layer for layer, s in scores.items() if s >= best - _TIE)


def cumulative_information(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """Equal shares of information: where Σ (1 − α) first reaches h / (K+1) of its total, h = 1…K."""
    total, reached = sum(1 - a for a in alpha), 0.0
    chosen: list[int] = []
    for layer, a in sorted(zip(layers, alpha, strict=True)):
        reached += 1 - a
        if len(chosen) < K and reached >= total * (len(chosen) + 1) / (K + 1) - _TIE:
            chosen.append(layer)
    return _complete(chosen, layers, K)


def max_gradient(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """The steepest places: the layers with the largest |dα / dl| to the layer before, `gap` apart."""
    points = sorted(zip(layers, alpha, strict=True))
    slope = {here: abs(a - b) / (here - there) for (there, b), (here, a) in pairwise(points)}
    steepest = sorted(slope, key=lambda layer: (-slope[layer], layer))
    chosen: list[int] = []
    for layer in steepest:
        if len(chosen) < K and all(abs(layer - other) >= gap for other in chosen):
            chosen.append(layer)
    return _complete(chosen, steepest + sorted(layers), K)


def alpha_quantile(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """The layers nearest to the h / (K+1) quantiles of α, h = 1…K, each layer once."""
    ordered, chosen = sorted(alpha), list[int]()
    value = dict(zip(layers, alpha, strict=True))
    for h in range(1, min(K, len(layers)) + 1):
        place = h / (K + 1) * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        target = ordered[low] + (place - low) * (ordered[high] - ordered[low])
        rest = [layer for layer in layers if layer not in chosen]
        chosen.append(_first(rest, lambda layer, target=target: -abs(value[layer] - target)))  # type: ignore[misc]
    return sorted(chosen)


def deep_only(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """α-Maximin's choice without its layers in the shallower half: so up to K of them, not always K."""
    middle = (max(layers) + 1) / 2
    chosen = alpha_maximin(layers, alpha, K, gap=gap)
    return [layer for layer in chosen if layer >= middle] or chosen[-1:]


def random_layers(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """K layers drawn without replacement, seeded."""
    return sorted(random.Random(seed).sample(sorted(layers), min(K, len(layers))))


def local_extrema(
    layers: Sequence[int], alpha: Sequence[float], K: int, *, gap: int = 2, seed: int = 0
) -> list[int]:
    """The highest local maxima (⌈K/2⌉) and the lowest local minima (⌊K/2⌋), inner layers only."""
    points = sorted(zip(layers, alpha, strict=True))
    triples = list(zip(points, points[1:], points[2:], strict=False))
    peaks = [p for (_, a), p, (_, b) in triples if p[1] > a and p[1] >= b]
    valleys = [p for (_, a), p, (_, b) in triples if p[1] < a and p[1] <= b]
    high = [layer for layer, _ in sorted(peaks, key=lambda p: (-p[1], p[0]))]
    low = [layer for layer, _ in sorted(valleys, key=lambda p: (p[1], p[0]))]
    chosen = high[: K - K // 2] + low[: K // 2]
    return _complete(chosen, high + low + alpha_maximin(layers, alpha, K, gap=gap) + sorted(layers), K)


def _complete(chosen: list[int], reserve: Sequence[int], K: int) -> list[int]:
    """Fill up to K from the reserve, in its order, where a curve offers too few places."""
    for layer in reserve:
        if len(chosen) < K and layer not in chosen:
            chosen.append(layer)
    return sorted(chosen)


STRATEGIES: dict[str, Strategy] = {
    "alpha_maximin": alpha_maximin,
    "cumulative_information": cumulative_information,
    "max_gradient": max_gradient,
    "alpha_quantile": alpha_quantile,
    "deep_only": deep_only,
    "random": random_layers,
    "local_extrema": local_extrema,
}


# What a schedule costs, counted as the paper counts: its "TFLOPs" are multiply-accumulates of the decoder's
# prefill, with attention in full rather than causal, without the vision encoder and the output head.


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    per_token, per_pair: multiply-accumulates of each token, and of each pair of tokens (softmax attention)
    cached: values in the cache for each token, of at most `window` tokens (0: of all)
    state: values in the cache that do not grow with the tokens (linear attention)
    """

    per_token: int
    per_pair: int = 0
    cached: int = 0
    window: int = 0
    state: int = 0


@dataclass(frozen=True)
class DecoderShape:
    """The dimensions of a decoder: width d, H query and KV key-value heads of size hd, MLP width I.

    layers: the cost of each layer, if they are not all plain ones: softmax attention and a dense MLP
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    layers: tuple[LayerCost, ...] = ()

    @property
    def plain(self) -> LayerCost:
        """A plain layer's cost: 2·d·H·hd + 2·d·KV·hd + 3·d·I per token, 2·H·hd per pair, 2·KV·hd cached."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_token = 2 * self.hidden * query + 2 * self.hidden * key + 3 * self.hidden * self.mlp
        return LayerCost(per_token, per_pair=2 * query, cached=2 * key)

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        """The cost of each layer."""
        return self.layers or (self.plain,) * self.num_layers


def tokens_per_layer(total: int, stages: Sequence[tuple[int, str, int]], num_layers: int) -> list[int]:
    """n_l for every layer: `total` tokens enter, and each stage (layer, "before" | "after", n) leaves n.

    Tokens that leave before a layer do not run through it; those that leave after it do.
    """
    counts = [total] * num_layers
    for layer, when, left in stages:
        first = layer if when == "before" else layer + 1
        counts[first:] = [left] * (num_layers - first)
    return counts


def macs(counts: Sequence[int], shape: DecoderShape) -> int:
    """Σ_l n_l (2·d·H·hd + 2·d·KV·hd + 3·d·I) + 2·n_l²·H·hd, or each layer's own cost."""
    return sum(
        n * cost.per_token + n * n * cost.per_pair for n, cost in zip(counts, shape.costs, strict=True)
    )


def kv_bytes(counts: Sequence[int], shape: DecoderShape, bytes_per_value: int = 2) -> int:
    """Σ_l 2·n_l·KV·hd values of the key-value cache, or each layer's own, in bytes."""
    values = 0
    for n, cost in zip(counts, shape.costs, strict=True):
        values += cost.cached * (min(n, cost.window) if cost.window else n) + cost.state
    return values * bytes_per_value


def saving(part: float, whole: float) -> float:
    """1 − part / whole: the fraction saved; 0 where there is nothing to save."""
    return 1 - part / whole if whole else 0.0
