"""LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families.base import (
    WHOLE,
    Block,
    Family,
    ImageFeatures,
    ImageSpan,
    Pixels,
    Row,
    find_rows,
)
from radical_rerank.backbones.families.towers import by_size, tile_signals
from radical_rerank.backbones.hooks import watching
from radical_rerank.pruning import VisionSignals


class Llava(Family):
    """LLaVA-NeXT and LLaVA-OneVision: the whole image as one tile, then a grid of tiles without its padding.

    A learned newline embedding ends each row of the grid, or a single tile. It leaves with its row.
    """

    markup: ClassVar[tuple[str, str]] = ("", "")
    text_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")

    @property
    def edge(self) -> int:
        """Tokens along a side of a tile."""
        return int(self.config.vision_config.image_size // self.config.vision_config.patch_size)

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        grid = self._grid(image.size, max_tokens)
        side = self.config.vision_config.image_size
        if not grid[0]:
            side = grid[1] * self.config.vision_config.patch_size
        square = {"height": side, "width": side}
        pinpoints = [list(point) for point in self._pinpoints(max_tokens)] if grid[0] else [[side, side]]
        options: dict[str, Any] = {"size": square, "image_grid_pinpoints": pinpoints}
        if getattr(processor, "crop_size", None):
            options["crop_size"] = square
        values = torch.as_tensor(processor([image], return_tensors="pt", **options)["pixel_values"])[0]
        blocks = tuple(Block(WHOLE, *shape) for shape in self._shapes(grid))
        return Pixels(values if grid[0] else values[:1], grid, blocks)

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        return sum(rows * columns for rows, columns in self._shapes(self._grid(size, max_tokens)))

    def _pinpoints(self, max_tokens: int) -> list[tuple[int, int]]:
        """The (height, width) that an image may be cut from, given the number of tokens."""
        side, tile = self.config.vision_config.image_size, self.edge**2
        points = [tuple(point) for point in self.config.image_grid_pinpoints]
        # Above nine tiles, OneVision scales the tokens down again: such grids are not used.
        return [(h, w) for h, w in points if (1 + min(h * w // side**2, 9)) * tile <= max_tokens]

    def _grid(self, size: tuple[int, int], max_tokens: int) -> tuple[int, ...]:
        """(rows of tiles, columns, image height, image width), or (0, side in tokens) of a single tile."""
        from transformers.image_processing_utils import select_best_resolution

        points = self._pinpoints(max_tokens)
        if not points:
            return 0, max(1, min(self.edge, math.isqrt(max_tokens)))
        side, (width, height) = self.config.vision_config.image_size, size
        best = select_best_resolution((height, width), points)
        return best[0] // side, best[1] // side, height, width

    def _shapes(self, grid: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and columns of tokens: of the whole image, and of the grid without its padding."""
        if not grid[0]:
            return [(grid[1], grid[1])]
        top, bottom, left, right = self._inside(grid)
        return [(self.edge, self.edge), (bottom - top, right - left)]

    def _inside(self, grid: Sequence[int]) -> tuple[int, int, int, int]:
        """Which rows and columns of the grid's tokens show the image: the others are padding."""
        down, across, height, width = grid
        rows, columns = down * self.edge, across * self.edge
        if width / height > columns / rows:
            cut = (rows - int(round(height * columns / width, 7))) // 2
            return cut, rows - cut, 0, columns
        cut = (columns - int(round(width * rows / height, 7))) // 2
        return 0, rows, cut, columns - cut

    def _rows(self, grid: Sequence[int]) -> tuple[Row, ...]:
        (height, width), *tiles = self._shapes(grid)
        if not tiles:
            return (Row(height * width, ends=1),)
        return (Row(height * width), *[Row(tiles[0][1], ends=1)] * tiles[0][0])

    def _arranged(self, tiles: Tensor, grid: Sequence[int]) -> Tensor:
        """(tiles, n, …) in the order of the prompt, without padding: (M, …)"""
        if not grid[0]:
            return tiles[0]
        top, bottom, left, right = self._inside(grid)
        cells = tiles[1:].unflatten(1, (self.edge, self.edge)).unflatten(0, (grid[0], grid[1]))
        cells = cells.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # tiles and their rows, then columns
        return torch.cat([tiles[0], cells[top:bottom, left:right].flatten(0, 1)])

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        return by_size(partial(self._encode, base, signals), pixels)

    def _encode(self, base: Any, signals: bool, pixels: list[Pixels]) -> list[ImageFeatures]:
        values = torch.cat([p.values for p in pixels]).to(base.dtype)
        config = self.config
        wanted, cls = config.vision_feature_layer, config.vision_feature_select_strategy == "default"
        last = wanted if isinstance(wanted, int) else wanted[-1]
        attention = self.encoder_blocks(base)[last].self_attn
        watch: AbstractContextManager[dict[str, Any]] = watching(attention) if signals else nullcontext({})
        small = values.shape[-1] != config.vision_config.image_size
        with watch as seen:
            states = base.vision_tower(
                values, output_hidden_states=True, return_dict=True, interpolate_pos_encoding=small
            ).hidden_states
        chosen = [states[layer] for layer in ([wanted] if isinstance(wanted, int) else wanted)]
        tokens = base.multi_modal_projector(torch.cat(chosen, dim=-1)[:, int(cls) :])
        counts = [len(p.values) for p in pixels]
        own: list[VisionSignals | None] = [None] * len(pixels)
        if signals:
            received, keys = tile_signals(attention, seen["hidden_states"], cls=cls)
            pairs = zip(received.split(counts), keys.split(counts), pixels, strict=True)
            own = [VisionSignals(self._arranged(a, p.grid), self._arranged(k, p.grid)) for a, k, p in pairs]
        return [
            ImageFeatures(
                self._arranged(part, p.grid), (), p.grid, p.blocks, s, self._rows(p.grid), base.image_newline
            )
            for part, p, s in zip(tokens.split(counts), pixels, own, strict=True)
        ]

    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        return list(base.vision_tower.encoder.layers)

    def images_in(self, ids: Sequence[int], grids: Sequence[tuple[int, ...]]) -> list[ImageSpan]:
        most = 10**9  # all of the configuration's grids, as the model's own processor uses them
        own = [g if len(g) == 4 or not g[0] else self._grid((g[1], g[0]), most) for g in grids]
        return find_rows(ids, self.config.image_token_id, [self._rows(grid) for grid in own])
