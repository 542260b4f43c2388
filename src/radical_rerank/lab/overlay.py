"""A picture with alive tokens in colour and dropped tokens in grey."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from PIL import Image

from radical_rerank.backbones import Block


def overlay(
    image: Image.Image, blocks: Sequence[Block], alive: Collection[int] | None, *, scale: int = 1
) -> Image.Image:
    """Draw a picture with its dropped tokens in grey.

    Args:
        image: the picture
        blocks: where its tokens are
        alive: the numbers of the alive tokens, counted over all blocks row by row; None for all
        scale: enlarges the picture

    Returns:
        An RGB picture.
    """
    size = (image.width * scale, image.height * scale)
    bright = np.asarray(image.convert("RGB").resize(size, Image.Resampling.NEAREST), dtype=np.float32)
    if alive is None:
        return Image.fromarray(bright.astype(np.uint8))
    grey = 205 + 0.2 * (bright.mean(axis=-1, keepdims=True) - 128)
    result = np.broadcast_to(grey, bright.shape).copy()
    first = 0
    kept = set(alive)
    for block in blocks:
        left, top, right, bottom = block.box
        xs = [round(size[0] * (left + (right - left) * c / block.columns)) for c in range(block.columns + 1)]
        ys = [round(size[1] * (top + (bottom - top) * r / block.rows)) for r in range(block.rows + 1)]
        for number in range(block.rows * block.columns):
            if first + number in kept:
                row, column = divmod(number, block.columns)
                part = np.s_[ys[row] : ys[row + 1], xs[column] : xs[column + 1]]
                result[part] = bright[part]
        first += block.rows * block.columns
    return Image.fromarray(result.clip(0, 255).astype(np.uint8))
