"""Seeded training that can be killed and started again. A subclass says what is trained, and on what."""

from __future__ import annotations

import copy
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from radical_rerank.embedded.muon import Muon
from radical_rerank.files import replacing
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking.prompt import TEMPLATE_FILE

log = logging.getLogger("radical_rerank")

Parameters = Sequence[tuple[str, nn.Parameter]]
"""(name, parameter) pairs"""


class Training(ABC):
    """The state of a training run: the model, its optimizers, and how many steps are done.

    A subclass sets `model`, `trained` and `optimizers`, and calls `resume` when it is ready. If it draws all
    data of a step from the step's number, a run that was killed goes through the same states as one that was
    not.

    Args:
        folder: of the checkpoint, the log and the finished model
        seed: of torch's random numbers, together with the step's number
        steps: how many steps there are
    """

    model: Any
    trained: Parameters
    optimizers: list[torch.optim.Optimizer]
    reported: ClassVar[Mapping[str, str]] = {"loss": "loss"}
    """facts of a step that are worth a message, and what to call them"""

    def __init__(self, folder: str | Path, *, seed: int, steps: int) -> None:
        self.folder, self.seed, self.steps, self.step = Path(folder), seed, steps, 0
        self.folder.mkdir(parents=True, exist_ok=True)

    # What a subclass defines.

    @abstractmethod
    def loss(self) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of step `self.step`, and facts for the log."""

    @abstractmethod
    def rate(self) -> float:
        """Return the learning rate of step `self.step`."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the step, the weights and the optimizers."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint, before its weights are loaded.

        Raises:
            InputError: it is of another run.
        """

    @abstractmethod
    def finish(self) -> None:
        """Write the finished model to the folder."""

    def validation(self) -> dict[str, float]:
        """Return what is measured on held-out data after the last step. By default nothing is."""
        return {}

    # One step.

    def advance(self) -> dict[str, float]:
        """Do the next step and return its facts."""
        torch.manual_seed(self.seed * 1_000_003 + self.step)
        loss, facts = self.loss()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_([parameter for _, parameter in self.trained], 1.0)
        rate = self.rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            optimizer.step()
        self.step += 1
        return {"loss": loss.item(), **facts}

    # All steps.

    def run(self, *, save_every: int = 25, log_every: int = 100, progress: Progress = silent) -> None:
        """Do all steps that are left, then write the model.

        Args:
            save_every: steps between two checkpoints
            log_every: steps between two messages
            progress: shows how far it is
        """
        latest: dict[str, float] = {}
        for step in progress(range(self.step, self.steps), "training"):
            began = perf_counter()
            facts = self.advance()
            facts |= self.validation()
            facts["seconds"] = perf_counter() - began
            self._write(step, facts)
            if self.step % save_every == 0 or self.step == self.steps:
                self.save()
            latest |= facts
            if self.step % log_every == 0 or self.step == self.steps:
                known = [(name, latest[fact]) for fact, name in self.reported.items() if fact in latest]
                shown = ", ".join(f"{name} {value:.3f}" for name, value in known)
                log.info("step %d of %d: %s", self.step, self.steps, shown)
        self.finish()

    # Files.

    @property
    def checkpoint(self) -> Path:
        """The file of the last checkpoint."""
        return self.folder / "checkpoint.pt"

    @property
    def log(self) -> Path:
        """The file of the log, a JSON line per step."""
        return self.folder / "training_log.jsonl"

    def _write(self, step: int, facts: dict[str, float]) -> None:
        rounded = {name: round(value, 5) for name, value in facts.items()}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **rounded}) + "\n")

    def save(self) -> None:
        """Write a checkpoint. A kill leaves the one before it."""
        state = {
            **self.state(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with replacing(self.checkpoint, "wb") as file:
            torch.save(state, file)

    def resume(self) -> None:
        """Load the checkpoint, if there is one. Steps after it are repeated: their log lines are removed."""
        if not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.restore(state)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.log.is_file():
            lines = self.log.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < self.step]
            with replacing(self.log) as file:
                file.writelines(line + "\n" for line in kept)


class HasSteps(Protocol):
    """A part of a plan with its number of steps."""

    @property
    def steps(self) -> int:
        """How many steps it has."""


P = TypeVar("P", bound=HasSteps)


def phase_at(phases: Sequence[P], step: int) -> P:
    """Return the phase of a step; after the last one, the last."""
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    return phases[-1]


def make_optimizers(parameters: Parameters, lr: float, *, tables: float = 1.0) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside layers, AdamW for embeddings, norms, biases and convolutions.

    tables: the rate of the embeddings, as a multiple of the others'
    """
    names = ("embed_tokens.weight", "pos_embed.weight")
    embedded = [p for name, p in parameters if name.endswith(names)]
    matrices = [p for name, p in parameters if p.ndim == 2 and not name.endswith(names)]
    others = [p for name, p in parameters if p.ndim != 2 and not name.endswith(names)]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": embedded, "scale": tables}]
    return [
        Muon(matrices, lr, weight_decay=0.01),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.97), weight_decay=0.0),
    ]


def save_model(
    folder: str | Path, model: Any, tokenizer: Any, image_processor: Any, template: Mapping[str, Any]
) -> None:
    """Write a model in Hugging Face format, its weights in half precision. The model itself is not changed.

    template: its prompt, see `PromptTemplate`
    """
    folder = Path(folder)
    copy.deepcopy(model).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    (folder / TEMPLATE_FILE).write_text(json.dumps(template, indent=1) + "\n", encoding="utf-8")
