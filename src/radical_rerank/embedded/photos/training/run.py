"""The training of the photos model: three stages, each of which can be killed and started again."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.packing import Packed, Placed, answer_loss, draw_identifiers, last_rows
from radical_rerank.embedded.photos import WORD_DIMS
from radical_rerank.embedded.photos.datasets import photo_lists
from radical_rerank.embedded.photos.training.alignment import (
    alignment_loss,
    encode_cells,
    recall,
    scores,
)
from radical_rerank.embedded.photos.training.decoder import in_decoder_units, start_decoder
from radical_rerank.embedded.photos.training.features import Features, Photo, load_split
from radical_rerank.embedded.photos.training.lists import Packer, draw_list
from radical_rerank.embedded.photos.training.model import (
    LEAST_WEIGHT,
    SPECIAL,
    TEMPLATE,
    class_embeddings,
    class_tokens,
    make_config,
    make_image_processor,
    make_model,
    make_tokenizer,
)
from radical_rerank.embedded.photos.training.plan import Plan
from radical_rerank.embedded.photos.training.sources import START, class_names, minilm_words
from radical_rerank.embedded.training import Training, make_optimizers, save_model
from radical_rerank.errors import InputError
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning.profile import PROFILE_FILE
from radical_rerank.reranking import calibrate
from radical_rerank.reranking.calibration import CALIBRATION_CANDIDATES, CALIBRATION_LISTS

log = logging.getLogger("radical_rerank")

STAGES = ("features", "alignment", "listwise")
NEAR = 60
"""how many of the pictures most alike to one a list draws from"""
CHUNK = 50
"""pictures that are encoded together when nothing is learned"""


def train(
    folder: str | Path,
    data: str | Path,
    plan: Plan,
    *,
    stages: Sequence[str] = STAGES,
    save_every: int = 25,
    progress: Progress = silent,
) -> Path:
    """Train a model by a plan, or do what is left of it. All data of a step is drawn from the step's number.

    Args:
        folder: of the run; an unfinished run in it goes on
        data: the folder of Flickr8k
        plan: what to do
        stages: which of "features", "alignment" and "listwise" to do
        save_every: steps between two checkpoints
        progress: shows how far it is

    Returns:
        The folder of the finished model, in Hugging Face format, or of the last stage.
    """
    folder = Path(folder)
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise InputError(f"unknown stage {unknown[0]!r}; choose from: {', '.join(STAGES)}")
    corpus = Corpus(data)
    if "features" in stages:
        make_features(folder, corpus, plan, progress)
    if "alignment" in stages:
        AlignmentTraining(folder, corpus, plan).run(save_every=save_every, progress=progress)
    if "listwise" in stages:
        ListwiseTraining(folder, corpus, plan, progress).run(save_every=save_every, progress=progress)
    return folder


class Corpus:
    """The photographs of the train split, their captions as token ids, and the words that they need.

    Args:
        data: the folder of Flickr8k
    """

    def __init__(self, data: str | Path) -> None:
        self.folder = data
        self.photos: list[Photo] = load_split(data, "train")
        texts = [text for photo in self.photos for text in photo.captions]
        self.words = minilm_words(WORD_DIMS, [*texts, *class_names()])
        self.tokenizer = make_tokenizer(self.words)
        self.classes = class_tokens(self.tokenizer)
        self.captions: list[list[list[int]]] = [self._ids(photo.captions) for photo in self.photos]
        self.usage = Counter(word for own in self.captions for words in own for word in dict.fromkeys(words))
        """in how many captions a word is, by its token"""

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        return ids

    def weights(self) -> list[float]:
        """Return how much each word says, from 0 to 1: the rarer it is in captions, the more.

        Punctuation says nothing.
        """
        total = 1 + sum(len(own) for own in self.captions)
        return [
            math.log(total / (1 + self.usage[len(SPECIAL) + row])) / math.log(total)
            if token.removeprefix("##").removeprefix(START).isalnum()
            else LEAST_WEIGHT
            for row, token in enumerate(self.words.tokens)
        ]

    def model(self, plan: Plan) -> Any:
        """Return a model with its first weights."""
        config = make_config(self.tokenizer, num_layers=plan.num_layers)
        return make_model(config, self.words, self.weights(), plan.seed)


def make_features(folder: Path, corpus: Corpus, plan: Plan, progress: Progress = silent) -> None:
    """Run the tower's convolutions over all views of all photographs. What exists is not made again."""
    cells = None
    for view in range(plan.views):
        features = Features(folder, view)
        if features.exist:
            continue
        cells = cells or corpus.model(plan).model.vision_tower.embeddings.patch_embeddings
        features.make(cells, corpus.photos, view, progress)


