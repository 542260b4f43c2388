from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from radical_rerank.pruning.base import Pruner, Stage, StageView, scaled


@dataclass(kw_only=True)
class PyramidDrop(Pruner):
    """Three cuts on the way, after layers 7, 15 and 23 (of 36), to 1/2, 1/4 and R of all tokens.

    A token's score is the attention that the prompt's last token would pay it in the next layer, by that
    layer's own norm, projections and rotation: so the cut is one before the next layer. The published code
    renumbers positions after each cut (`positions="compact"`); by default tokens keep theirs, since M-RoPE's
    positions carry the place in the image.
    """

    layers: tuple[int, ...] | None = None
    """the tokens leave after these; None: at the depths of 7, 15 and 23 of 36"""
    shares: tuple[float, ...] = (0.5, 0.25)
    """of all tokens, after all cuts but the last, which leaves `keep`"""

    summary: ClassVar[str] = "three cuts by the last token's attention, to 1/2, 1/4 and R"

    def stages(self, num_layers: int) -> list[Stage]:
        after = self.layers or [scaled(layer, num_layers) for layer in (7, 15, 23)]
        shares = [*(max(share, self.keep) for share in self.shares), self.keep]
        # In a shallow decoder two cuts may fall together: the later one counts.
        places = {min(layer + 1, num_layers - 1): share for layer, share in zip(after, shares, strict=True)}
        return [Stage(layer, share, of_all=True) for layer, share in places.items()]

    def score(self, view: StageView) -> Tensor:
        return view.attention(view.rows[-1:])[0]
