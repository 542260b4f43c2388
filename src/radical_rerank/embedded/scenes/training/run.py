"""The training of the scenes model as one seeded run that can be killed and started again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from radical_rerank.embedded.packing import last_rows
from radical_rerank.embedded.scenes.training.alignment import alignment_batch, crowded_scene, rescale_tokens
from radical_rerank.embedded.scenes.training.batches import OTHER_WORDS, SHRINK, Batch
from radical_rerank.embedded.scenes.training.losses import Helpers, forward, ranking_loss
from radical_rerank.embedded.scenes.training.model import (
    TEMPLATE,
    make_config,
    make_image_processor,
    make_model,
    make_tokenizer,
    word_ids,
)
from radical_rerank.embedded.scenes.training.plan import Phase, Plan
from radical_rerank.embedded.scenes.training.prompts import Packer, draw_composed, draw_lists, draw_questions
from radical_rerank.embedded.scenes.world import ATTRIBUTE_WORDS
from radical_rerank.embedded.training import Training, make_optimizers, save_model
from radical_rerank.errors import InputError
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking.scores import auroc

VALIDATION_LISTS = 6
"""lists per validation, with eight queries each"""
GAP_QUERIES, HIDDEN = 28, 14
"""stage C: queries per list, and how many scenes a list lacks that they ask for"""
HIDDEN_CHANGES = 8
"""the same of a list of changes"""


def train(
    folder: str | Path, plan: Plan, *, save_every: int = 25, progress: Progress = silent
) -> SceneTraining:
    """Train a model by a plan, or do what is left of it. All data of a step is drawn from the step's number.

    Args:
        folder: of the run; an unfinished run in it goes on
        plan: what to do
        save_every: steps between two checkpoints
        progress: shows how far it is

    Returns:
        The finished run. Its folder holds the model in Hugging Face format.

    Example:
        >>> import tempfile
        >>> phase = Phase(steps=1, candidates=3, queries=2, lists=1, similarity=0.3, extras=0)
        >>> plan = Plan(num_layers=8, align_steps=1, align_scenes=2, phases=(phase,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = train(folder, plan)
        ...     run.step, (run.folder / "model.safetensors").is_file()
        (2, True)
    """
    training = SceneTraining(plan, folder)
    training.run(save_every=save_every, progress=progress)
    return training


class SceneTraining(Training):
    """The state of a run.

    Args:
        plan: what to do
        folder: of the run; an unfinished run in it goes on
    """

    reported: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "list": "R@1",
        "validation R@1": "validation R@1",
        "validation AUROC": "AUROC of a match",
    }

    def __init__(self, plan: Plan, folder: str | Path) -> None:
        super().__init__(folder, seed=plan.seed, steps=plan.steps)
        self.plan = plan
        self.tokenizer = make_tokenizer()
        self.model = make_model(make_config(self.tokenizer, num_layers=plan.num_layers), plan.seed)
        self.packer = Packer(self.model, self.tokenizer)
        self.words = word_ids(self.tokenizer, [*ATTRIBUTE_WORDS, *OTHER_WORDS])
        self.anchor: Tensor | None = None
        self._start_stage_a()
        self.resume()
        if plan.start is not None and not self.step:
            self._start_from(plan.start)

    # One step.

    def rate(self) -> float:
        """Return the learning rate of the step."""
        return self.plan.rate(self.step)

    def loss(self) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of the step, and facts for the log."""
        if self.step < self.plan.align_steps:
            return self._alignment_loss()
        if self.anchor is None:
            self._start_stage_b()
        if self.step < self.plan.absent_from:
            return self._ranking_loss()
        if self.step == self.plan.absent_from:
            self._start_stage_c()
        return self._absence_loss()

    def _alignment_loss(self) -> tuple[Tensor, dict[str, float]]:
        count = self.plan.align_scenes
        first = (self.plan.seed * 10_007 + self.step) * count
        scenes = [crowded_scene("train", first + i) for i in range(count)]
        return alignment_batch(self.model, self.tokenizer, scenes)

    def _ranking_loss(self) -> tuple[Tensor, dict[str, float]]:
        at = self.step - self.plan.align_steps
        helpers = Helpers.at_depth(self.plan.num_layers, self.plan.helper_weight(self.step))
        loss, facts = self._batch_losses(self.plan.phase_at(at), helpers, at)
        assert self.anchor is not None
        return loss + self._moved(), facts

    def _moved(self) -> Tensor:
        """Return how far words are from where the vision encoder learned to find them."""
        words = self.model.get_input_embeddings().weight[self.words]
        moved: Tensor = ((words - self.anchor) ** 2).sum(-1).mean()
        return moved

    def _absence_loss(self) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of lists that lack some of the scenes that are asked for."""
        at = self.step - self.plan.absent_from
        seed = self.plan.seed * 1_000_003 + self.plan.ranking_steps + at
        without = Helpers.at_depth(self.plan.num_layers, 0)
        batches = [self._lists_with_gaps("train", seed)]
        if at % 4 == 1:
            batches.append(draw_questions(self.packer, self.model, "train", seed, scenes=8))
        elif at % 4 == 3:
            batches.append(
                draw_composed(
                    self.packer,
                    self.model,
                    "train",
                    seed,
                    count=20,
                    queries=9,
                    things=2,
                    hidden=HIDDEN_CHANGES,
                )
            )
        results = [ranking_loss(self.model, batch, without) for batch in batches]
        facts = {name: value for _, own in reversed(results) for name, value in own.items()}
        return torch.stack([loss for loss, _ in results]).sum() + self._moved(), facts

    def _lists_with_gaps(self, split: str, seed: int) -> Batch:
        return draw_lists(
            self.packer,
            self.model,
            split,
            seed,
            count=20,
            queries=GAP_QUERIES,
            lists=1,
            similarity=0.7,
            hidden=HIDDEN,
        )

    def _batch_losses(self, phase: Phase, helpers: Helpers, at: int) -> tuple[Tensor, dict[str, float]]:
        seed = self.plan.seed * 1_000_003 + at
        changes = partial(
            draw_composed,
            self.packer,
            self.model,
            "train",
            seed,
            count=phase.composed_candidates if phase.composed else phase.candidates,
            queries=6,
            lists=phase.composed,
        )
        if phase.turns and at % 2:
            return ranking_loss(self.model, changes(things=2), helpers)
        # Each batch has prompts of one kind: a question padded to the length of a list would cost as much.
        batches = [
            draw_lists(
                self.packer,
                self.model,
                "train",
                seed,
                count=phase.candidates,
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
        facts = {name: value for _, own in reversed(results) for name, value in own.items()}
        return torch.stack([loss for loss, _ in results]).sum(), facts

    def validation(self) -> dict[str, float]:
        """Return R@1 on lists of the validation split as long as the current phase's, when it is due.

        In stage C also how well the model tells lists with a match from those without.
        """
        if self.step > self.plan.absent_from:
            return self._absence_validation()
        at = self.step - self.plan.align_steps
        if at <= 0 or at % self.plan.validate_every:
            return {}
        without = Helpers.at_depth(self.plan.num_layers, 0)
        count, right = self.plan.phase_at(at).candidates, []
        with torch.no_grad():
            for seed in range(VALIDATION_LISTS):
                batch = draw_lists(
                    self.packer,
                    self.model,
                    "validation",
                    seed,
                    count=count,
                    queries=8,
                    lists=1,
                    similarity=0.7,
                )
                right.append(ranking_loss(self.model, batch, without)[1]["list"])
        return {"validation R@1": sum(right) / len(right)}

    def _absence_validation(self) -> dict[str, float]:
        if self.step % self.plan.validate_every and self.step != self.plan.steps:
            return {}
        right, odds, held = [], [], []
        with torch.no_grad():
            for seed in range(VALIDATION_LISTS):
                batch = self._lists_with_gaps("validation", seed)
                logits = self.model.lm_head(last_rows(forward(self.model, batch)[-1], batch.asks))
                for row, (_, _, ask) in enumerate(batch.asks):
                    names = logits[row, ask.choices[:-1]]
                    odds.append(float(names.logsumexp(-1) - logits[row, ask.choices[-1]]))
                    held.append(ask.kind == "list")
                    if held[-1]:
                        right.append(float(ask.choices[int(names.argmax())] == ask.answer))
        return {"validation R@1": sum(right) / len(right), "validation AUROC": auroc(odds, held)}

    # Stages.

    def _start_stage_a(self) -> None:
        self.trained = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if "visual" in name or "embed_tokens" in name
        ]
        self.optimizers = make_optimizers(self.trained, self.plan.align_lr)

    def _start_stage_b(self) -> None:
        rescale_tokens(self.model, [crowded_scene("train", i) for i in range(64)])
        self._freeze_vision()
        self.anchor = self.model.get_input_embeddings().weight.detach()[self.words].clone()

    def _start_stage_c(self) -> None:
        self._freeze_vision()  # with new optimizers: their memory is of other steps

    def _start_from(self, folder: str) -> None:
        """Take over the weights of a trained model, and begin with stage C."""
        from safetensors.torch import load_file

        state = {
            name: tensor.float() for name, tensor in load_file(Path(folder) / "model.safetensors").items()
        }
        missing, unknown = self.model.load_state_dict(state, strict=False)
        if unknown or set(missing) - {"lm_head.weight"}:
            raise InputError(f"{folder} holds another model: {(unknown or missing)[0]} does not fit")
        self.model.tie_weights()
        self.anchor = self.model.get_input_embeddings().weight.detach()[self.words].clone()
        self.step = self.plan.absent_from

    def _freeze_vision(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("visual" not in name)
        self.trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizers = make_optimizers(self.trained, self.plan.lr)

    # Files.

    def state(self) -> dict[str, Any]:
        """Return the plan, and where the words were at the end of stage A."""
        return {"plan": asdict(self.plan), "anchor": self.anchor}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint of a plan that has the same steps so far."""
        if not self.plan.agrees(Plan.from_dict(state["plan"]), state["step"]):
            raise InputError(f"{self.folder} holds a training by another plan; choose another folder")
        self.anchor = state["anchor"]
        if self.anchor is not None:
            self._freeze_vision()

    def finish(self) -> None:
        """Write weights, tokenizer, image processor and prompt in Hugging Face format."""
        self.model.requires_grad_(True)
        save_model(self.folder, self.model, self.tokenizer, make_image_processor(), TEMPLATE)
