"""GLM-4.1V."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families.base import WHOLE, Block, Pixels
from radical_rerank.backbones.families.qwen_vl import QwenVL
from radical_rerank.backbones.view import project


class Glm(QwenVL):
    """GLM-4.1V: images as in Qwen-VL, M-RoPE on the even and odd dimensions of a part of each head."""

    markup: ClassVar[tuple[str, str]] = ("<|begin_of_image|>", "<|end_of_image|>")
    text_types: ClassVar[tuple[str, ...]] = ("glm4v_text",)

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        height, width = self._size(processor, image.size, max_tokens)
        image = image.resize((width, height), processor.resample)
        batch = processor([image], do_resize=False, return_tensors="pt")
        t, h, w = torch.as_tensor(batch["image_grid_thw"])[0].tolist()
        block = Block(WHOLE, h // processor.merge_size, w // processor.merge_size)
        return Pixels(torch.as_tensor(batch["pixel_values"]), (t, h, w), (block,))

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        height, width = self._size(processor, size, max_tokens)
        return int(height * width // (processor.patch_size * processor.merge_size) ** 2)

    def _size(self, processor: Any, size: tuple[int, int], max_tokens: int) -> tuple[int, int]:
        """The height and width that the image is scaled to: the processor's rule, which counts frames."""
        from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

        frames, factor = processor.temporal_patch_size, processor.patch_size * processor.merge_size
        most = min(processor.size["longest_edge"], max_tokens * factor**2 * frames)
        least = min(processor.size["shortest_edge"], most)
        height, width = smart_resize(frames, size[1], size[0], frames, factor, least, most)
        return height, width

    @staticmethod
    def project(layer: Any, which: str, hidden: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        return project(layer, which, hidden, cos, sin, turn=_rotate_pairs, **options)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbours. x: (..., heads, n, hd); cos, sin: (..., n, hd or less)."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    other = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((x * cos + other * sin, rest), dim=-1)
