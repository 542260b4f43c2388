"""How much: a budget of arithmetic becomes a schedule.

A schedule is K layers, and for each the share of all visual tokens that pass it. The shares are r^(e_1), …,
r^(e_K) with 0 < e_1 < … < e_K = 1: the exponents say how the cut is spread over the layers (h / K: equal
steps, as in the paper), and r, the share alive at the end, is what meets the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from radical_rerank.method.where import DecoderShape, alpha_maximin, keep_count, macs, tokens_per_layer


@dataclass(frozen=True)
class Schedule:
    """Layers that prune, before each of them, and how the cut is spread over them.

    Args:
        layers: ascending
        exponents: e_h of each; the last is 1

    Example:
        >>> Schedule.equal((3, 8)).shares(0.25)
        (0.5, 0.25)
    """

    layers: tuple[int, ...]
    exponents: tuple[float, ...]

    @classmethod
    def equal(cls, layers: Sequence[int]) -> Schedule:
        """K equal steps."""
        return cls(tuple(layers), tuple((h + 1) / len(layers) for h in range(len(layers))))

    @classmethod
    def of(cls, layers: Sequence[int], shares: Sequence[float]) -> Schedule:
        """The schedule that leaves these shares."""
        end = math.log(shares[-1])
        return cls(tuple(layers), tuple(math.log(share) / end if end else 1.0 for share in shares))

    def shares(self, r: float) -> tuple[float, ...]:
        """The shares alive after each layer, if r is left at the end."""
        return tuple(r**e for e in self.exponents)

    def counts(self, r: float, visual: int) -> list[int]:
        """How many of `visual` tokens pass each layer."""
        return [keep_count(share, visual) for share in self.shares(r)]


def arithmetic(
    layers: Sequence[int], counts: Sequence[int], shape: DecoderShape, visual: int, text: int
) -> int:
    """Multiply-accumulates of a prompt of `visual` and `text` tokens, if counts[h] pass layer layers[h]."""
    stages = [(layer, "before", text + count) for layer, count in zip(layers, counts, strict=True)]
    return macs(tokens_per_layer(visual + text, stages, shape.num_layers), shape)


@lru_cache(maxsize=4096)
def counts_within(
    schedule: Schedule, budget: float, shape: DecoderShape, visual: int, text: int
) -> tuple[int, ...]:
    """How many tokens of a prompt pass each layer, so that it costs `budget` multiply-accumulates.

    The cost grows with r, so r is found by bisection; of the last two, the one that is nearer to the budget
    is taken. A budget beyond the schedule's reach gives the nearest: one token left, or all.
    """

    def cost(r: float) -> tuple[int, tuple[int, ...]]:
        counts = schedule.counts(r, visual)
        return arithmetic(schedule.layers, counts, shape, visual, text), tuple(counts)

    low, high = math.log(1 / max(visual, 1)) / schedule.exponents[0], 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(math.exp(middle))[0] <= budget else (low, middle)
    return min((cost(math.exp(low)), cost(math.exp(high))), key=lambda one: abs(one[0] - budget))[1]


LEAST = 0.1
"""a plan leaves this share of the visual tokens, if it can"""


@lru_cache(maxsize=256)
def plan(
    layers: tuple[int, ...], alpha: tuple[float, ...], num_layers: int, flops: float, K: int = 4, gap: int = 2
) -> Schedule:
    """The schedule of a model that was not tuned, for a part `flops` of Dense's arithmetic.

    It is α-Maximin's choice among the first D layers, in K equal steps. Deeper layers know more, shallower
    ones save more: D is the largest depth at which the budget leaves `LEAST` of the tokens at the end.

    Costs are counted for equal layers and visual tokens alone. That decides between layers; `counts_within`
    then meets the budget list by list.
    """
    for depth in range(len(layers), 1, -1):
        chosen = alpha_maximin(layers[:depth], alpha[:depth], K, gap=gap)
        schedule = Schedule.equal(chosen)
        if _cost(schedule, LEAST, num_layers) <= flops:
            return schedule
    return Schedule.equal(layers[:1])


def _cost(schedule: Schedule, r: float, num_layers: int) -> float:
    """What a schedule costs of Dense's arithmetic, for equal layers."""
    ends = (*schedule.layers[1:], num_layers)
    after = (end - layer for layer, end in zip(schedule.layers, ends, strict=True))
    run = sum(span * share for span, share in zip(after, schedule.shares(r), strict=True))
    return (schedule.layers[0] + run) / num_layers
