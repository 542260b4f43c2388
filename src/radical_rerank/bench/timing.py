"""Interleaved timing: noise that comes and goes hits all variants alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from radical_rerank.backbones.families import text_model
from radical_rerank.evaluation.runner import Track


@dataclass(frozen=True)
class Ratio:
    """A median over rounds with its quartiles; best: of the two best times, which noise moves least."""

    median: float
    low: float
    high: float
    best: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f}), best {self.best:.3f}"


@dataclass(frozen=True)
class Times:
    """Seconds per variant, one value per round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, above: str, below: str) -> Ratio:
        """above / below, round by round."""
        one, other = self.seconds[above], self.seconds[below]
        values = [a / b for a, b in zip(one, other, strict=True)]
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return Ratio(statistics.median(values), quartiles[0], quartiles[2], min(one) / min(other))


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    track: Track = lambda items, label: items,
    label: str = "timing",
) -> Times:
    """Each round runs every variant once, in an order that turns; the first round is not counted."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    turns = [
        (number, names[(number + i) % len(names)]) for number in range(rounds + 1) for i in range(len(names))
    ]
    for number, name in track(turns, label):
        start = time.perf_counter()
        variants[name]()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if number:
            seconds[name].append(time.perf_counter() - start)
    return Times(seconds)


@contextmanager
def phases(model: Any) -> Iterator[dict[str, list[float]]]:
    """Seconds of the decoder's calls inside: "prefill" of whole prompts, "decode" of single tokens."""
    spent: dict[str, list[float]] = {"prefill": [], "decode": []}
    started = 0.0

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal started
        started = time.perf_counter()

    def end(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        kind = "prefill" if kwargs["inputs_embeds"].shape[1] > 1 else "decode"
        spent[kind].append(time.perf_counter() - started)

    decoder = text_model(model)
    handles = [
        decoder.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
        decoder.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()
