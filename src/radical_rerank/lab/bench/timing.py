"""Interleaved timing: noise that comes and goes hits all variants alike."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from radical_rerank.backbones.model import text_model
from radical_rerank.progress import Progress, silent


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


@dataclass(frozen=True)
class StepTimes(Times):
    """The same, with what each step of a round took. A variant's time is the sum of its steps' medians over
    the rounds (best: of their minima), so that a disturbance costs a step and not a round."""

    seconds: dict[str, list[float]] = field(init=False)
    steps: dict[str, list[list[float]]]
    """round by round, step by step"""

    def __post_init__(self) -> None:
        totals = {name: [sum(found) for found in rounds] for name, rounds in self.steps.items()}
        object.__setattr__(self, "seconds", totals)

    def median(self, name: str) -> float:
        return self._sum(statistics.median, name)

    def ratio(self, above: str, below: str) -> Ratio:
        return replace(
            super().ratio(above, below),
            median=self.median(above) / self.median(below),
            best=self._sum(min, above) / self._sum(min, below),
        )

    def _sum(self, pick: Callable[[Sequence[float]], float], name: str) -> float:
        return sum(pick(step) for step in zip(*self.steps[name], strict=True))


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    progress: Progress = silent,
    label: str = "timing",
) -> Times:
    """Each round runs every variant once, in an order that turns; the first round is not counted."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    turns = [
        (number, names[(number + i) % len(names)]) for number in range(rounds + 1) for i in range(len(names))
    ]
    for number, name in progress(turns, label):
        start = time.perf_counter()
        variants[name]()
        _synchronize()
        if number:
            seconds[name].append(time.perf_counter() - start)
    return Times(seconds)


def lockstep(
    variants: Mapping[str, tuple[Callable[[], object], Sequence[nn.Module]]],
    rounds: int,
    *,
    progress: Progress = silent,
    label: str = "timing",
) -> StepTimes:
    """Interleaved more finely: each round runs all variants at once, in turns of one module each.

    A variant is what runs and the modules (its own, in the order of their calls) before each of which it
    hands on to the next variant. Only one runs at any moment, and what is compared lies fractions of a
    second apart, so that noise longer than that hits all alike. The first round is not counted.
    """
    steps: dict[str, list[list[float]]] = {name: [] for name in variants}
    draw = random.Random(0)
    for number in progress(range(rounds + 1), label):
        # Threads differ by their memory: nobody keeps the same one.
        runners = {name: _Runner(*variants[name]) for name in draw.sample(list(variants), len(variants))}
        live = list(runners.values())
        while live:
            draw.shuffle(live)  # so that nobody always follows the same one
            for runner in live:
                runner.step()
            live = [runner for runner in live if not runner.done]
        for name, runner in runners.items():
            if runner.error is not None:
                raise runner.error
            if number:
                steps[name].append(runner.steps)
    return StepTimes(steps)


class _Runner:
    """One variant in a thread of its own, which stops before each of its modules."""

    def __init__(self, run: Callable[[], object], modules: Sequence[nn.Module]) -> None:
        self._run, self._modules = run, modules
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.done = False
        self.steps: list[float] = []
        self.error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def step(self) -> None:
        start = time.perf_counter()
        self._go.release()
        self._back.acquire()
        self.steps.append(time.perf_counter() - start)

    def _work(self) -> None:
        self._go.acquire()
        handles = [module.register_forward_pre_hook(self._pause) for module in self._modules]
        try:
            self._run()
            _synchronize()
        except BaseException as error:  # raised where the rounds are counted
            self.error = error
        for handle in handles:
            handle.remove()
        self.done = True
        self._back.release()

    def _pause(self, module: nn.Module, args: object) -> None:
        _synchronize()
        self._back.release()
        self._go.acquire()


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def phases(model: Any) -> Iterator[dict[str, list[float]]]:
    """Seconds of the decoder's calls inside: "prefill" of whole prompts, "decode" of single tokens."""
    spent: dict[str, list[float]] = {"prefill": [], "decode": []}
    started = 0.0

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal started
        started = time.perf_counter()

    def end(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        _synchronize()
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
