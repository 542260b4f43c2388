"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families.base import WHOLE, Block, Family, ImageFeatures, Pixels
from radical_rerank.backbones.hooks import watching
from radical_rerank.backbones.view import column_means, rotate
from radical_rerank.pruning import VisionSignals


class QwenVL(Family):
    """Qwen2-VL, 2.5-VL and 3-VL: images of any size, merged 2 × 2, M-RoPE; DeepStack on Qwen3-VL."""

    markup: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    encoder: ClassVar[str] = "visual"
    text_types: ClassVar[tuple[str, ...]] = (
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
    )

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        least, most = self._pixels(processor, max_tokens)
        options: dict[str, Any] = {"size": {"longest_edge": most, "shortest_edge": least}}
        if getattr(processor, "backend", None) == "pil":
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            # The same resizing as the processor's own, which makes two more copies of the whole image first.
            factor = processor.patch_size * processor.merge_size
            height, width = smart_resize(image.height, image.width, factor, least, most)
            image = image.resize((width, height), processor.resample)
            options = {"do_resize": False}
        batch = processor([image], **options, return_tensors="pt")
        t, h, w = batch["image_grid_thw"][0].tolist()
        block = Block(WHOLE, h // processor.merge_size, w // processor.merge_size)
        return Pixels(batch["pixel_values"], (t, h, w), (block,))

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        least, most = self._pixels(processor, max_tokens)
        width, height = size
        limits = {"min_pixels": least, "max_pixels": most}
        patches = processor.get_number_of_image_patches(height, width, limits)
        return int(patches // processor.merge_size**2)

    def _pixels(self, processor: Any, max_tokens: int) -> tuple[int, int]:
        """Return the fewest and the most pixels that an image is scaled to."""
        per_token = (processor.patch_size * processor.merge_size) ** 2
        most = min(processor.size["longest_edge"], max_tokens * per_token)
        return min(processor.size["shortest_edge"], most), most

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        tower, values = base.visual, torch.cat([p.values for p in pixels])
        watch: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if signals:
            watch = watching(tower.blocks[-1].attn)
        with watch as seen:
            grids = torch.tensor([p.grid for p in pixels], device=values.device)
            output = base.get_image_features(values, grids, return_dict=True)
        levels = list(zip(*(getattr(output, "deepstack_features", None) or []), strict=True))
        own_signals = self._signals(tower, pixels, seen) if signals else [None] * len(pixels)
        return [
            ImageFeatures(tokens, tuple(levels[i]) if levels else (), p.grid, p.blocks, own_signals[i])
            for i, (tokens, p) in enumerate(zip(output.pooler_output, pixels, strict=True))
        ]

    def _signals(
        self, tower: Any, pixels: Sequence[Pixels], seen: dict[str, Any]
    ) -> list[VisionSignals | None]:
        """Attention received within the image, mean over heads, rows and the 2 × 2 patches of a token."""
        attention, (cos, sin) = tower.blocks[-1].attn, seen["position_embeddings"]
        qkv = attention.qkv(seen["hidden_states"]).unflatten(-1, (3, attention.num_heads, -1))
        q, k = (rotate(part.transpose(0, 1).float(), cos.float(), sin.float()) for part in qkv.unbind(1)[:2])
        group = tower.spatial_merge_size**2
        own_signals: list[VisionSignals | None] = []
        start = 0
        for p in pixels:
            part = slice(start, start + math.prod(p.grid))
            start = part.stop
            received = column_means(q[:, part], k[:, part], attention.scaling)
            keys = k[:, part].mean(dim=0)
            own_signals.append(
                VisionSignals(received.view(-1, group).mean(-1), keys.unflatten(0, (-1, group)).mean(1))
            )
        if hasattr(tower, "fullatt_block_indexes"):  # Qwen2.5-VL's blocks see the tokens window by window
            own_signals = self._in_order(tower, pixels, own_signals)
        return own_signals

    def _in_order(
        self, tower: Any, pixels: Sequence[Pixels], own_signals: list[VisionSignals | None]
    ) -> list[VisionSignals | None]:
        from transformers.vision_utils import get_vision_window_index

        result: list[VisionSignals | None] = []
        for p, signals in zip(pixels, own_signals, strict=True):
            assert signals is not None
            windows, _ = get_vision_window_index(
                torch.tensor([p.grid], device=signals.keys.device),
                spatial_merge_size=tower.spatial_merge_size,
                window_size=tower.window_size,
                patch_size=tower.patch_size,
            )
            order = windows.argsort()
            result.append(VisionSignals(signals.attention[order], signals.keys[order]))
        return result

    def inputs(self, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        image = BaseModelOutputWithDeepstackFeatures(
            pooler_output=tuple(f.tokens for f in features),
            deepstack_features=[list(level) for level in zip(*(f.deepstack for f in features), strict=True)],
        )
        return {
            "mm_encoder_outputs": {"image": image},
            "image_grid_thw": torch.tensor([f.grid for f in features], device=input_ids.device),
            "mm_token_type_ids": (input_ids == self.config.image_token_id).int(),
        }

    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        return list(base.visual.blocks)

    def positions(self, mask: Tensor) -> Tensor | None:
        return None
