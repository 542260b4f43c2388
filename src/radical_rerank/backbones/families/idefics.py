"""SmolVLM and Idefics3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from PIL import Image

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
from radical_rerank.backbones.families.towers import by_size, joined, tile_signals
from radical_rerank.backbones.hooks import watching
from radical_rerank.pruning import VisionSignals

AROUND, GLOBAL = "<fake_token_around_image>", "<global-img>"


class Idefics(Family):
    """SmolVLM and Idefics3: square tiles with their names between them, then the whole image.

    A tile's name leaves with its last token.
    """

    markup: ClassVar[tuple[str, str]] = ("", "")
    text_types: ClassVar[tuple[str, ...]] = ("llama",)
    encoder: ClassVar[str] = "vision_model"
    decoder: ClassVar[str] = "text_model"

    @property
    def edge(self) -> int:
        """Tokens along a side of a tile."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size // self.config.scale_factor)

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        down, across, edge, options = self._tiles(processor, image.size, max_tokens)
        batch = processor([image], return_tensors="pt", **options)
        boxes = [
            (c / across, r / down, (c + 1) / across, (r + 1) / down)
            for r in range(down)
            for c in range(across)
        ]
        blocks = tuple(Block(box, edge, edge) for box in [*boxes, WHOLE])
        return Pixels(torch.as_tensor(batch["pixel_values"])[0], (down, across), blocks)

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        down, across, edge, _ = self._tiles(processor, size, max_tokens)
        return (down * across + 1) * edge**2

    def _tiles(
        self, processor: Any, size: tuple[int, int], max_tokens: int
    ) -> tuple[int, int, int, dict[str, Any]]:
        """Rows and columns of tiles (0: none), tokens along a side of one, and the processor's options."""
        side, (width, height) = processor.max_image_size["longest_edge"], size
        for times in range(processor.size["longest_edge"] // side, 1, -1):
            options: dict[str, Any] = {"size": {"longest_edge": times * side}, "do_image_splitting": True}
            tiles, down, across = processor.get_number_of_image_patches(height, width, options)
            if tiles and tiles * self.edge**2 <= max_tokens:
                return down, across, self.edge, options
        edge = max(1, min(self.edge, math.isqrt(max_tokens)))
        small = edge * self.config.scale_factor * self.config.vision_config.patch_size
        options = {"size": {"longest_edge": small}, "max_image_size": {"longest_edge": small}}
        return 0, 0, edge, {**options, "do_image_splitting": False}

    def _rows(self, grid: Sequence[int], tokens: int) -> tuple[Row, ...]:
        """Each tile after its name; a line break after each row of tiles, two before the whole image."""
        down, across = grid
        tiles = [
            Row(
                tokens, f"{AROUND}<row_{r + 1}_col_{c + 1}>", "\n" if c + 1 == across and r + 1 < down else ""
            )
            for r in range(down)
            for c in range(across)
        ]
        # The two are written together: they are one token of most tokenizers.
        return (*tiles, Row(tokens, ("\n\n" if tiles else "") + AROUND + GLOBAL, AROUND))

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        return by_size(partial(self._encode, base, signals), pixels)

    def _encode(self, base: Any, signals: bool, pixels: list[Pixels]) -> list[ImageFeatures]:
        values = torch.cat([p.values for p in pixels]).to(base.dtype)
        side = values.shape[-1] // self.config.vision_config.patch_size
        attention = self.encoder_blocks(base)[-1].self_attn
        watch: AbstractContextManager[dict[str, Any]] = watching(attention) if signals else nullcontext({})
        with watch as seen:
            everywhere = torch.ones(len(values), side, side, dtype=torch.bool, device=values.device)
            states = base.vision_model(pixel_values=values, patch_attention_mask=everywhere, return_dict=True)
        tiles = base.connector(states.last_hidden_state)
        counts = [len(p.values) for p in pixels]
        own: list[VisionSignals | None] = [None] * len(pixels)
        if signals:
            received, keys = (
                joined(part, side, side, self.config.scale_factor).split(counts)
                for part in tile_signals(attention, seen["hidden_states"], cls=False)
            )
            own = [VisionSignals(a.flatten(), k.flatten(0, 1)) for a, k in zip(received, keys, strict=True)]
        return [
            ImageFeatures(part.flatten(0, 1), (), p.grid, p.blocks, s, self._rows(p.grid, part.shape[1]))
            for part, p, s in zip(tiles.split(counts), pixels, own, strict=True)
        ]

    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        return list(base.vision_model.encoder.layers)

    def images_in(self, ids: Sequence[int], grids: Sequence[tuple[int, ...]]) -> list[ImageSpan]:
        rows = [self._rows(grid, self.edge**2) for grid in grids]
        return find_rows(ids, self.config.image_token_id, rows)
