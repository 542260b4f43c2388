from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.pruning.base import Merge, Pruner, Stage, StageView, scaled


@dataclass(kw_only=True)
class DART(Pruner):
    """Duplication, not importance: after layer 1 (of 36), tokens least like a few pivots stay.

    Pivots are the 4 visual and 4 text tokens (after the images) whose keys have the largest L1 norm. Pivot
    by pivot, the tokens that are least cosine-similar to it (hidden states after the final norm) are taken
    out of the pool, an equal share each; the visual pivots stay themselves.
    """

    layer: int | None = None
    """the tokens leave after it; None: at the depth of layer 1 of 36"""
    image_pivots: int = 4
    text_pivots: int = 4

    summary: ClassVar[str] = "tokens that repeat a few pivots least"

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(scaled(1, num_layers) if self.layer is None else self.layer, self.keep, "after")]

    def select(self, view: StageView, count: int) -> Tensor | Merge:
        if count >= len(view.alive):
            return torch.arange(len(view.alive), device=view.alive.device)
        visual = _largest(view.keys, min(self.image_pivots, count))
        text = _largest(view.text_keys, self.text_pivots)
        states = normalize(view.normed(view.hidden).float(), dim=-1)
        words = normalize(view.normed(view.text_hidden).float(), dim=-1)
        pivots = torch.cat([states[visual], words[text]])
        likeness = states @ pivots.T
        free = torch.ones(len(states), dtype=torch.bool, device=states.device)
        free[visual] = False
        # The published share is budget // 8 each; the first pivots take one more where that leaves some.
        share, more = divmod(count - len(visual), len(pivots))
        for number in range(len(pivots)):
            wanted = share + (number < more)
            order = likeness[:, number].masked_fill(~free, torch.inf).argsort(stable=True)
            free[order[:wanted]] = False
        return (~free).nonzero()[:, 0]


def _largest(keys: Tensor, count: int) -> Tensor:
    """keys: (n, KV, hd) -> (count,) those of the largest L1 norm, largest first."""
    norm = keys.float().abs().sum(dim=(-1, -2))
    return norm.argsort(descending=True, stable=True)[:count]
