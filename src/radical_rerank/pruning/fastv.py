from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from radical_rerank.pruning.base import Pruner, Stage, StageView, scaled


@dataclass(kw_only=True)
class FastV(Pruner):
    """One early cut by attention: after layer 2 (of 36), what the prompt's last token looks at stays."""

    layer: int | None = None
    """the tokens leave after it; None: at the depth of layer 2 of 36"""

    summary: ClassVar[str] = "one early cut by the last token's attention"

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(scaled(2, num_layers) if self.layer is None else self.layer, self.keep, "after")]

    def score(self, view: StageView) -> Tensor:
        return view.attention(view.rows[-1:])[0]
