"""The whole training as one seeded, resumable run.

All data of a step is drawn from the step's number, so a run that was killed and started again goes
through the same states as one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from radical_rerank.embedded.scenes.training.batches import OTHER_WORDS, WORDS
from radical_rerank.embedded.scenes.training.losses import (
    SHRINK,
    Helpers,
    Packer,
    alignment_batch,
    crowded_scene,
    draw_composed,
    draw_lists,
    draw_questions,
    optimizers,
    ranking_loss,
    rescale_tokens,
    word_ids,
)
from radical_rerank.embedded.scenes.training.model import make_config, make_model, make_tokenizer, save_model
from radical_rerank.errors import InputError
from radical_rerank.files import replacing


@dataclass(frozen=True)
class Phase:
    """Steps of stage B with lists of one length."""

    steps: int
    candidates: int
    queries: int
    lists: int
    similarity: float
    extras: int = 4
    """every so many steps changes to a reference and questions join, every eighth list is of small pictures;
    0 for neither"""
    composed: int = 0
    """if not 0, the changes are over this many lists of `composed_candidates`, and where to read the
    reference is shown; else over one list as long as the others"""
    composed_candidates: int = 20
    turns: bool = False
    """every other step is of changes alone, to scenes of two small things"""


@dataclass(frozen=True)
class Plan:
    """Everything that decides the outcome of a training."""

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
        # Beside lists, changes went on being answered by their words alone: they need steps of their own.
        Phase(400, 20, 20, 1, 0.7, extras=8, composed=4, composed_candidates=6, turns=True),
        Phase(475, 20, 20, 1, 0.7, extras=8, composed=1, turns=True),
    )
    lr: float = 2e-3
    fade_from: float = 0.85
    fade_to: float = 0.97
    """helpers weigh 1 up to the first fraction of stage B, nothing after the second"""
    validate_every: int = 100

    @property
    def ranking_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def steps(self) -> int:
        return self.align_steps + self.ranking_steps

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Plan:
        """From a JSON file of the fields that differ from the default plan."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8")) | changes
            if "phases" in data:
                data["phases"] = tuple(Phase(**phase) for phase in data["phases"])
            return cls(**data)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"cannot read the training plan {path}: {error}") from None

    def phase_at(self, step: int) -> Phase:
        """The phase of a step of stage B."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.phases[-1]

    def rate(self, step: int) -> float:
        """The learning rate: warm-up, constant, cosine, for each stage."""
        if step < self.align_steps:
            at, total, rate, flat, warm = step, self.align_steps, self.align_lr, 0.4, 30
        else:
            at, total, rate, flat, warm = step - self.align_steps, self.ranking_steps, self.lr, 0.5, 50
        part = at / total
        if part > flat:
            rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (part - flat) / (1 - flat)))
        return rate * min(1.0, (at + 1) / warm)

    def help(self, step: int) -> float:
        """The weight of the helpers."""
        part = (step - self.align_steps) / max(1, self.ranking_steps)
        return min(1.0, max(0.0, (self.fade_to - part) / max(1e-9, self.fade_to - self.fade_from)))

    def agrees(self, other: Plan, steps: int) -> bool:
        """Whether both would have done the same so far: then one may go on where the other stopped."""
        fixed = ("seed", "num_layers", "align_steps", "align_scenes")
        if any(getattr(self, name) != getattr(other, name) for name in fixed):
            return False

        def done(plan: Plan, step: int) -> tuple[Any, ...]:
            if step < plan.align_steps:
                return (plan.rate(step),)
            phase = replace(plan.phase_at(step - plan.align_steps), steps=0)
            return plan.rate(step), plan.help(step), phase

        return all(done(self, step) == done(other, step) for step in range(steps))


@dataclass
class Training:
    """The state of a run: model, optimizers, how far it is."""

    plan: Plan
    folder: Path
    step: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.model = make_model(make_config(self.tokenizer, num_layers=self.plan.num_layers), self.plan.seed)
        self.packer = Packer(self.model, self.tokenizer)
        self.words = word_ids(self.tokenizer, [*WORDS, *OTHER_WORDS])
        self.anchor: torch.Tensor | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stage_a()
        if self._checkpoint.is_file():
            self._resume()

    # One step.

    def advance(self) -> dict[str, float]:
        """Do the next step and say what it gave."""
        torch.manual_seed(self.plan.seed * 1_000_003 + self.step)
        if self.step == self.plan.align_steps and self.anchor is None:
            self._stage_b()
        aligning = self.step < self.plan.align_steps
        loss, facts = self._align() if aligning else self._rank()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in self.trained], 1.0)
        rate = self.plan.rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.step += 1
        return {"loss": loss.item(), **facts}

    def _align(self) -> tuple[torch.Tensor, dict[str, float]]:
        count = self.plan.align_scenes
        first = (self.plan.seed * 10_007 + self.step) * count
        return alignment_batch(
            self.model, self.tokenizer, [crowded_scene("train", first + i) for i in range(count)]
        )

    def _rank(self) -> tuple[torch.Tensor, dict[str, float]]:
        at = self.step - self.plan.align_steps
        phase = self.plan.phase_at(at)
        helpers = Helpers.at_depth(self.plan.num_layers, self.plan.help(self.step))
        seed, count = self.plan.seed * 1_000_003 + at, phase.candidates
        loss, facts = self._losses(phase, helpers, seed, at, count)
        assert self.anchor is not None
        # The words stay where the vision tower learned to find them.
        words = self.model.get_input_embeddings().weight[self.words]
        return loss + ((words - self.anchor) ** 2).sum(-1).mean(), facts

    def _losses(
        self, phase: Phase, helpers: Helpers, seed: int, at: int, count: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        many = phase.composed_candidates if phase.composed else count
        changes = partial(
            draw_composed, self.packer, self.model, "train", seed, count=many, queries=6, lists=phase.composed
        )
        if phase.turns and at % 2:
            return ranking_loss(self.model, changes(things=2), helpers)
        # Batches of a kind: a question padded to the length of a list would cost as much as one.
        batches = [
            draw_lists(
                self.packer,
                self.model,
                "train",
                seed,
                count=count,
                queries=phase.queries,
                lists=phase.lists,
                similarity=phase.similarity,
                factor=SHRINK[at // 8 % len(SHRINK)] if phase.extras and at % 8 == 6 else 1.0,
            )
        ]
        if phase.extras and at % phase.extras == 0:
            if not phase.turns:
                batches.append(changes())
            batches.append(draw_questions(self.packer, self.model, "train", seed, scenes=8))
        results = [ranking_loss(self.model, batch, helpers) for batch in batches]
        facts = {name: value for _, found in reversed(results) for name, value in found.items()}
        return torch.stack([loss for loss, _ in results]).sum(), facts

    def validate(self, lists: int = 6) -> float:
        """R@1 on validation lists as long as the current phase's."""
        at = max(0, self.step - self.plan.align_steps)
        phase = self.plan.phase_at(at)
        right = []
        without = Helpers.at_depth(self.plan.num_layers, 0)
        with torch.no_grad():
            for seed in range(lists):
                batch = draw_lists(
                    self.packer,
                    self.model,
                    "validation",
                    seed,
                    count=phase.candidates,
                    queries=8,
                    lists=1,
                    similarity=0.7,
                )
                right.append(ranking_loss(self.model, batch, without)[1]["list"])
        return sum(right) / len(right)

    # Stages.

    def _stage_a(self) -> None:
        self.trained = [
            (name, p)
            for name, p in self.model.named_parameters()
            if "visual" in name or "embed_tokens" in name
        ]
        self.optimizers = optimizers(self.trained, self.plan.align_lr)

    def _stage_b(self) -> None:
        rescale_tokens(self.model, [crowded_scene("train", i) for i in range(64)])
        self._freeze_vision()
        self.anchor = self.model.get_input_embeddings().weight.detach()[self.words].clone()

    def _freeze_vision(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("visual" not in name)
        self.trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizers = optimizers(self.trained, self.plan.lr)

    # Files.

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def log(self) -> Path:
        return self.folder / "training_log.jsonl"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "anchor": self.anchor,
        }
        with replacing(self._checkpoint, "wb") as file:
            torch.save(state, file)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        other = Plan(**{**state["plan"], "phases": tuple(Phase(**p) for p in state["plan"]["phases"])})
        if not self.plan.agrees(other, state["step"]):
            raise InputError(f"{self.folder} holds a training by another plan; choose another folder")
        self.step, self.anchor = state["step"], state["anchor"]
        if self.anchor is not None:
            self._freeze_vision()
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.log.is_file():  # steps after the checkpoint are done again
            lines = self.log.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < self.step]
            with replacing(self.log) as file:
                file.writelines(line + "\n" for line in kept)

    def finish(self) -> None:
        """Weights, tokenizer, image processor and prompt in Hugging Face format."""
        self.model.requires_grad_(True)
        save_model(self.folder, self.model, self.tokenizer)


def train(
    folder: str | Path,
    plan: Plan,
    *,
    save_every: int = 25,
    tell: Callable[[int, dict[str, float]], None] | None = None,
) -> Training:
    """Run the plan, or what is left of it, in `folder`. `tell` hears of every step."""
    training = Training(plan, Path(folder))
    for facts in _steps(training, save_every):
        if tell is not None:
            tell(training.step, facts)
    training.finish()
    return training


def _steps(training: Training, save_every: int) -> Iterator[dict[str, float]]:
    plan = training.plan
    while training.step < plan.steps:
        step, began = training.step, perf_counter()
        facts = training.advance()
        if step >= plan.align_steps and (training.step - plan.align_steps) % plan.validate_every == 0:
            facts["validation R@1"] = training.validate()
        facts["seconds"] = perf_counter() - began
        with training.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **{k: round(v, 5) for k, v in facts.items()}}) + "\n")
        if training.step % save_every == 0 or training.step == plan.steps:
            training.save()
        yield facts
