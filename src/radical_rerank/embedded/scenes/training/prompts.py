"""Stage B's data: lists, composed lists and questions as packed prompts, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image

from radical_rerank.embedded.packing import Ask, Packed, PhraseTarget, draw_identifiers
from radical_rerank.embedded.scenes.drawing import Scene, render, shrink
from radical_rerank.embedded.scenes.lists import (
    Composed,
    SceneList,
    SceneQuestion,
    make_composed,
    make_list,
    make_questions,
    stream,
)
from radical_rerank.embedded.scenes.training.batches import (
    Batch,
    collate,
    encode_images,
    phrase_end,
    shown_by,
)
from radical_rerank.embedded.scenes.training.model import NONE, word_ids
from radical_rerank.embedded.scenes.world import COLOURS, Phrase
from radical_rerank.reranking.prompt import IDENTIFIERS


class Packer:
    """Turns lists, composed lists and questions into packed prompts.

    Args:
        model, tokenizer: of the scenes model
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.image = model.config.image_token_id
        token = tokenizer.convert_tokens_to_ids
        self.open, self.close = token("<|vision_start|>"), token("<|vision_end|>")
        self.letters = [token(letter) for letter in IDENTIFIERS]
        self.reference = token("reference")
        (self.none,) = self.encode(NONE)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _ask(self, ids: list[int], kind: str, target: int, names: Sequence[int], *, none: bool) -> Ask:
        """Return a query whose answer is the identifier of its target, or that nothing matches."""
        choices = [*names, self.none] if none else list(names)
        if target < 0:
            return Ask(ids, self.none, choices, kind="none")
        return Ask(ids, names[target], choices, kind=kind)

    def _look(
        self,
        row: int,
        phrases: Sequence[Phrase],
        scenes: Sequence[Scene],
        shown: Sequence[np.ndarray],
        starts: Sequence[int],
        names: Sequence[int],
    ) -> PhraseTarget:
        """Return what phrases should look at.

        row: where the phrases end
        shown, starts, names: per scene, which cells show which thing, its first visual token, its identifier
            or -1
        """
        tokens: list[int] = []
        has: list[int] = []
        for scene, cells, start, name in zip(scenes, shown, starts, names, strict=True):
            hits = [i for i, thing in enumerate(scene.things) if any(p.fits(thing) for p in phrases)]
            tokens += [start + int(cell) for cell in np.flatnonzero(cells[hits].any(0))]
            if name >= 0 and all(any(p.fits(thing) for thing in scene.things) for p in phrases):
                has.append(name)
        words = [word for phrase in phrases for word in phrase.words()]
        return PhraseTarget(row, tokens, has, word_ids(self.tokenizer, words).tolist())

    def pack_list(
        self, item: SceneList, first_image: int, rng: np.random.Generator, *, none: bool = False
    ) -> Packed:
        """Pack a list with all its descriptions.

        first_image: the number of its first image in the batch
        none: the answer may be that nothing matches
        """
        names = draw_identifiers(rng, self.letters, len(item.scenes))
        covers = [cover for _, cover in item.rendered]
        sizes = [cover[0].size for cover in covers]
        shown, starts = [shown_by(cover) for cover in covers], [0, *accumulate(sizes)][:-1]
        ids: list[int] = []
        for name, size in zip(names, sizes, strict=True):
            ids += [name, self.open, *[self.image] * size, self.close]
        asks = []
        for description, target in zip(item.descriptions, item.targets, strict=True):
            words = description.text().split()
            asked = self.encode(f"query: {description.text()} answer:")
            ask = self._ask(asked, "list", target, names, none=none)
            start = 0
            for phrase in description.phrases:
                start = phrase_end(words, phrase, start)
                ask.looks.append(self._look(2 + start, [phrase], item.scenes, shown, starts, names))
                start += 1
            asks.append(ask)
        return Packed(ids, list(range(first_image, first_image + len(names))), names, asks)

    def pack_composed(
        self,
        item: Composed,
        first_image: int,
        rng: np.random.Generator,
        *,
        guided: bool = False,
        none: bool = False,
    ) -> Packed:
        """Pack a composed list with all its changes.

        first_image: the number of its first image in the batch
        guided: teach where the reference shows what stays
        none: the answer may be that nothing matches
        """
        names = draw_identifiers(rng, self.letters, len(item.scenes))
        covers = [cover for _, cover in item.rendered]
        sizes = [cover[0].size for cover in covers]
        ids = [self.reference, self.open, *[self.image] * sizes[0], self.close]
        for name, size in zip(names, sizes[1:], strict=True):
            ids += [name, self.open, *[self.image] * size, self.close]
        shown, starts = [shown_by(cover) for cover in covers[1:]], list(accumulate(sizes))[:-1]
        seen = shown_by(covers[0])
        asks = []
        for change in item.changes:
            words = change.text.split()
            asked = self.encode(f"change: {change.text} answer:")
            ask = self._ask(asked, "composed", change.target, names, none=none)
            # The new colour's row looks for what is new, the row of "instead" for what stays.
            for word, phrases in ((change.new.colour or "", [change.new]), ("instead", change.kept)):
                row = 2 + words.index(word)
                ask.looks.append(self._look(row, phrases, item.scenes, shown, starts, names))
            if guided:
                ask.reads.append(self._look(row, change.kept, [item.reference], [seen], [0], [-1]))
            asks.append(ask)
        images = list(range(first_image, first_image + 1 + len(names)))
        return Packed(ids, images, [-1, *names], asks)

    def pack_questions(self, items: Sequence[SceneQuestion], cover: np.ndarray, first_image: int) -> Packed:
        """Pack questions about one scene. cover: of its picture, see `render`"""
        ids = [self.open, *[self.image] * cover[0].size, self.close]
        yes_no = word_ids(self.tokenizer, ["yes", "no"]).tolist()
        colours = word_ids(self.tokenizer, COLOURS).tolist()
        shown = shown_by(cover)
        asks = []
        for item in items:
            kind = "yes-no" if item.answer in ("yes", "no") else "colour"
            answer = int(word_ids(self.tokenizer, [item.answer])[0])
            ask = Ask(
                self.encode(f"question: {item.text} answer:"),
                answer,
                yes_no if kind == "yes-no" else colours,
                kind=kind,
            )
            row = 2 + item.text.split().index(item.phrase.words()[-1])
            ask.looks.append(self._look(row, [item.phrase], [item.scene], [shown], [0], [-1]))
            asks.append(ask)
        return Packed(ids, [first_image], [-1], asks)


