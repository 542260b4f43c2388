from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from radical_rerank.pruning.base import Pruner, Stage, StageView, scaled


@dataclass(kw_only=True)
class PyramidDrop(Pruner):
    """PyramidDrop cuts three times, after layers 7, 15 and 23 (of 36), to 1/2, 1/4 and R of all tokens.

    "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction",
    arXiv:2410.17247.

    A token's score is the attention of the prompt's last token in the next layer, computed with that layer's
    norm, projections and rotation. So each cut is a stage before the next layer. The published code renumbers
    positions after each cut (`positions="compact"`). By default tokens keep theirs, since M-RoPE's positions
    say where a token is in the image.

    Args:
        keep: the fraction of visual tokens alive at the end
        layers: the tokens leave after these; None: at the depths of 7, 15 and 23 of 36
        shares: the fractions of all tokens after all cuts but the last, which leaves `keep`

    Example:
        >>> [stage.layer for stage in PyramidDrop(keep=0.1).stages(num_layers=36)]
        [8, 16, 24]
    """

    layers: tuple[int, ...] | None = None
    shares: tuple[float, ...] = (0.5, 0.25)

    summary: ClassVar[str] = "three cuts by the last token's attention, to 1/2, 1/4 and R"

    def stages(self, num_layers: int) -> list[Stage]:
        after = self.layers or [scaled(layer, num_layers) for layer in (7, 15, 23)]
        shares = [*(max(share, self.keep) for share in self.shares), self.keep]
        # In a shallow decoder, two cuts may fall on one layer: the later one counts.
        places = {min(layer + 1, num_layers - 1): share for layer, share in zip(after, shares, strict=True)}
        return [Stage(layer, share, of_all=True) for layer, share in places.items()]

    def score(self, view: StageView) -> Tensor:
        return view.attention(view.rows[-1:])[0]
