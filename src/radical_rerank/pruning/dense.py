from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from radical_rerank.pruning.base import Pruner, Stage


@dataclass(kw_only=True)
class Dense(Pruner):
    """Dense keeps every token: the reference that every method is compared with.

    Example:
        >>> Dense(keep=0.2).keep
        1.0
    """

    keep: float = 1.0
    summary: ClassVar[str] = "no pruning, the reference"

    def __post_init__(self) -> None:
        self.keep = 1.0  # Dense keeps everything, at any budget of a sweep
        super().__post_init__()

    def stages(self, num_layers: int) -> list[Stage]:
        return []
