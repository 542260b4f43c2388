"""Training the embedded model from scratch, on two CPU cores.

Stage A teaches the vision tower to write what a cell shows in the space of the words. Stage B freezes it
and teaches the decoder to rank: cross-entropy among the identifiers, with helper losses that show it
where to look and fade out towards the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from radical_rerank.backbones.view import project
from radical_rerank.embedded.muon import Muon
from radical_rerank.embedded.scenes.drawing import Scene, random_background, render, shrink
from radical_rerank.embedded.scenes.lists import (
    Composed,
    SceneList,
    SceneQuestion,
    compose_scene,
    make_composed,
    make_list,
    make_questions,
    place_things,
    stream,
)
from radical_rerank.embedded.scenes.training.batches import (
    GROUPS,
    OTHER_WORDS,
    WORDS,
    Ask,
    Batch,
    Packed,
    collate,
    encode_images,
    label_cells,
    phrase_end,
    shown_by,
)
from radical_rerank.embedded.scenes.training.model import MARK
from radical_rerank.embedded.scenes.world import COLOURS, SHAPES, Phrase, Thing
from radical_rerank.reranking.prompt import IDENTIFIERS

TOKEN_NORM = 1.5
SHRINK = (0.5, 0.6, 0.7, 0.8)


# Stage A: what a cell shows.


def crowded_scene(split: str, seed: int) -> Scene:
    """Many small things and perhaps a large one: much to learn from one picture."""
    rng = stream(split, 9, seed)
    large = []
    if rng.random() < 0.6:
        slot = (int(rng.integers(3)), int(rng.integers(3)))
        large = [Thing(str(rng.choice(SHAPES)), str(rng.choice(COLOURS)), "large", slot)]
    small = [
        Thing(str(rng.choice(SHAPES)), str(rng.choice(COLOURS)), "small", (0, 0))
        for _ in range(int(rng.integers(4, 9)))
    ]
    return compose_scene(
        rng, split, place_things(rng, large, small, same_layout=True), random_background(rng)
    )


def word_ids(tokenizer: Any, words: Sequence[str]) -> Tensor:
    return torch.tensor([tokenizer.convert_tokens_to_ids(MARK + word) for word in words])


def alignment_loss(
    tokens: Tensor, embedding: Tensor, labels: Tensor, dominant: Tensor, kinds: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """tokens (M, d), embedding (words, d), labels (M, words) in {1, 0, -1}, dominant (M,), kinds (M, 3): the
    colour, shape and size number of the dominant thing.

    Words that a cell shows are pulled to a cosine of 0.42 (five orthogonal words can share 0.447 each);
    words that it does not show to just above 0: relevance is max(cos, 0), and must stay alive.
    """
    cosine = normalize(tokens, dim=-1) @ normalize(embedding, dim=-1).T
    shown, absent = labels == 1, labels == 0
    positive = ((0.42 - cosine[shown]).clamp(min=0) ** 2).mean()
    negative = ((cosine[absent] - 0.04) ** 2).mean()
    has = dominant >= 0
    loss = 4 * positive + 6 * negative
    facts = {}
    for column, (name, group) in enumerate(GROUPS.items()):
        logits = 12 * cosine[has][:, group]
        loss = loss + cross_entropy(logits, kinds[has, column])
        facts[name] = float((logits.argmax(-1) == kinds[has, column]).float().mean())
    return loss, facts


def alignment_batch(model: Any, tokenizer: Any, scenes: Sequence[Scene]) -> tuple[Tensor, dict[str, float]]:
    """Every eighth picture is shown at a lower resolution, so that the tower reads small pictures too."""
    pictures = [render(scene) for scene in scenes]
    for number in range(0, len(pictures), 8):
        pictures[number] = shrink(*pictures[number], SHRINK[number // 8 % len(SHRINK)])
    tokens, _, _ = encode_images(model, [image for image, _ in pictures])
    labels, dominant, kinds = [], [], []
    for scene, (_, cover) in zip(scenes, pictures, strict=True):
        cells = label_cells(scene.things, cover)
        labels.append(cells.words)
        dominant.append(cells.dominant)
        numbers = torch.tensor(
            [(COLOURS.index(t.colour), SHAPES.index(t.shape), int(t.size == "large")) for t in scene.things]
        )
        kinds.append(numbers[cells.dominant.clamp(min=0)])
    embedding = model.get_input_embeddings()(word_ids(tokenizer, [*WORDS, *OTHER_WORDS]))
    shown = torch.nn.functional.pad(torch.cat(labels), (0, len(OTHER_WORDS)))
    return alignment_loss(torch.cat(list(tokens)), embedding, shown, torch.cat(dominant), torch.cat(kinds))


def rescale_tokens(model: Any, scenes: Sequence[Scene]) -> None:
    """Scale the merger so that visual tokens have norm 1.5 on average; words have about 1."""
    with torch.no_grad():
        tokens, _, _ = encode_images(model, [render(scene)[0] for scene in scenes])
        factor = TOKEN_NORM / float(torch.cat(list(tokens)).norm(dim=-1).mean())
        last = model.model.visual.merger.linear_fc2
        last.weight.mul_(factor)
        last.bias.mul_(factor)


# Stage B: prompts with the right answers.


class Packer:
    """Turns lists, composed queries and questions into packed prompts."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.image = model.config.image_token_id
        token = tokenizer.convert_tokens_to_ids
        self.open, self.close = token("<|vision_start|>"), token("<|vision_end|>")
        self.letters = [token(letter) for letter in IDENTIFIERS]
        self.reference = token("reference")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def identifiers(self, rng: np.random.Generator, count: int) -> list[int]:
        """Half the time A, B, C …, as at inference; else any letters, so that all are learned."""
        if rng.random() < 0.5:
            return self.letters[:count]
        return [self.letters[i] for i in rng.permutation(len(self.letters))[:count]]

    def _look(
        self,
        row: int,
        phrases: Sequence[Phrase],
        scenes: Sequence[Scene],
        shown: Sequence[np.ndarray],
        starts: Sequence[int],
        names: Sequence[int],
    ) -> tuple[int, list[int], list[int], list[int]]:
        """What phrases that `row` stands for should find: see `Ask.looks`.

        shown, starts, names: per scene, which cells show which thing, its first visual token, its identifier.
        """
        tokens: list[int] = []
        has: list[int] = []
        for scene, cells, start, name in zip(scenes, shown, starts, names, strict=True):
            hits = [i for i, thing in enumerate(scene.things) if any(p.fits(thing) for p in phrases)]
            tokens += [start + int(cell) for cell in np.flatnonzero(cells[hits].any(0))]
            if all(any(p.fits(thing) for thing in scene.things) for p in phrases):
                has.append(name)
        words = [word for phrase in phrases for word in phrase.words()]
        return row, tokens, has, word_ids(self.tokenizer, words).tolist()

    def pack_list(self, item: SceneList, first_image: int, rng: np.random.Generator) -> Packed:
        names = self.identifiers(rng, len(item.scenes))
        covers = [cover for _, cover in item.rendered]
        sizes = [cover[0].size for cover in covers]
        shown, starts = [shown_by(cover) for cover in covers], [0, *accumulate(sizes)][:-1]
        ids: list[int] = []
        for name, size in zip(names, sizes, strict=True):
            ids += [name, self.open, *[self.image] * size, self.close]
        asks = []
        for description, target in zip(item.descriptions, item.targets, strict=True):
            words = description.text().split()
            ask = Ask(self.encode(f"query: {description.text()} answer:"), names[target], names)
            start = 0
            for phrase in description.phrases:
                start = phrase_end(words, phrase, start)
                ask.looks.append(self._look(2 + start, [phrase], item.scenes, shown, starts, names))
                start += 1
            asks.append(ask)
        return Packed(ids, list(range(first_image, first_image + len(names))), names, asks)

    def pack_composed(
        self, item: Composed, first_image: int, rng: np.random.Generator, *, guided: bool = False
    ) -> Packed:
        """guided: show where in the reference the things are that stay."""
        names = self.identifiers(rng, len(item.scenes))
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
            ask = Ask(
                self.encode(f"change: {change.text} answer:"), names[change.target], names, kind="composed"
            )
            # The new colour stands for what is new, "instead" for what the reference shows besides.
            for word, phrases in ((change.new.colour or "", [change.new]), ("instead", change.kept)):
                row = 2 + words.index(word)
                ask.looks.append(self._look(row, phrases, item.scenes, shown, starts, names))
            if guided:
                _, tokens, _, _ = self._look(row, change.kept, [item.reference], [seen], [0], [-1])
                ask.reads.append((row, tokens))
            asks.append(ask)
        images = list(range(first_image, first_image + 1 + len(names)))
        return Packed(ids, images, [-1, *names], asks)

    def pack_questions(self, items: Sequence[SceneQuestion], cover: np.ndarray, first_image: int) -> Packed:
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
            _, tokens, _, words = self._look(row, [item.phrase], [item.scene], [shown], [0], [-1])
            ask.looks.append((row, tokens, [], words))  # no candidate, no identifier
            asks.append(ask)
        return Packed(ids, [first_image], [-1], asks)


