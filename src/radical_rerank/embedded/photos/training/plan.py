"""The plan of a training: everything that decides its outcome, besides the photographs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A plan of training.

    Args:
        seed: of the first weights and all data
        num_layers: of the decoder
        views: of each training photograph
        align_steps, align_pictures, align_lr: of the alignment
        steps, lists, lr: of the listwise stage: steps, lists per step, learning rate
        candidates, alike, queries: photographs per list, how many of them look alike, queries per list

    Example:
        >>> plan = Plan(align_steps=100)
        >>> plan.align_rate(0) < plan.align_rate(50) > plan.align_rate(99)
        True
    """

    seed: int = 0
    num_layers: int = 12
    views: int = 3
    align_steps: int = 600
    align_pictures: int = 128
    align_lr: float = 2e-3
    steps: int = 1200
    lists: int = 1
    candidates: int = 20
    alike: int = 10
    queries: int = 40
    lr: float = 1e-4

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
