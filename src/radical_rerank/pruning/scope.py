from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from radical_rerank.errors import InputError
from radical_rerank.pruning.base import EarlyPruner, StageView
from radical_rerank.pruning.images import apportion, by_image, greedily, kept_tokens, unit_vectors


@dataclass(kw_only=True)
class SCOPE(EarlyPruner):
    """SCOPE keeps salient tokens that stand for many others, picture by picture, before the decoder.

    "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs", arXiv:2510.24214.

    A set covers token j by its largest cosine with j. Each step adds the token i with the largest
    Σ_j max(0, cos(i, j) − covered_j) · saliency_i^power. The saliency is the attention that a token receives
    in the vision encoder's last block.

    Args:
        keep: the fraction of each picture's visual tokens
        power: how much saliency counts; 0 for coverage alone

    Example:
        >>> SCOPE(keep=0.25).stages(num_layers=36)
        [Stage(layer=0, keep=0.25, when='before', of_all=False)]
    """

    power: float = 1.0

    summary: ClassVar[str] = "before the decoder: of each picture, salient tokens that stand for many others"
    reads_encoder: ClassVar[bool] = True

    def check(self) -> None:
        if self.power < 0:
            raise InputError(f"power must be at least 0, not {self.power!r}")

    def select(self, view: StageView, count: int) -> Tensor:
        unit, inside = unit_vectors(view)
        saliency, _ = by_image(view.signals.attention.float().clamp(min=1e-12) ** self.power, view)
        alike = (unit @ unit.transpose(1, 2)).masked_fill(~inside[:, None], 0.0)
        budgets = apportion(inside.sum(dim=1).tolist(), count)
        return kept_tokens(greedily(inside, budgets, coverage(alike, saliency))[0], inside)


def coverage(alike: Tensor, saliency: Tensor) -> Callable[[Tensor | None], Tensor]:
    """A gain for `greedily`: what a token adds to the coverage of its picture, times its saliency.

    alike: (N, M, M) cosines, saliency: (N, M)
    """
    covered = torch.zeros_like(saliency)
    rows = torch.arange(len(alike), device=alike.device)

    def gain(last: Tensor | None) -> Tensor:
        nonlocal covered
        if last is not None:
            covered = torch.maximum(covered, alike[rows, last])
        return (alike - covered[:, None]).clamp(min=0).sum(dim=2) * saliency

    return gain
