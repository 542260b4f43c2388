"""Interleaved timing: noise that comes and goes hits all variants alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, with its quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


@dataclass(frozen=True)
class Times:
    """Seconds per variant, one value per round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, above: str, below: str) -> Ratio:
        """above / below, round by round."""
        values = [a / b for a, b in zip(self.seconds[above], self.seconds[below], strict=True)]
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return Ratio(statistics.median(values), quartiles[0], quartiles[2])


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    tell: Callable[[], None] = lambda: None,
) -> Times:
    """Each round runs every variant once, in an order that turns; the first round is not counted."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            variants[name]()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - start)
            tell()
    return Times(seconds)
