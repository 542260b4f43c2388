from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from radical_rerank.pruning.base import Look, Pruner, Stage


@dataclass(kw_only=True)
class LowRes(Pruner):
    """LowRes scales every image down, so that it has at most R of its visual tokens. It drops none.

    A control of the RaDiCal paper ("From Saliency to Discriminability").

    Args:
        keep: the fraction of each image's visual tokens

    Example:
        >>> LowRes(keep=0.25).resize([100, 40], look=lambda: None)
        [25, 10]
    """

    summary: ClassVar[str] = "every image at a lower resolution"
    resizes: ClassVar[bool] = True

    def stages(self, num_layers: int) -> list[Stage]:
        return []

    def resize(self, sizes: Sequence[int], look: Callable[[], Look]) -> list[int] | None:
        return [max(1, int(self.keep * size + 1e-9)) for size in sizes] if self.keep < 1 else None
