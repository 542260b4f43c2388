from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.pruning.base import Merge, Pruner, Stage, StageView, scaled


@dataclass(kw_only=True)
class DART(Pruner):
    """DART keeps the tokens that are least like a few pivots, after layer 1 (of 36).

    "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More",
    arXiv:2502.11494.

    Pivots are the 4 visual and 4 text tokens (after the images) whose keys have the largest L1 norm. Each
    pivot in turn takes an equal share of the budget: the remaining tokens that are least cosine-similar to it
    (hidden states after the final norm). Visual pivots stay, too.

    Args:
        keep: the fraction of visual tokens alive at the end
        layer: the tokens leave after it; None: at the depth of layer 1 of 36
        image_pivots, text_pivots: how many pivots

    Example:
        >>> DART(keep=0.1).stages(num_layers=36)
        [Stage(layer=1, keep=0.1, when='after', of_all=False)]
    """

    layer: int | None = None
    image_pivots: int = 4
    text_pivots: int = 4

    summary: ClassVar[str] = "the tokens that are least like a few pivots"

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
        # The published share is budget // 8 each; the first pivots take one more if some are left.
        share, more = divmod(count - len(visual), len(pivots))
        for number in range(len(pivots)):
            wanted = share + (number < more)
            order = likeness[:, number].masked_fill(~free, torch.inf).argsort(stable=True)
            free[order[:wanted]] = False
        return (~free).nonzero()[:, 0]


def _largest(keys: Tensor, count: int) -> Tensor:
    """Return the tokens whose keys have the largest L1 norm. keys: (n, KV, hd) -> (count,)"""
    norm = keys.float().abs().sum(dim=(-1, -2))
    return norm.argsort(descending=True, stable=True)[:count]
