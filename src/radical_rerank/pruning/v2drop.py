from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from radical_rerank.pruning.base import Pruner, Stage, StageView, scaled

DEPTHS = (8, 16, 24)
"""of 36 layers; our choice, since its authors choose layers for each model"""


@dataclass(kw_only=True)
class V2Drop(Pruner):
    """V²Drop drops the tokens that a layer changed least, in three cuts inside the decoder.

    "Variation-aware Vision Token Dropping for Faster Large Vision-Language Models", arXiv:2509.01552.

    A token's score is the length of the difference between its hidden state after the layer and before it. No
    attention is read. Every cut keeps the same fraction of the tokens that are alive.

    Args:
        keep: the fraction of visual tokens alive at the end
        layers: the tokens leave after these; None: at the depths of 8, 16 and 24 of 36

    Example:
        >>> [stage.layer for stage in V2Drop(keep=0.2).stages(num_layers=36)]
        [8, 16, 24]
    """

    layers: tuple[int, ...] | None = None

    summary: ClassVar[str] = "three cuts: the tokens that a layer changed least leave"
    reads_attention: ClassVar[bool] = False

    def stages(self, num_layers: int) -> list[Stage]:
        after = sorted(set(self.layers or (scaled(layer, num_layers) for layer in DEPTHS)))
        shares = [self.keep ** ((number + 1) / len(after)) for number in range(len(after))]
        return [Stage(layer, share, "after", of_all=True) for layer, share in zip(after, shares, strict=True)]

    def score(self, view: StageView) -> Tensor:
        changed: Tensor = (view.hidden.float() - view.entering.float()).norm(dim=-1)
        return changed
