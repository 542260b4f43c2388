"""The plan of a training: everything that decides its outcome, besides the photographs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from radical_rerank.embedded.photos.datasets import HELD_OUT
from radical_rerank.embedded.training import phase_at


@dataclass(frozen=True)
class Phase:
    """Steps of the listwise stage with lists of one length.

    Args:
        steps: how many steps
        candidates: photographs per list
        alike: how many of them look alike
        queries: queries per list
    """

    steps: int
    candidates: int
    alike: int
    queries: int


@dataclass(frozen=True)
class Plan:
    """A plan of training.

    Args:
        seed: of the first weights and all data
        num_layers: of the decoder
        views: of each training photograph
        held_out: the last photographs of the train split, which nothing is trained on: for the figures in the
            log, and for choosing the decoder's constants
        align_steps, align_pictures, align_lr: of the alignment
        word_lr: the rate of the word embeddings in it, as a multiple of the others'. The slower they move,
            the better words that no caption has keep their place among them
        phases: the steps of the listwise stage. By default there are none: the decoder's first weights rank
            better than what training them on the same photographs makes of them
        lr: its learning rate

    Example:
        >>> plan = Plan(align_steps=100)
        >>> plan.align_rate(0) < plan.align_rate(50) > plan.align_rate(99)
        True
    """

    seed: int = 0
    num_layers: int = 12
    views: int = 3
    held_out: int = HELD_OUT
    align_steps: int = 500
    align_pictures: int = 128
    align_lr: float = 2e-3
    word_lr: float = 0.5
    phases: tuple[Phase, ...] = ()
    lr: float = 1e-4

    @property
    def steps(self) -> int:
        """The steps of the listwise stage."""
        return sum(phase.steps for phase in self.phases)

    def of_alignment(self) -> dict[str, Any]:
        """Return the fields that decide the outcome of the alignment; the others may still change."""
        return {name: value for name, value in asdict(self).items() if name not in ("phases", "lr")}

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step of the listwise stage."""
        return phase_at(self.phases, step)

    def align_rate(self, step: int) -> float:
        """Return the learning rate of a step of the alignment."""
        return _rate(self.align_lr, step, self.align_steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of the listwise stage."""
        return _rate(self.lr, step, self.steps)


def _rate(highest: float, step: int, steps: int) -> float:
    """Rise over 30 steps, stay, and fall by a cosine from 40% of the steps on."""
    part = step / steps
    if part > 0.4:
        highest *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (part - 0.4) / 0.6))
    return highest * min(1.0, (step + 1) / 30)
