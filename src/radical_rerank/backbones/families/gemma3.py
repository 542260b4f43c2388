"""Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families.base import (
    FULL,
    WHOLE,
    WINDOW,
    Block,
    Family,
    ImageFeatures,
    Pixels,
    Tokens,
)
from radical_rerank.backbones.families.towers import joined, tile_signals
from radical_rerank.backbones.hooks import watching
from radical_rerank.errors import InputError, UnsupportedModelError
from radical_rerank.pruning import VisionSignals


class Gemma3(Family):
    """Gemma 3: square images of one size. Most layers see a window; an image's tokens see each other.

    A window counts positions of the whole prompt: it covers the same part before and after pruning. Rows
    after the images see only the last of them through it, so attention is read in the other layers.
    """

    markup: ClassVar[tuple[str, str]] = ("\n\n<start_of_image>", "<end_of_image>\n\n")
    text_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    known_kinds: ClassVar[tuple[str, ...]] = (FULL, WINDOW)
    own_masks: ClassVar[bool] = True

    @property
    def edge(self) -> int:
        """Tokens along a side of an image."""
        return math.isqrt(self.config.mm_tokens_per_image)

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        self.count_tokens(processor, image.size, max_tokens)
        batch = processor([image], return_tensors="pt")
        return Pixels(torch.as_tensor(batch["pixel_values"]), (1,), (Block(WHOLE, self.edge, self.edge),))

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        if not all(size):
            raise InputError(f"an image of {size[0]} x {size[1]} pixels shows nothing")
        if max_tokens < self.config.mm_tokens_per_image:
            raise InputError(
                f"Gemma 3 gives every image {self.config.mm_tokens_per_image} visual tokens, so at most "
                f"{max_tokens} are not possible: choose another method or raise max_image_tokens"
            )
        return int(self.config.mm_tokens_per_image)

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        values = torch.cat([p.values for p in pixels]).to(base.dtype)
        attention = self.encoder_blocks(base)[-1].self_attn
        watch: AbstractContextManager[dict[str, Any]] = watching(attention) if signals else nullcontext({})
        with watch as seen:
            tokens = base.get_image_features(values, return_dict=True).pooler_output
        own: list[VisionSignals | None] = [None] * len(pixels)
        if signals:
            side = self.config.vision_config.image_size // self.config.vision_config.patch_size
            received, keys = (
                joined(part, side, side, side // self.edge)
                for part in tile_signals(attention, seen["hidden_states"], cls=False)
            )
            own = [VisionSignals(a, k) for a, k in zip(received, keys, strict=True)]
        return [
            ImageFeatures(part, (), p.grid, p.blocks, s)
            for part, p, s in zip(tokens, pixels, own, strict=True)
        ]

    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        return list(base.vision_tower.encoder.layers)

    def inputs(self, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        tokens = torch.stack([f.tokens for f in features])
        return {
            "mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tokens)},
            "token_type_ids": (input_ids == self.config.image_token_id).long(),
        }

    # The decoder.

    def rotary(self, text: Any, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = text.rotary_emb(hidden, positions, kind)
        return cos, sin

    def groups(self, arguments: dict[str, Any], images: Tensor) -> Tensor | None:
        if arguments.get("token_type_ids") is None:
            return None
        first = images & ~images.roll(1, dims=1)
        first[:, 0] = images[:, 0]
        return torch.where(images, first.cumsum(dim=1), -1)

    def mask(self, kind: str, config: Any, hidden: Tensor, tokens: Tokens, cache: Any, layer: int) -> Any:
        if config._attn_implementation not in ("sdpa", "eager"):
            raise UnsupportedModelError(
                f"Gemma 3 cannot be pruned with {config._attn_implementation}: its kernel takes no mask. "
                'Load it with attn_implementation="sdpa"'
            )
        seen = tokens.sees(hidden.shape[1], config.sliding_window if kind == WINDOW else None)
        if cache is not None:  # a window's cache forgets its first tokens
            length, offset = cache.get_mask_sizes(hidden.shape[1], layer)
            seen = seen[:, :, offset : offset + length]
        if config._attn_implementation == "sdpa":
            return seen[:, None]
        least = torch.finfo(hidden.dtype).min
        return torch.zeros_like(seen[:, None], dtype=hidden.dtype).masked_fill(~seen[:, None], least)
