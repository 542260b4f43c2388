from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from radical_rerank.pruning.base import Pruner, Stage, StageView, scaled


@dataclass(kw_only=True)
class FastV(Pruner):
    """FastV keeps what the prompt's last token attends to, in one early cut after layer 2 (of 36).

    "An Image is Worth 1/2 Tokens After Layer 2", arXiv:2403.06764.

    Args:
        keep: the fraction of visual tokens alive at the end
        layer: the tokens leave after it; None: at the depth of layer 2 of 36

    Example:
        >>> FastV(keep=0.5).stages(num_layers=36)
        [Stage(layer=2, keep=0.5, when='after', of_all=False)]
    """

    layer: int | None = None

    summary: ClassVar[str] = "one early cut by the last token's attention"

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(scaled(2, num_layers) if self.layer is None else self.layer, self.keep, "after")]

    def score(self, view: StageView) -> Tensor:
        return view.attention(view.rows[-1:])[0]
