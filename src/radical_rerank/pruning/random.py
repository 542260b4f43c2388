from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from radical_rerank.pruning.radical import RaDiCal


@dataclass(kw_only=True)
class Random(RaDiCal):
    """Random keeps a seeded uniform draw, at RaDiCal's layers and keep ratios: the control.

    Args:
        seed: seeds the draw; other options are RaDiCal's

    Example:
        >>> Random(keep=0.5, layers=(2, 5)).stages(num_layers=8)[0].layer
        2
    """

    prior: str = "random"
    alpha: float | None = 1.0
    summary: ClassVar[str] = "tokens drawn at random at RaDiCal's layers, the control"
