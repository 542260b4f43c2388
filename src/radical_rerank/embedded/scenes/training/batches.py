"""Training batches: pictures as patches, many queries behind one set of images, and who should look where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from radical_rerank.embedded.scenes.drawing import CELL
from radical_rerank.embedded.scenes.training.model import attribute_words
from radical_rerank.embedded.scenes.world import Phrase, Thing

PATCH, MERGE = 8, 2
SHOWN, HIDDEN = 0.15, 0.03
"""A cell shows a thing that covers the first share of it, does not below the second; between, who knows"""


def patchify(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """What the embedded image processor makes of a picture whose sides are multiples of 16, only faster."""
    pixels = (np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.25
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    shape = (rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    patches = pixels.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
    patches = np.repeat(patches[:, :, :, :, :, None], 2, axis=5)
    return patches.reshape(rows * columns, -1), (1, rows, columns)


def encode_images(
    model: Any, images: Sequence[Image.Image]
) -> tuple[list[Tensor], list[list[Tensor]], list[tuple]]:
    """Per image its (M, d) tokens, its DeepStack levels, its grid."""
    parts = [patchify(image) for image in images]
    grids = [grid for _, grid in parts]
    pixels = torch.from_numpy(np.concatenate([patches for patches, _ in parts]))
    output = model.model.get_image_features(pixels, torch.tensor(grids), return_dict=True)
    levels = [list(level) for level in zip(*output.deepstack_features, strict=True)]
    return list(output.pooler_output), levels, grids


# What a cell shows.

WORDS = attribute_words()
OTHER_WORDS = ["a", "an", "and", "with", "on", "at", "the", "of", "above", "below", "thing"]
"""Words of sentences that no cell shows"""
GROUPS = {"colour": slice(0, 8), "shape": slice(8, 16), "size": slice(16, 18)}


@dataclass
class CellLabels:
    """Of M cells: which attribute words they show (1), do not show (0), perhaps show (-1); the thing that
    dominates each (-1 for none)."""

    words: Tensor
    dominant: Tensor


def label_cells(things: Sequence[Thing], cover: np.ndarray) -> CellLabels:
    """cover: (things, rows, columns) from `render`."""
    flat = cover.reshape(len(things), -1)
    shown = shown_by(cover)
    unsure = (flat >= HIDDEN) & ~shown
    words = np.zeros((flat.shape[1], len(WORDS)), dtype=np.int64)
    for number, thing in enumerate(things):
        columns = [WORDS.index(w) for w in (thing.colour, thing.shape, thing.size, *thing.places())]
        for column in columns:
            words[unsure[number] & (words[:, column] == 0), column] = -1
            words[shown[number], column] = 1
    dominant = np.where(shown.any(0), np.where(shown, flat, 0).argmax(0), -1)
    return CellLabels(torch.from_numpy(words), torch.from_numpy(dominant))


def shown_by(cover: np.ndarray) -> np.ndarray:
    """(things, cells) which cells show which thing; each thing is shown at least in its fullest cell."""
    flat = cover.reshape(len(cover), -1)
    shown = flat >= SHOWN
    shown[np.arange(len(flat)), flat.argmax(1)] = True
    return shown


# Packed prompts.


@dataclass
class Ask:
    """One question behind the images: its words, the right token, and what its phrases name."""

    ids: list[int]
    answer: int
    choices: list[int]
    looks: list[tuple[int, list[int], list[int], list[int]]] = field(default_factory=list)
    """per phrase: the row of `ids` where it ends, the visual tokens (counted over all images of the prompt)
    that show it, the identifiers of the candidates that have it, and its attribute words"""
    kind: str = "list"
    reads: list[tuple[int, list[int]]] = field(default_factory=list)
    """rows of `ids` that should read these visual tokens early, before anything is looked for"""


@dataclass
class Packed:
    """One prompt: head (images with their identifiers), then independent asks."""

    ids: list[int]
    images: list[int]
    """image numbers, in the order of the head"""
    identifier_of: list[int]
    """per image, the token that names it (-1: none)"""
    asks: list[Ask]


@dataclass
class Batch:
    embeds: Tensor
    positions: Tensor
    mask: Tensor
    visual: Tensor
    deepstack: list[Tensor]
    asks: list[tuple[int, int, Ask]]
    """(row of the batch, where its ids start, the ask)"""
    columns: list[Tensor]
    """per row of the batch, the places of its visual tokens"""
    owners: list[Tensor]
    """per row, the identifier of each visual token's image"""