class PhotoTraining(Training):
    """What both stages of training share.

    Args:
        folder: of the run
        corpus: what it learns from
        plan: what to do
    """

    stage: ClassVar[str]

    def __init__(self, folder: Path, corpus: Corpus, plan: Plan, steps: int) -> None:
        super().__init__(folder / self.stage, seed=plan.seed, steps=steps)
        self.root, self.corpus, self.plan = folder, corpus, plan
        self.features = [Features(folder, view) for view in range(plan.views)]
        missing = next((f for f in self.features if not f.exist), None)
        if missing is not None:
            raise InputError(f"{missing.files[0]} does not exist: run the stage features first")
        self.model = corpus.model(plan)
        self.learned = range(len(corpus.photos) - plan.held_out)
        """the photographs that are trained on"""
        self.held_out = range(self.learned.stop, len(corpus.photos))

    def rng(self) -> np.random.Generator:
        """Return what draws the data of step `self.step`."""
        return np.random.default_rng((self.seed, STAGES.index(self.stage), self.step))

    def freeze_all_but(self, *parts: str) -> None:
        """Train the parameters whose names contain one of these, and no others."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))
        self.trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def names(self) -> Tensor:
        """Return the embeddings of the class names, as the word embeddings are now."""
        return class_embeddings(self.model.get_input_embeddings().weight, self.corpus.classes)

    def encoded(self, features: Features, rows: range) -> Tensor:
        """Return (rows, 1 + M, d) in half precision: the tokens of many photographs."""
        with torch.inference_mode():
            names = self.names()
            parts = [
                encode_cells(self.model, *features.read(rows[start : start + CHUNK]), names).half()
                for start in range(0, len(rows), CHUNK)
            ]
        return torch.cat(parts)

    def state(self) -> dict[str, Any]:
        """Return the plan, as far as it decides this stage."""
        return {"plan": self.decisive}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint of the same plan."""
        self.check_plan(state, self.decisive)

    @property
    def decisive(self) -> dict[str, Any]:
        """The fields of the plan that decide the outcome of this stage."""
        return asdict(self.plan)

    def check_plan(self, state: dict[str, Any], plan: dict[str, Any]) -> None:
        """Raise an InputError if a checkpoint is of another plan."""
        if state["plan"] != plan:
            raise InputError(f"{self.root} holds a training by another plan; choose another folder")


