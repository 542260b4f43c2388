from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from radical_rerank.method import discriminative_importance, min_max, query_relevance
from radical_rerank.pruning.base import Look
from radical_rerank.pruning.lowres import LowRes


@dataclass(kw_only=True)
class DynResQRel(LowRes):
    """DynRes-QRel gives more resolution to candidates that fit the query, within R of all tokens.

    A control of the RaDiCal paper ("From Saliency to Discriminability").

    A candidate's share of its tokens grows linearly with the mean of its tokens' query relevance, from
    `least` · R at the lowest mean to the share at which the total is R. The candidates are first encoded at
    full size.

    Args:
        keep: the fraction of visual tokens of all candidates together
        least: the smallest share of a candidate, as a fraction of `keep`

    Example:
        >>> DynResQRel(keep=0.2).stages(num_layers=36)
        []
    """

    least: float = 0.5

    summary: ClassVar[str] = "more resolution for candidates that fit the query"

    def resize(self, sizes: Sequence[int], look: Callable[[], Look]) -> list[int] | None:
        if self.keep >= 1:
            return None
        seen = look()
        signal = self._signal(seen).float()
        owner = seen.candidate_of
        total = signal.new_zeros(len(sizes)).index_add(0, owner, signal)
        mean = min_max(total / owner.bincount(minlength=seen.count))
        return shares(sizes, mean.tolist(), self.keep, self.least)

    def _signal(self, seen: Look) -> Tensor:
        return query_relevance(seen.vision, seen.query_embedding)


@dataclass(kw_only=True)
class DynResDTI(DynResQRel):
    """DynRes-DTI: as DynRes-QRel, by DTI. More resolution for candidates that fit the query and differ.

    A control of the RaDiCal paper ("From Saliency to Discriminability").

    Example:
        >>> DynResDTI(keep=0.2).resizes
        True
    """

    summary: ClassVar[str] = "more resolution for candidates that fit the query and differ from the others"

    def _signal(self, seen: Look) -> Tensor:
        return discriminative_importance(seen.vision, seen.query_embedding, seen.candidate_of)


def shares(sizes: Sequence[int], signal: Sequence[float], keep: float, least: float) -> list[int]:
    """Return the tokens of each candidate: sizes · min(1, low + slope · signal), low = least · keep.

    The slope is chosen so that they sum to at most keep · Σ sizes, as closely as whole tokens allow.
    """
    size, value = torch.tensor(sizes, dtype=torch.float64), torch.tensor(signal, dtype=torch.float64)
    budget = keep * float(size.sum())
    if not value.any():
        value = torch.ones_like(value)

    def allotted(slope: float) -> Tensor:
        return size * (least * keep + slope * value).clamp(max=1)

    low, high = 0.0, 1.0
    while float(allotted(high).sum()) < budget and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(allotted(middle).sum()) <= budget else (low, middle)
    return [max(1, int(tokens + 1e-6)) for tokens in allotted(low).tolist()]
