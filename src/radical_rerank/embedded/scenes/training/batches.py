"""Training batches: pictures as patches, what their cells show, and prompts with many queries each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from radical_rerank.embedded.packing import Packed, Placed, lay_out
from radical_rerank.embedded.scenes.drawing import CELL
from radical_rerank.embedded.scenes.world import ATTRIBUTE_WORDS, COLOURS, SHAPES, SIZES, Phrase, Thing

PATCH, MERGE = 8, 2
SHRINK = (0.5, 0.6, 0.7, 0.8)
"""factors by which some pictures are scaled down"""
SHOWN, HIDDEN = 0.15, 0.03
"""a cell shows a thing that covers at least the first fraction of it, and does not show one that covers less
than the second; in between it has no label"""

Grid = tuple[int, int, int]
"""patches of an image: frames (1), rows, columns"""


def patchify(image: Image.Image) -> tuple[np.ndarray, Grid]:
    """Turn a picture whose sides are multiples of 16 into patches: the image processor's, but faster.

    Returns:
        The (patches, values) array, and the grid.
    """
    pixels = (np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.25
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    shape = (rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    patches = pixels.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
    patches = np.repeat(patches[:, :, :, :, :, None], 2, axis=5)
    return patches.reshape(rows * columns, -1), (1, rows, columns)


def encode_images(
    model: Any, images: Sequence[Image.Image]
) -> tuple[list[Tensor], list[list[Tensor]], list[Grid]]:
    """Return, per image, its (M, d) visual tokens, its DeepStack levels and its grid."""
    parts = [patchify(image) for image in images]
    grids = [grid for _, grid in parts]
    pixels = torch.from_numpy(np.concatenate([patches for patches, _ in parts]))
    output = model.model.get_image_features(pixels, torch.tensor(grids), return_dict=True)
    levels = [list(level) for level in zip(*output.deepstack_features, strict=True)]
    return list(output.pooler_output), levels, grids


# What a cell shows.

OTHER_WORDS = ("a", "an", "and", "with", "on", "at", "the", "of", "above", "below", "thing")
"""words of sentences that no cell shows"""
GROUPS = {
    "colour": slice(0, len(COLOURS)),
    "shape": slice(len(COLOURS), len(COLOURS) + len(SHAPES)),
    "size": slice(len(COLOURS) + len(SHAPES), len(COLOURS) + len(SHAPES) + len(SIZES)),
}
"""where each kind of attribute is in `ATTRIBUTE_WORDS`"""


@dataclass(frozen=True)
class CellLabels:
    """What the M cells of a picture show.

    Args:
        words: (M, attribute words) 1 if the cell shows it, 0 if not, -1 if unclear
        dominant: (M,) the thing that covers most of the cell, -1 for none
    """

    words: Tensor
    dominant: Tensor


def label_cells(things: Sequence[Thing], cover: np.ndarray) -> CellLabels:
    """Return what each cell of a picture shows. cover: see `render`"""
    flat = cover.reshape(len(things), -1)
    shown = shown_by(cover)
    unsure = (flat >= HIDDEN) & ~shown
    words = np.zeros((flat.shape[1], len(ATTRIBUTE_WORDS)), dtype=np.int64)
    for number, thing in enumerate(things):
        for word in (thing.colour, thing.shape, thing.size, *thing.places()):
            column = ATTRIBUTE_WORDS.index(word)
            words[unsure[number] & (words[:, column] == 0), column] = -1
            words[shown[number], column] = 1
    dominant = np.where(shown.any(0), np.where(shown, flat, 0).argmax(0), -1)
    return CellLabels(torch.from_numpy(words), torch.from_numpy(dominant))


def shown_by(cover: np.ndarray) -> np.ndarray:
    """Return (things, cells): which cells show which thing. A thing's fullest cell always shows it."""
    flat = cover.reshape(len(cover), -1)
    shown = flat >= SHOWN
    shown[np.arange(len(flat)), flat.argmax(1)] = True
    return shown


# Packed prompts, see `embedded.packing`.


@dataclass
class Batch:
    """Prompts as the decoder takes them.

    Args:
        embeds, positions, mask, visual, deepstack: arguments of the decoder
        asks: the queries, with their places
        columns: per row of the batch, the places of its visual tokens
        owners: per row, the identifier of each visual token's image
    """

    embeds: Tensor
    positions: Tensor
    mask: Tensor
    visual: Tensor
    deepstack: list[Tensor]
    asks: list[Placed]
    columns: list[Tensor]
    owners: list[Tensor]


def collate(
    model: Any,
    prompts: Sequence[Packed],
    tokens: Sequence[Tensor],
    levels: Sequence[Sequence[Tensor]],
    grids: Sequence[Grid],
) -> Batch:
    """Turn prompts into a batch.

    Args:
        model: whose decoder takes the batch
        prompts: of any lengths
        tokens, levels, grids: per image, what `encode_images` returns
    """
    image_token = model.config.image_token_id

    def place_head(prompt: Packed) -> tuple[Tensor, int]:
        return _head_positions(prompt.ids, image_token, [grids[i] for i in prompt.images])

    ids, positions, mask, asks = lay_out(prompts, place_head)
    visual = ids == image_token
    columns = [row.nonzero()[:, 0] for row in visual]
    owners = [
        torch.cat(
            [
                torch.full((len(tokens[i]),), k)
                for i, k in zip(prompt.images, prompt.identifier_of, strict=True)
            ]
        )
        for prompt in prompts
    ]
    order = [i for prompt in prompts for i in prompt.images]
    embeds = model.get_input_embeddings()(ids)
    embeds = embeds.masked_scatter(visual[..., None], torch.cat([tokens[i] for i in order]))
    deepstack = [torch.cat([levels[i][level] for i in order]) for level in range(len(levels[0]))]
    return Batch(embeds, positions, mask, visual, deepstack, asks, columns, owners)


def _head_positions(ids: Sequence[int], image_token: int, grids: Sequence[Grid]) -> tuple[Tensor, int]:
    """Return the (3, n) M-RoPE positions of a head, and the position after it."""
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
    """Return the place of the last word of a phrase that begins at or after `start` in a sentence."""
    last = phrase.words()[-1]
    for place in range(start, len(words)):
        if words[place] == last:
            return place
    raise ValueError(f"{phrase} is not in {words}")


assert CELL == PATCH * MERGE