def draw_lists(
    packer: Packer,
    model: Any,
    split: str,
    seed: int,
    *,
    count: int,
    queries: int,
    lists: int,
    similarity: float,
    factor: float = 1.0,
    hidden: int = 0,
) -> Batch:
    """Draw a batch of lists.

    Args:
        packer, model: of the training
        split: "train" or "validation"
        seed: the same seed gives the same batch
        count: scenes per list
        queries: queries per list
        lists: how many lists
        similarity: how alike the scenes are, see `make_list`
        factor: scales the sides of the pictures
        hidden: how many more scenes a list has that are not shown: nothing matches their descriptions, and
            the answer may be that
    """
    rng = stream(split, 7, seed)
    items = [
        make_list(split, seed * 64 + part, count + hidden, queries=queries, similarity=similarity)
        for part in range(lists)
    ]
    if hidden:
        items = [item.without(rng.permutation(count + hidden)[:hidden].tolist()) for item in items]
    if factor < 1:
        for item in items:
            item.rendered[:] = [shrink(*picture, factor) for picture in item.rendered]
    prompts = [packer.pack_list(item, part * count, rng, none=hidden > 0) for part, item in enumerate(items)]
    return _collated(model, prompts, [image for item in items for image in item.images])


def draw_composed(
    packer: Packer,
    model: Any,
    split: str,
    seed: int,
    *,
    count: int,
    queries: int,
    lists: int = 0,
    things: int | None = None,
    hidden: int = 0,
) -> Batch:
    """Draw a batch of composed lists.

    Args:
        packer, model: of the training
        split: "train" or "validation"
        seed: the same seed gives the same batch
        count: scenes per list
        queries: changes per list
        lists: how many lists, guided; 0 for a single one, not guided
        things: small things per scene, see `make_composed`
        hidden: as in `draw_lists`
    """
    rng = stream(split, 8, seed)
    items = [
        make_composed(split, seed + part * 10_000_000, count + hidden, queries=queries, things=things)
        for part in range(lists or 1)
    ]
    if hidden:
        items = [item.without(rng.permutation(count + hidden)[:hidden].tolist()) for item in items]
    prompts = [
        packer.pack_composed(item, part * (count + 1), rng, guided=bool(lists), none=hidden > 0)
        for part, item in enumerate(items)
    ]
    return _collated(model, prompts, [image for item in items for image, _ in item.rendered])


def draw_questions(packer: Packer, model: Any, split: str, seed: int, *, scenes: int) -> Batch:
    """Draw a batch of questions, six about each scene. scenes: how many scenes"""
    prompts: list[Packed] = []
    images: list[Image.Image] = []
    for part in range(scenes):
        questions = make_questions(split, seed * scenes + part, 6)
        image, cover = render(questions[0].scene)
        prompts.append(packer.pack_questions(questions, cover, part))
        images.append(image)
    return _collated(model, prompts, images)


def _collated(model: Any, prompts: Sequence[Packed], images: Sequence[Image.Image]) -> Batch:
    with torch.no_grad():
        return collate(model, prompts, *encode_images(model, images))
