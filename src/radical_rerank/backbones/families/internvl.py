"""InternVL 2.5 (converted), 3 and 3.5, in their -hf form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families.base import WHOLE, Block, Family, ImageFeatures, Pixels
from radical_rerank.backbones.families.towers import by_size
from radical_rerank.backbones.hooks import watching
from radical_rerank.pruning import VisionSignals


class InternVL(Family):
    """InternVL 2.5 (converted), 3 and 3.5 in their -hf form: square tiles, pixel shuffle, plain RoPE."""

    markup: ClassVar[tuple[str, str]] = ("<img>", "</img>")
    text_types: ClassVar[tuple[str, ...]] = ("llama", "qwen2", "qwen3", "qwen3_moe")

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        options, blocks = self._tiles(processor, image.size, max_tokens)
        if len(blocks) == 1 and getattr(processor, "backend", None) == "pil":
            # The same resizing as the processor's own, which makes two more copies of the whole image first.
            size = options.get("size", processor.size)
            image = image.resize((size["width"], size["height"]), processor.resample)
            options = {"crop_to_patches": False, "do_resize": False}
        batch = processor([image], return_tensors="pt", **options)
        return Pixels(torch.as_tensor(batch["pixel_values"]), (len(blocks),), blocks)

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        return sum(block.rows * block.columns for block in self._tiles(processor, size, max_tokens)[1])

    def _tiles(
        self, processor: Any, size: tuple[int, int], max_tokens: int
    ) -> tuple[dict[str, Any], tuple[Block, ...]]:
        """The processor's options for an image of this width and height, and the tiles that they give."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        side = processor.size["height"], processor.size["width"]
        tiles = max_tokens // self.config.image_seq_length
        edge = round(self.config.image_seq_length**0.5)
        if tiles < 3:  # two tiles and their thumbnail are the least that cropping gives
            options: dict[str, Any] = {"crop_to_patches": False}
            if not tiles:  # a smaller tile: the encoder interpolates its position embeddings
                small = max(1, math.isqrt(max_tokens))
                options["size"] = {"height": side[0] * small // edge, "width": side[1] * small // edge}
                edge = small
            return options, (Block(WHOLE, edge, edge),)
        most = min(tiles - 1, processor.max_patches)
        columns, rows = get_optimal_tiled_canvas(size[::-1], side, processor.min_patches, most)
        boxes = [
            (c / columns, r / rows, (c + 1) / columns, (r + 1) / rows)
            for r in range(rows)
            for c in range(columns)
        ]
        boxes += [WHOLE] if len(boxes) > 1 else []
        blocks = tuple(Block(box, edge, edge) for box in boxes)
        return {"crop_to_patches": True, "max_patches": most}, blocks

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        return by_size(partial(self._encode, base, signals), pixels)

    def _encode(self, base: Any, signals: bool, pixels: Sequence[Pixels]) -> list[ImageFeatures]:
        values = torch.cat([p.values for p in pixels])
        attention = base.vision_tower.encoder.layer[-1].attention
        watch: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if signals:
            watch = watching(attention)
        with watch as seen:
            tiles = base.get_image_features(pixel_values=values, return_dict=True).pooler_output
        counts = [len(p.values) for p in pixels]
        own_signals: list[VisionSignals | None] = [None] * len(pixels)
        if signals:
            received, keys = self._signals(attention, seen["hidden_states"])
            own_signals = [
                VisionSignals(a.flatten(), k.flatten(0, 1))
                for a, k in zip(received.split(counts), keys.split(counts), strict=True)
            ]
        return [
            ImageFeatures(part.flatten(0, 1), (), p.grid, p.blocks, own)
            for part, p, own in zip(tiles.split(counts), pixels, own_signals, strict=True)
        ]

    def _signals(self, attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Per tile, (tiles, M) the CLS token's attention and (tiles, M, hd) keys, means over heads and
        over the patches (2 × 2 in published models) that the pixel shuffle joins."""
        split = (attention.num_heads, attention.head_dim)
        q = attention.q_norm(attention.q_proj(hidden[:, :1])).unflatten(-1, split).transpose(1, 2).float()
        k = attention.k_norm(attention.k_proj(hidden)).unflatten(-1, split).transpose(1, 2).float()
        weights = (q @ k.transpose(-1, -2) * attention.scale).softmax(-1).mean(dim=1)[:, 0, 1:]
        keys = k.mean(dim=1)[:, 1:]
        edge, joined = math.isqrt(weights.shape[1]), round(1 / self.config.downsample_ratio)
        grid = (edge // joined, joined, edge // joined, joined)
        return (
            weights.unflatten(1, grid).mean(dim=(2, 4)).flatten(1),
            keys.unflatten(1, grid).mean(dim=(2, 4)).flatten(1, 2),
        )

    def inputs(self, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        tiles = torch.cat([f.tokens for f in features])[None]
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tiles)}}

    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        return list(base.vision_tower.encoder.layer)


class InternVLLite(InternVL):
    """InternVL with the tower of `lite_vision`, whose first token is the class token."""

    def _signals(self, attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        received, keys = super()._signals(attention, hidden)
        received[:, 0] = 1.0  # as in published VisionZip, the class token always stays
        return received, keys
