"""The plan of a training: everything that decides its outcome."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from radical_rerank.embedded.training import phase_at
from radical_rerank.errors import InputError


@dataclass(frozen=True)
class Phase:
    """Steps of stage B with lists of one length.

    Args:
        steps: how many steps
        candidates: scenes per list
        queries: queries per list
        lists: lists per step
        similarity: how alike the scenes of a list are, see `make_list`
        extras: steps from one batch of changes and questions to the next; 0 for none. Unless it is 0, every
            eighth step has smaller pictures.
        composed: lists per batch of changes, with help for reading the reference; 0 for a single list that is
            as long as the others, without help
        composed_candidates: scenes per list of changes, unless `composed` is 0
        turns: every other step has only changes, to scenes with two small things
    """

    steps: int
    candidates: int
    queries: int
    lists: int
    similarity: float
    extras: int = 4
    composed: int = 0
    composed_candidates: int = 20
    turns: bool = False


@dataclass(frozen=True)
class Plan:
    """A plan of training.

    Args:
        seed: of the first weights and all data
        num_layers: of the decoder
        align_steps, align_scenes, align_lr: steps of stage A, scenes per step, learning rate
        phases: the steps of stage B
        lr: the learning rate of stage B
        absent_steps, absent_lr: steps of stage C, its learning rate
        start: a folder of trained weights, to do stage C alone; by default all stages are done
        fade_from, fade_to: the helper losses have full weight up to the first fraction of stage B, and none
            after the second
        validate_every: steps of stage B between two validations

    Example:
        >>> plan = Plan()
        >>> plan.steps, plan.phase_at(0).candidates, plan.helper_weight(plan.steps - 1)
        (4300, 4, 0.0)
    """

    seed: int = 0
    num_layers: int = 12
    align_steps: int = 700
    align_scenes: int = 64
    align_lr: float = 3e-3
    phases: tuple[Phase, ...] = (
        Phase(500, 4, 8, 6, 0.3, extras=0),
        Phase(250, 6, 8, 5, 0.5),
        Phase(250, 8, 10, 3, 0.6),
        Phase(300, 12, 14, 2, 0.7),
        Phase(100, 20, 20, 1, 0.7),
        Phase(350, 20, 20, 1, 0.7, extras=2, composed=3, composed_candidates=6),
        Phase(275, 20, 20, 1, 0.7, extras=3, composed=1),
        # When changes were trained in the same steps as lists, the model ignored the reference picture.
        Phase(400, 20, 20, 1, 0.7, extras=8, composed=4, composed_candidates=6, turns=True),
        Phase(475, 20, 20, 1, 0.7, extras=8, composed=1, turns=True),
    )
    lr: float = 2e-3
    absent_steps: int = 700
    absent_lr: float = 4e-4
    start: str | None = None
    fade_from: float = 0.85
    fade_to: float = 0.97
    validate_every: int = 100

    @property
    def ranking_steps(self) -> int:
        """The steps of stage B."""
        return sum(phase.steps for phase in self.phases)

    @property
    def steps(self) -> int:
        """All steps."""
        return self.absent_from + self.absent_steps

    @property
    def absent_from(self) -> int:
        """The first step of stage C."""
        return self.align_steps + self.ranking_steps

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Return the plan with these fields, as `dataclasses.asdict` or JSON gives them."""
        phases = {"phases": tuple(Phase(**phase) for phase in data["phases"])} if "phases" in data else {}
        return cls(**{**data, **phases})

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Plan:
        """Read a plan from a JSON file of the fields that differ from the default plan.

        Args:
            path: the file
            changes: fields that differ from the file
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")) | changes)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"cannot read the training plan {path}: {error}") from None

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step of stage B."""
        return phase_at(self.phases, step)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step. In each stage it rises, is constant, and falls by a cosine."""
        if step < self.align_steps:
            at, total, rate, flat, warm = step, self.align_steps, self.align_lr, 0.4, 30
        elif step >= self.absent_from:
            at, total, rate, flat, warm = step - self.absent_from, self.absent_steps, self.absent_lr, 0.3, 40
        else:
            at, total, rate, flat, warm = step - self.align_steps, self.ranking_steps, self.lr, 0.5, 50
        part = at / total
        if part > flat:
            rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (part - flat) / (1 - flat)))
        return rate * min(1.0, (at + 1) / warm)

    def helper_weight(self, step: int) -> float:
        """Return the weight of the helper losses at a step."""
        part = (step - self.align_steps) / max(1, self.ranking_steps)
        return min(1.0, max(0.0, (self.fade_to - part) / max(1e-9, self.fade_to - self.fade_from)))

    def agrees(self, other: Plan, steps: int) -> bool:
        """Return whether both plans have the same first steps: then one can go on where the other stopped."""
        fixed = ("seed", "num_layers", "align_steps", "align_scenes", "start")
        if any(getattr(self, name) != getattr(other, name) for name in fixed):
            return False

        def settings(plan: Plan, step: int) -> tuple[Any, ...]:
            if step < plan.align_steps or step >= plan.absent_from:
                return (plan.rate(step),)
            phase = replace(plan.phase_at(step - plan.align_steps), steps=0)
            return plan.rate(step), plan.helper_weight(step), phase

        return all(settings(self, step) == settings(other, step) for step in range(steps))
