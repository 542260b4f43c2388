"""Budgets in the user's terms: a speedup, a part of the arithmetic, a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from radical_rerank.errors import InputError

if TYPE_CHECKING:
    from radical_rerank.reranking.reranker import Reranker

CHEAPEST = 0.05
"""the smallest part of Dense's arithmetic that a latency is turned into"""


@dataclass(frozen=True)
class Budget:
    """What the user asked for: at most one of these."""

    keep: float | None = None
    speedup: float | None = None
    flops: float | None = None
    latency: float | None = None
    agreement: float | None = None

    def __post_init__(self) -> None:
        if len(self.given) > 1:
            raise InputError(f"{' and '.join(self.given)} are two budgets: give one")
        self._check("speedup", lambda value: value >= 1, "at least 1")
        self._check("flops", lambda value: 0 < value <= 1, "in (0, 1]")
        self._check("latency", lambda value: value > 0, "above 0 seconds")
        self._check("agreement", lambda value: 0 < value < 1, "between 0 and 1")

    def _check(self, name: str, holds: Callable[[float], bool], rule: str) -> None:
        value = getattr(self, name)
        if value is not None and not (
            isinstance(value, (int, float)) and math.isfinite(value) and holds(value)
        ):
            raise InputError(f"{name} must be {rule}, not {value!r}")

    @property
    def given(self) -> list[str]:
        """The names of those that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def options(self, method: str) -> dict[str, Any]:
        """Return the options of the method. A latency and an agreement become them list by list."""
        if self.given and self.given != ["keep"] and method != "radical":
            raise InputError(f'{self.given[0]} needs the method "radical", not {method!r}')
        if self.keep is not None:
            return {"keep": self.keep}
        flops = self.flops if self.speedup is None else 1 / self.speedup
        return {} if flops is None else {"flops": flops}


@dataclass(frozen=True)
class Pace:
    """How long the decoder takes: seconds = fixed + rate · multiply-accumulates."""

    fixed: float
    rate: float

    def flops(self, seconds: float, dense: float) -> float:
        """Return the part of `dense` multiply-accumulates that can be done in this time."""
        return min(1.0, max(CHEAPEST, (seconds - self.fixed) / (self.rate * dense)))


def measured_pace(reranker: Reranker, rounds: int = 3) -> Pace:
    """Time a model on two generated lists, a short and a long one.

    reranker: without pruning
    """
    from radical_rerank.reranking.calibration import generated_list

    points = []
    most = 20 if reranker.scorer == "pointwise" else min(20, reranker.window)
    for count in (max(2, most // 4), most):
        query, images = generated_list(0, candidates=count, split="validation")
        seconds, cost = [], 0
        for _ in range(rounds + 1):  # the first one warms up
            report = reranker.rank(query, images).report
            assert report is not None
            seconds.append(report.seconds["decoder"])
            cost = report.macs
        points.append((cost, median(seconds[1:])))
    (small, fast), (large, slow) = points
    rate = max((slow - fast) / max(large - small, 1), slow / large * 0.1)
    return Pace(max(0.0, slow - rate * large), rate)
