"""Interleaved timing: background noise affects all variants equally."""

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
    """A ratio of two times.

    Args:
        median: the median over rounds
        low, high: the quartiles over rounds
        best: the ratio of the two shortest times, which noise changes least
    """

    median: float
    low: float
    high: float
    best: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f}), best {self.best:.3f}"


@dataclass(frozen=True)
class Times:
    """Seconds per variant, one value per round.

    Example:
        >>> times = Times({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0]})
        >>> times.median("a"), times.ratio("a", "b").median
        (2.0, 0.5)
    """

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median seconds of a variant."""
        return statistics.median(self.seconds[name])

    def ratio(self, above: str, below: str) -> Ratio:
        """Return the ratio of two variants, computed within each round."""
        one, other = self.seconds[above], self.seconds[below]
        values = [a / b for a, b in zip(one, other, strict=True)]
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return Ratio(statistics.median(values), quartiles[0], quartiles[2], min(one) / min(other))


@dataclass(frozen=True)
class StepTimes(Times):
    """Seconds per variant, round and step.

    The time of a variant is the sum over its steps of their medians over rounds (of their minima for
    `Ratio.best`). A disturbance then affects one step and not a whole round.

    Args:
        steps: per variant and round the seconds of each step
    """

    seconds: dict[str, list[float]] = field(init=False)
    steps: dict[str, list[list[float]]]

    def __post_init__(self) -> None:
        totals = {name: [sum(steps) for steps in rounds] for name, rounds in self.steps.items()}
        object.__setattr__(self, "seconds", totals)

    def median(self, name: str) -> float:
        """Return the sum over steps of their median seconds."""
        return self._sum(statistics.median, name)

    def ratio(self, above: str, below: str) -> Ratio:
        """Return the ratio of two variants. The quartiles are those of whole rounds."""
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
    """Time variants in turn. Every round runs each variant once, in a rotating order.

    Args:
        variants: what to time, by name
        rounds: how many rounds count; one more runs first to warm up
        progress: shows the progress
        label: the label of the progress
    """
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
    warm_up: bool = True,
    progress: Progress = silent,
    label: str = "timing",
) -> StepTimes:
    """Time variants in turn, module by module.

    Every round runs all variants together. Each stops before every one of its modules and lets the next
    variant run, so only one runs at any moment. Noise that lasts longer than a fraction of a second then
    affects all variants equally.

    Args:
        variants: by name, what to time, and its modules in the order of their calls; variants must not
            share modules
        rounds: how many rounds count
        warm_up: whether one more runs first
        progress: shows the progress
        label: the label of the progress
    """
    steps: dict[str, list[list[float]]] = {name: [] for name in variants}
    draw = random.Random(0)
    for number in progress(range(0 if warm_up else 1, rounds + 1), label):
        # Threads differ in their memory, so every round gives a variant a new one.
        runners = {name: _Runner(*variants[name]) for name in draw.sample(list(variants), len(variants))}
        live = list(runners.values())
        while live:
            draw.shuffle(live)  # no variant always follows the same other one
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
    """Runs one variant in its own thread, which stops before each of its modules."""

    def __init__(self, run: Callable[[], object], modules: Sequence[nn.Module]) -> None:
        self._run, self._modules = run, modules
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.done = False
        self.steps: list[float] = []
        self.error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def step(self) -> None:
        """Let the variant run up to its next module."""
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
        except BaseException as error:  # the caller's thread raises it
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
    """Measure the decoder's calls inside the context.

    Yields a dict that is filled with the seconds of each call: "prefill" for prompts, "decode" for single
    tokens.
    """
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
