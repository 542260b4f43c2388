"""Mistral Small 3.1 and later, with a Pixtral vision tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from PIL import Image
from torch.nn.functional import pad

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
from radical_rerank.backbones.families.towers import joined
from radical_rerank.backbones.hooks import watching
from radical_rerank.backbones.view import column_means, rotate
from radical_rerank.pruning import VisionSignals


class Mistral3(Family):
    """Mistral 3: images of any size, merged 2 × 2. A break follows each row of tokens and leaves with it."""

    markup: ClassVar[tuple[str, str]] = ("", "")
    text_types: ClassVar[tuple[str, ...]] = ("mistral",)

    @property
    def patch(self) -> int:
        """Pixels along a side of a token."""
        return int(self.config.vision_config.patch_size * self.config.spatial_merge_size)

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        rows, columns = self._grid(processor, image.size, max_tokens)
        size = rows * self.patch, columns * self.patch
        image = image.resize(size[::-1], processor.resample)
        batch = processor([image], do_resize=False, return_tensors="pt")
        return Pixels(torch.as_tensor(batch["pixel_values"]), size, (Block(WHOLE, rows, columns),))

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        return math.prod(self._grid(processor, size, max_tokens))

    def _grid(self, processor: Any, size: tuple[int, int], max_tokens: int) -> tuple[int, int]:
        """Rows and columns of tokens: as the processor gives, or fewer of about the same shape."""
        width, height = size
        ratio = max(1.0, max(size) / processor.size["longest_edge"])
        rows, columns = (max(1, math.ceil(math.floor(side / ratio) / self.patch)) for side in (height, width))
        while rows * columns > max_tokens:
            shrink = min(0.99, math.sqrt(max_tokens / (rows * columns)))
            if rows >= columns:
                rows, columns = max(1, int(rows * shrink)), min(columns, max(1, round(columns * shrink)))
            else:
                rows, columns = min(rows, max(1, round(rows * shrink))), max(1, int(columns * shrink))
        return rows, columns

    def _rows(self, size: Sequence[int]) -> tuple[Row, ...]:
        rows, columns = (side // self.patch for side in size)
        return (*[Row(columns, after="[IMG_BREAK]")] * (rows - 1), Row(columns, after="[IMG_END]"))

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        most = [max(p.values.shape[side] for p in pixels) for side in (-2, -1)]
        values = torch.cat(
            [
                pad(p.values, (0, most[1] - p.values.shape[-1], 0, most[0] - p.values.shape[-2]))
                for p in pixels
            ]
        )
        attention = self.encoder_blocks(base)[-1].attention
        watch: AbstractContextManager[dict[str, Any]] = watching(attention) if signals else nullcontext({})
        with watch as seen:
            sizes = torch.tensor([p.grid for p in pixels], device=values.device)
            output = base.get_image_features(values.to(base.dtype), sizes, return_dict=True)
        own = self._signals(attention, pixels, seen) if signals else [None] * len(pixels)
        return [
            ImageFeatures(tokens, (), p.grid, p.blocks, s, self._rows(p.grid))
            for tokens, p, s in zip(output.pooler_output, pixels, own, strict=True)
        ]

    def _signals(
        self, attention: Any, pixels: Sequence[Pixels], seen: dict[str, Any]
    ) -> list[VisionSignals | None]:
        """Attention received within the image, mean over heads, rows and the patches of a token."""
        cos, sin = (part.float() for part in seen["position_embeddings"])
        q, k = (
            getattr(attention, f"{which}_proj")(seen["hidden_states"])[0]
            .unflatten(-1, (attention.num_heads, -1))
            .transpose(0, 1)
            for which in "qk"
        )
        q, k = rotate(q.float(), cos, sin), rotate(k.float(), cos, sin)
        own: list[VisionSignals | None] = []
        start = 0
        for p in pixels:
            rows, columns = (side // self.config.vision_config.patch_size for side in p.grid)
            part = slice(start, start + rows * columns)
            start = part.stop
            received = column_means(q[:, part], k[:, part], attention.scaling)
            a, b = (
                joined(values[None], rows, columns, self.config.spatial_merge_size)[0]
                for values in (received, k[:, part].mean(dim=0))
            )
            own.append(VisionSignals(a, b))
        return own

    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        return list(base.vision_tower.transformer.layers)

    def images_in(self, ids: Sequence[int], grids: Sequence[tuple[int, ...]]) -> list[ImageSpan]:
        return find_rows(ids, self.config.image_token_id, [self._rows(grid) for grid in grids])