def collate(
    model: Any,
    prompts: Sequence[Packed],
    tokens: Sequence[Tensor],
    levels: Sequence[Sequence[Tensor]],
    grids: Sequence[tuple[int, int, int]],
) -> Batch:
    """Embed, place and mask the prompts. `tokens[i]`, `levels[i]`, `grids[i]` belong to image i."""
    image_token = model.config.image_token_id
    length = max(len(p.ids) + sum(len(a.ids) for a in p.asks) for p in prompts)
    size = len(prompts)
    ids = torch.zeros(size, length, dtype=torch.long)
    positions = torch.zeros(3, size, length, dtype=torch.long)
    mask = torch.zeros(size, 1, length, length, dtype=torch.bool)
    asks: list[tuple[int, int, Ask]] = []
    columns, owners = [], []
    for b, prompt in enumerate(prompts):
        head = len(prompt.ids)
        ids[b, :head] = torch.tensor(prompt.ids)
        spots, after = _head_positions(prompt.ids, image_token, [grids[i] for i in prompt.images])
        positions[:, b, :head] = spots
        mask[b, 0, :head, :head] = torch.ones(head, head, dtype=torch.bool).tril_()
        start = head
        for ask in prompt.asks:
            end = start + len(ask.ids)
            ids[b, start:end] = torch.tensor(ask.ids)
            positions[:, b, start:end] = torch.arange(after, after + len(ask.ids))
            mask[b, 0, start:end, :head] = True
            mask[b, 0, start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril_()
            asks.append((b, start, ask))
            start = end
        mask[b, 0, start:, 0] = True  # padding looks at one token, so that its softmax is defined
        columns.append((ids[b] == image_token).nonzero()[:, 0])
        owners.append(
            torch.cat(
                [
                    torch.full((len(tokens[i]),), k)
                    for i, k in zip(prompt.images, prompt.identifier_of, strict=True)
                ]
            )
        )
    visual = ids == image_token
    order = [i for prompt in prompts for i in prompt.images]
    embeds = model.get_input_embeddings()(ids)
    embeds = embeds.masked_scatter(visual[..., None], torch.cat([tokens[i] for i in order]))
    deepstack = [torch.cat([levels[i][level] for i in order]) for level in range(len(levels[0]))]
    return Batch(embeds, positions, mask, visual, deepstack, asks, columns, owners)


def _head_positions(
    ids: Sequence[int], image_token: int, grids: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, int]:
    """M-RoPE positions of the head, (3, n), and the position that follows it."""
    parts: list[Tensor] = []
    here, place, images = 0, 0, iter(grids)
    while place < len(ids):
        if ids[place] == image_token:
            _, h, w = next(images)
            rows, columns = h // MERGE, w // MERGE
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            parts.append(torch.stack([torch.zeros_like(y), y, x]).flatten(1) + here)
            here += max(rows, columns)
            place += rows * columns
        else:
            parts.append(torch.full((3, 1), here))
            here += 1
            place += 1
    return torch.cat(parts, dim=1), here


def phrase_end(words: Sequence[str], phrase: Phrase, start: int) -> int:
    """Where a phrase that begins at or after `start` ends among the words of a sentence."""
    last = phrase.words()[-1]
    for place in range(start, len(words)):
        if words[place] == last:
            return place
    raise ValueError(f"{phrase} is not in {words}")


assert CELL == PATCH * MERGE