@dataclass
class Helpers:
    """Weights of the helper losses and the layers (0-based) they act at."""

    weight: float
    binding_layer: int
    phrase_layer: int
    look_layers: tuple[int, ...]
    """the layer at which the first, second (third) phrase looks at the images"""

    @classmethod
    def at_depth(cls, layers: int, weight: float) -> Helpers:
        """Phrases look at the images in the second half, one after the other."""
        first, second = int(0.5 * layers), int(0.7 * layers)
        return cls(weight, int(0.2 * layers), int(0.3 * layers), (first, second, second))


def forward(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """Hidden states: what enters each layer, and last the normed output."""
    output = model.model.language_model(
        inputs_embeds=batch.embeds,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        visual_pos_masks=batch.visual,
        deepstack_visual_embeds=batch.deepstack,
        use_cache=False,
        output_hidden_states=True,
    )
    return (*output.hidden_states[:-1], output.last_hidden_state)


def ranking_loss(model: Any, batch: Batch, helpers: Helpers) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of the answers, and the helpers."""
    text = model.model.language_model
    states = forward(model, batch)
    head, norm = model.lm_head, text.norm
    last = torch.stack([states[-1][b, start + len(ask.ids) - 1] for b, start, ask in batch.asks])
    logits = head(last)
    loss, facts = logits.new_zeros(()), {}
    count = len(batch.asks)
    right: dict[str, list[float]] = {}
    for row, (_, _, ask) in enumerate(batch.asks):
        among = logits[row, ask.choices]
        loss = loss + cross_entropy(among[None], torch.tensor([ask.choices.index(ask.answer)])) / count
        loss = loss + 0.2 * (logits[row].logsumexp(-1) - among.logsumexp(-1)) / count
        right.setdefault(ask.kind, []).append(float(ask.choices[int(among.argmax())] == ask.answer))
    facts["loss"] = loss.item()
    for kind, values in right.items():
        facts[kind] = sum(values) / len(values)
    if helpers.weight <= 0:
        return loss, facts

    # Binding: a visual token knows its image's identifier.
    bound = states[helpers.binding_layer + 1]
    rows, owners = [], []
    for b, (columns, owner) in enumerate(zip(batch.columns, batch.owners, strict=True)):
        known = (owner >= 0).nonzero()[:, 0]
        pick = known[torch.randperm(len(known))[:160]]
        rows.append(bound[b, columns[pick]])
        owners.append(owner[pick])
    if sum(len(o) for o in owners):
        binding = cross_entropy(head(norm(torch.cat(rows))), torch.cat(owners))
        loss = loss + helpers.weight * 0.2 * binding
        facts["binding"] = binding.item()

    # Phrase: its last word knows all its attribute words.
    asked = [(b, start + look[0], look) for b, start, ask in batch.asks for look in ask.looks]
    b_index = torch.tensor([b for b, _, _ in asked])
    places = torch.tensor([place for _, place, _ in asked])
    phrase_logits = head(norm(states[helpers.phrase_layer + 1][b_index, places])).log_softmax(-1)
    phrase = torch.stack([-phrase_logits[i, look[3]].mean() for i, (_, _, look) in enumerate(asked)]).mean()
    loss = loss + helpers.weight * 0.1 * phrase
    facts["phrase"] = phrase.item()

    # Attention: the phrase looks at the tokens that show it; bag: then it knows who has it.
    looks: dict[int, list[tuple[int, int, tuple]]] = {}
    for b, start, ask in batch.asks:
        for row, tokens in ask.reads:
            looks.setdefault(helpers.phrase_layer, []).append((b, start + row, (row, tokens, [], [])))
        for number, look in enumerate(ask.looks):
            layer = helpers.look_layers[min(number, len(helpers.look_layers) - 1)]
            looks.setdefault(layer, []).append((b, start + look[0], look))
    attention, bags = [], []
    rotary = text.rotary_emb(batch.embeds, batch.positions)
    for layer, entries in looks.items():
        module = text.layers[layer]
        for b in sorted({entry[0] for entry in entries}):
            mine = [(place, look) for row, place, look in entries if row == b]
            place = torch.tensor([p for p, _ in mine])
            cos, sin = rotary[0][b], rotary[1][b]
            query = project(module, "q", states[layer][b, place], cos[place], sin[place])
            key = project(module, "k", states[layer][b], cos, sin)
            groups = query.shape[0] // key.shape[0]
            scores = query @ key.repeat_interleave(groups, 0).transpose(-1, -2) * module.self_attn.scaling
            scores = scores.masked_fill(~batch.mask[b, 0, place], -torch.inf)
            weights = scores.softmax(-1).mean(0)
            after = head(norm(states[min(layer + 2, len(states) - 1)][b, place])).log_softmax(-1)
            for i, (_, look) in enumerate(mine):
                if look[1]:
                    mass = weights[i, batch.columns[b][look[1]]].sum()
                    attention.append(-(mass + 1e-6).log())
                if look[2]:
                    bags.append(-after[i, look[2]].mean() - math.log(len(look[2])))
    if attention:
        value = torch.stack(attention).mean()
        loss = loss + helpers.weight * 0.3 * value
        facts["attention"] = value.item()
    if bags:
        value = torch.stack(bags).mean()
        loss = loss + helpers.weight * 0.6 * value
        facts["bag"] = value.item()
    return loss, facts


def optimizers(parameters: Sequence[tuple[str, nn.Parameter]], lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the matrices inside layers, AdamW on all else (embeddings, norms, biases, convolutions)."""
    matrices = [p for name, p in parameters if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in parameters if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.97), weight_decay=0.0),
    ]


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
) -> Batch:
    """Lists of `count` scenes with so many queries each, their sides scaled by `factor`."""
    rng = stream(split, 7, seed)
    items = [
        make_list(split, seed * 64 + part, count, queries=queries, similarity=similarity)
        for part in range(lists)
    ]
    if factor < 1:
        for item in items:
            item.rendered[:] = [shrink(*picture, factor) for picture in item.rendered]
    prompts = [packer.pack_list(item, part * count, rng) for part, item in enumerate(items)]
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
) -> Batch:
    """Changes to a reference over `count` scenes; with `lists` not 0, so many of them, guided."""
    rng = stream(split, 8, seed)
    items = [
        make_composed(split, seed + part * 10_000_000, count, queries=queries, things=things)
        for part in range(lists or 1)
    ]
    prompts = [
        packer.pack_composed(item, part * (count + 1), rng, guided=bool(lists))
        for part, item in enumerate(items)
    ]
    return _collated(model, prompts, [image for item in items for image, _ in item.rendered])


def draw_questions(packer: Packer, model: Any, split: str, seed: int, *, scenes: int) -> Batch:
    """Six questions about each of so many scenes."""
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
