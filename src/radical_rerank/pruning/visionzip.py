from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.pruning.base import EarlyPruner, Merge, StageView
from radical_rerank.pruning.images import apportion


@dataclass(kw_only=True)
class VisionZip(EarlyPruner):
    """VisionZip reduces each image before the decoder: tokens the encoder attends to, and merged leftovers.

    "VisionZip: Longer is Better but Not Necessary in Vision Language Models", arXiv:2412.04467.

    54/64 of an image's budget are its dominant tokens, by the attention they receive in the last vision block
    (by the CLS token's attention if there is one). Of the rest, every step-th is a target, each other goes to
    the target with the most similar keys, and target + mean(others) replaces the target. Positions are those
    of the full images.

    Args:
        keep: the fraction of each image's visual tokens
        dominant: the share of dominant tokens in the budget

    Example:
        >>> VisionZip(keep=0.25).stages(num_layers=36)
        [Stage(layer=0, keep=0.25, when='before', of_all=False)]
    """

    dominant: float = 54 / 64

    summary: ClassVar[str] = "before the decoder: tokens the vision encoder attends to, the rest merged"
    reads_encoder: ClassVar[bool] = True

    def select(self, view: StageView, count: int) -> Tensor | Merge:
        if count >= len(view.alive):
            return torch.arange(len(view.alive), device=view.alive.device)
        sizes = view.image_of.bincount().tolist()
        kept: list[int] = []
        mix = torch.zeros(count, len(view.alive), device=view.alive.device)
        start = 0
        for size, budget in zip(sizes, apportion(sizes, count), strict=True):
            attention = view.signals.attention[start : start + size]
            keys = view.signals.keys[start : start + size]
            own, weights = _zip(attention, keys, budget, min(budget, round(self.dominant * budget)))
            mix[len(kept) : len(kept) + budget, start : start + size] = weights.to(mix.device)
            kept += [start + place for place in own.tolist()]
            start += size
        return Merge(torch.tensor(kept, device=view.alive.device), mix)


def _zip(attention: Tensor, keys: Tensor, budget: int, dominant: int) -> tuple[Tensor, Tensor]:
    """For an image of M tokens, return (budget,) which stay, ascending, and (budget, M) how to mix them."""
    size = len(attention)
    order = attention.argsort(descending=True, stable=True)
    best, rest = order[:dominant], order[dominant:].sort().values
    contextual = budget - dominant
    mix = torch.eye(size)
    targets = rest[:0]
    if contextual:
        step = max(1, len(rest) // contextual)
        chosen = torch.arange(len(rest)) % step == 0
        chosen &= chosen.cumsum(0) <= contextual
        targets, others = rest[chosen.to(rest.device)], rest[~chosen.to(rest.device)]
        unit = normalize(keys.float(), dim=-1)
        nearest = (unit[others] @ unit[targets].T).argmax(dim=-1)
        for number, target in enumerate(targets.tolist()):
            mine = others[nearest == number].tolist()
            if mine:
                mix[target, mine] = 1 / len(mine)
    stay = torch.cat([best, targets]).sort().values
    return stay, mix[stay.cpu()]
