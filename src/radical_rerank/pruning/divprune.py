from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.pruning.base import EarlyPruner, StageView

BLOCK = 1024
"""rows of the first comparison at a time: no (tokens × tokens) matrix is ever built"""


@dataclass(kw_only=True)
class DivPrune(EarlyPruner):
    """DivPrune keeps the tokens that are farthest from each other, in the whole list, before the decoder.

    "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models", arXiv:2503.02175.

    It starts with the token whose nearest neighbour is farthest, by 1 − cos. Each step adds the token that is
    farthest from all that were chosen.

    Args:
        keep: the fraction of visual tokens alive at the end

    Example:
        >>> DivPrune(keep=0.25).stages(num_layers=36)
        [Stage(layer=0, keep=0.25, when='before', of_all=False)]
    """

    summary: ClassVar[str] = "before the decoder: the tokens that are farthest from each other"

    def select(self, view: StageView, count: int) -> Tensor:
        unit = normalize(view.vision.float(), dim=-1)
        last = _loneliest(unit)
        nearest = unit.new_full((len(unit),), torch.inf)
        chosen = [last]
        for _ in range(count - 1):
            torch.minimum(nearest, 1 - unit @ unit[last], out=nearest)
            nearest[last] = -torch.inf
            last = int(nearest.argmax())
            chosen.append(last)
        return torch.tensor(sorted(chosen), device=view.alive.device)


def _loneliest(unit: Tensor) -> int:
    """Return the token whose nearest neighbour is farthest. unit: (V, d)"""
    nearest = []
    for start in range(0, len(unit), BLOCK):
        alike = unit[start : start + BLOCK] @ unit.T
        alike.diagonal(start).fill_(-torch.inf)
        nearest.append(alike.amax(dim=1))
    return int(torch.cat(nearest).argmin())
