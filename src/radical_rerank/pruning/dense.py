from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from radical_rerank.pruning.base import Pruner, Stage


@dataclass(kw_only=True)
class Dense(Pruner):
    """No pruning: the reference that every method is measured against."""

    keep: float = 1.0
    summary: ClassVar[str] = "no pruning, the reference"

    def __post_init__(self) -> None:
        self.keep = 1.0  # whatever budget a sweep passes, Dense keeps everything
        super().__post_init__()

    def stages(self, num_layers: int) -> list[Stage]:
        return []