class AlignmentTraining(PhotoTraining):
    """The second stage: the tower behind its convolutions, and the word embeddings.

    The class names move with their words.
    """

    stage = "alignment"
    reported: ClassVar[Mapping[str, str]] = {
        fact: fact for fact in ("loss", "late", "pooled", "held-out R@1", "held-out R@20")
    }

    def __init__(self, folder: Path, corpus: Corpus, plan: Plan) -> None:
        super().__init__(folder, corpus, plan, plan.align_steps)
        self.freeze_all_but("patch_embeddings.project", "cls_token", "encoder.layer", "embed_tokens")
        self.optimizers = make_optimizers(self.trained, plan.align_lr, tables=plan.word_lr)
        self.resume()

    @property
    def decisive(self) -> dict[str, Any]:
        """The fields of the plan that decide the outcome of the alignment."""
        return self.plan.of_alignment()

    def rate(self) -> float:
        """Return the learning rate of the step."""
        return self.plan.align_rate(self.step)

    def loss(self) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one view of some photographs, with all their captions."""
        rng = self.rng()
        rows = np.sort(rng.permutation(len(self.learned))[: self.plan.align_pictures])
        features = self.features[int(rng.integers(self.plan.views))]
        queries = [(words, place) for place, row in enumerate(rows) for words in self.corpus.captions[row]]
        owner = torch.tensor([place for _, place in queries])
        tokens = encode_cells(self.model, *features.read(rows), self.names())
        return alignment_loss(self.model, tokens, [words for words, _ in queries], owner)

    def validation(self) -> dict[str, float]:
        """Return the recall of the first stage among held-out photographs, after the last step."""
        if self.step < self.steps or not self.held_out:
            return {}
        captions = [self.corpus.captions[row][0] for row in self.held_out]
        with torch.inference_mode():
            tokens = self.encoded(self.features[0], self.held_out).float()
            late, pooled = scores(self.model, tokens, captions)
        figures = {f"held-out {name}": value for name, value in recall(pooled, (1, 20)).items()}
        return figures | {f"held-out late {name}": value for name, value in recall(late, (1, 20)).items()}

    def finish(self) -> None:
        """Write nothing more: the next stage starts from the checkpoint."""


class ListwiseTraining(PhotoTraining):
    """The third stage: the decoder. Vision and word embeddings stay as they are."""

    stage = "listwise"
    reported: ClassVar[Mapping[str, str]] = {"loss": "loss", "list": "R@1"}

    def __init__(self, folder: Path, corpus: Corpus, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(folder, corpus, plan, plan.steps)
        self.packer = Packer(corpus.tokenizer)
        self._load_alignment()
        self.rows = self.held_out if self.held_out and not self.steps else range(len(corpus.photos))
        """the photographs whose visual tokens are needed: without steps, those for the figures alone"""
        self.tokens, self.near = self._encode(progress)
        self.freeze_all_but("language_model.layers", "language_model.norm")
        self.optimizers = make_optimizers(self.trained, plan.lr)
        self.resume()

    def _load_alignment(self) -> None:
        path = self.root / "alignment" / "checkpoint.pt"
        state = torch.load(path, weights_only=True) if path.is_file() else {"step": 0}
        if state["step"] < self.plan.align_steps:
            raise InputError(f"{path} is not finished: run the stage alignment first")
        self.check_plan(state, self.plan.of_alignment())
        self.model.load_state_dict(state["model"])
        self.model.tie_weights()
        with torch.no_grad():
            self.model.model.vision_tower.embeddings.patch_embeddings.names.weight.copy_(self.names())

    def _encode(self, progress: Progress) -> tuple[list[Tensor], Tensor]:
        """Return the visual tokens of all views, and what is alike; start the decoder.

        Everything is computed from the alignment's checkpoint, so a run that goes on has the same.
        """
        needed = self.features if self.steps else self.features[:1]
        encoded = [self.encoded(features, self.rows) for features in progress(needed, "visual tokens")]
        captions = [self.corpus.captions[row][0] for row in self.rows]
        pooled = scores(self.model, encoded[0][:, :1].float().repeat(1, 3, 1), captions)[1].detach()
        held_out = torch.tensor([row in self.held_out for row in self.rows])
        pooled[held_out[:, None] != held_out] = -torch.inf  # a list holds photographs of one kind
        kinds = [int(count) for count in held_out.long().bincount() if count]
        near = pooled.topk(min(NEAR, *kinds), dim=1).indices
        norm = float(encoded[0][:100, 1:].float().norm(dim=-1).mean())
        usage = torch.zeros(len(self.corpus.tokenizer))
        for word, count in self.corpus.usage.items():
            usage[word] = count
        torch.manual_seed(self.seed)
        start_decoder(self.model, self.corpus.tokenizer, usage, norm)
        return [in_decoder_units(part[:, 1:].float(), norm).half() for part in encoded], near

    def rate(self) -> float:
        """Return the learning rate of the step."""
        return self.plan.rate(self.step)

    def loss(self) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a list with several queries."""
        rng, phase = self.rng(), self.plan.phase_at(self.step)
        pictures, queries = draw_list(
            rng,
            self.near[: len(self.learned)],
            self.corpus.captions,
            count=phase.candidates,
            alike=phase.alike,
            queries=phase.queries,
        )
        names = draw_identifiers(rng, self.packer.letters, phase.candidates)
        tokens = self.tokens[int(rng.integers(self.plan.views))][pictures]
        return answer_loss(*self.logits(self.packer.pack(pictures, names, queries), tokens))

    def logits(self, prompt: Packed, tokens: Tensor) -> tuple[Tensor, list[Placed]]:
        """Return the logits of the answers to a packed prompt, and its queries.

        tokens: (pictures, M, d) the visual tokens of its pictures
        """
        ids, positions, mask, asks = self.packer.rows([prompt])
        embeds = self.model.get_input_embeddings()(ids)
        embeds = embeds.masked_scatter((ids == self.packer.image)[..., None], tokens.to(embeds.dtype))
        states = self.model.model.language_model(
            inputs_embeds=embeds, position_ids=positions[0], attention_mask=mask, use_cache=False
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(last_rows(states, asks))
        return logits, asks

    def held_out_figures(self, count: int = CANDIDATES) -> dict[str, float]:
        """Return MRR@10 on lists of held-out photographs: drawn at random, and what the first stage finds."""
        count = min(count, len(self.held_out))
        places = np.array(self.held_out) - self.rows.start
        own = np.random.default_rng(self.seed).permutation(places).tolist()
        shuffled = [own[start : start + count] for start in range(0, len(own), count)]
        drawn = [(pictures, pictures) for pictures in shuffled if len(pictures) == count]
        alike = [(self.near[place, :count].tolist(), [place]) for place in own[: 10 * count]]
        pools = [(pictures, asked) for pictures, asked in alike if asked[0] in pictures]
        found = [pictures.index(asked[0]) for pictures, asked in pools]
        return {
            "held-out MRR@10": self._mrr(drawn),
            "held-out MRR@10, pools": self._mrr(pools),
            "held-out MRR@10, pools, the first stage's own": _mean_gain(found),
        }

    @torch.inference_mode()
    def _mrr(self, lists: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        """Return MRR@10. lists: the photographs of each, and those whose first captions are the queries"""
        found: list[int] = []
        for pictures, asked in lists:
            names = self.packer.letters[: len(pictures)]
            queries = [(self.corpus.captions[self.rows[n]][0], pictures.index(n)) for n in asked]
            logits, _ = self.logits(self.packer.pack(pictures, names, queries), self.tokens[0][pictures])
            among = logits[:, names]
            own = among.gather(1, torch.tensor([[place] for _, place in queries]))
            found += (among > own).sum(dim=1).tolist()
        return _mean_gain(found)

    def finish(self) -> None:
        """Write the model in Hugging Face format, with its trust profile and the logs of both stages."""
        figures = self.held_out_figures() if self.held_out else {}
        if figures:
            log.info("held-out photographs: %s", ", ".join(f"{k} {v:.3f}" for k, v in figures.items()))
        folder = self.root / "model"
        self.model.requires_grad_(True)
        save_model(folder, self.model, self.corpus.tokenizer, make_image_processor(), TEMPLATE)
        logs = {stage: self.root / stage / self.log.name for stage in ("alignment", "listwise")}
        lines = [
            json.dumps({"stage": stage, **json.loads(line)}) + "\n"
            for stage, path in logs.items()
            if path.is_file()
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        lines.append(json.dumps({"stage": self.stage, "step": self.steps, **figures}) + "\n")
        (folder / self.log.name).write_text("".join(lines), encoding="utf-8")
        count = min(CALIBRATION_CANDIDATES, len(self.corpus.photos))
        lists = photo_lists(self.corpus.folder, lists=CALIBRATION_LISTS, count=count, split="train")
        asked = [(task.text, [lists.picture(name) for name in task.candidates or ()]) for task in lists.tasks]
        profile = calibrate(Backbone.from_pretrained(folder), asked)
        replace(profile, model="photos").save(folder / PROFILE_FILE)


def _mean_gain(ranks: Sequence[int]) -> float:
    """Return MRR@10 of ranks that count from 0."""
    return sum(1 / (rank + 1) for rank in ranks if rank < 10) / max(1, len(ranks))
