from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.errors import InputError
from radical_rerank.pruning.base import EarlyPruner, StageView
from radical_rerank.pruning.images import apportion, farthest, greedily, kept_tokens, unit_vectors


@dataclass(kw_only=True)
class TrimTokenatorLC(EarlyPruner):
    """TrimTokenator-LC gives pictures shares by their diversity, then keeps diverse tokens that fit the text.

    Made for long contexts with many pictures; before the decoder.

    A picture's share of the budget grows with how much its tokens differ from each other, and how much it
    differs from the other pictures. Inside a picture, the tokens that are farthest from each other are found
    greedily, `wider` times as many as its share. Of these the fronts of diversity against alignment with the
    query are taken, one after the other: a token is on the front if no other one is better in both.

    Args:
        keep: the fraction of visual tokens alive at the end
        wider: how many times its share a picture's first choice has

    Example:
        >>> TrimTokenatorLC(keep=0.25).stages(num_layers=36)
        [Stage(layer=0, keep=0.25, when='before', of_all=False)]
    """

    wider: float = 2.0

    summary: ClassVar[str] = "before the decoder: shares by diversity, then diverse tokens that fit the query"

    def check(self) -> None:
        if self.wider < 1:
            raise InputError(f"wider must be at least 1, not {self.wider!r}")

    def select(self, view: StageView, count: int) -> Tensor:
        unit, inside = unit_vectors(view)
        sizes = inside.sum(dim=1).tolist()
        budgets = apportion(sizes, count, weights=diversity(unit, inside).tolist())
        first = [min(size, round(self.wider * budget)) for size, budget in zip(sizes, budgets, strict=True)]
        chosen, distance = greedily(inside, first, farthest(unit))
        alignment = unit @ normalize(view.query_embedding.float(), dim=-1)
        for row, budget in enumerate(budgets):
            own = chosen[row].nonzero()[:, 0]
            chosen[row, own] = False
            chosen[row, own[fronts(distance[row, own], alignment[row, own])[:budget]]] = True
        return kept_tokens(chosen, inside)


def diversity(unit: Tensor, inside: Tensor) -> Tensor:
    """(N,) each picture's weight: size · (1 − mean cosine inside it) · (1 − mean cosine to the others)."""
    size = inside.sum(dim=1)
    mean = unit.sum(dim=1) / size[:, None]
    inner = 1 - mean.square().sum(dim=1)
    centre = normalize(mean, dim=-1)
    others = max(1, len(unit) - 1)
    outer = 1 - ((centre @ centre.T).sum(dim=1) - 1) / others
    return (size * inner.clamp(min=0) * outer.clamp(min=0)).double()


def fronts(first: Tensor, second: Tensor) -> Tensor:
    """Return the tokens front by front, and on a front by the sum of their ranks. (n,), (n,) -> (n,)"""
    better = (first[:, None] >= first) & (second[:, None] >= second)
    better &= (first[:, None] > first) | (second[:, None] > second)
    number = torch.zeros(len(first), dtype=torch.long, device=first.device)
    left = torch.ones(len(first), dtype=torch.bool, device=first.device)
    while bool(left.any()):
        front = left & ~(better & left[:, None]).any(dim=0)
        left &= ~front
        number += left  # those that are not on this front are on a later one
    ranks = first.argsort().argsort() + second.argsort().argsort()
    return (number * (4 * len(first)) - ranks).argsort(stable=True)
