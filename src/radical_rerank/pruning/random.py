from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from radical_rerank.pruning.radical import RaDiCal


@dataclass(kw_only=True)
class Random(RaDiCal):
    """The control: RaDiCal's layers and keep ratios, a seeded uniform draw for the tokens."""

    prior: str = "random"
    alpha: float | None = 1.0
    summary: ClassVar[str] = "RaDiCal's schedule with tokens drawn at random, the control"
