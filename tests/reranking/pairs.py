"""Plain forward passes of (query, image) prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from radical_rerank.backbones import Backbone
from radical_rerank.reranking.prompt import Prompt


def stock_inputs(
    backbone: Backbone, prompt: Prompt, images: Sequence[Image.Image], limit: int
) -> dict[str, Any]:
    """The inputs of a plain forward pass of a Qwen model: token ids and pixels."""
    pixels = [backbone.preprocess(picture, limit) for picture in images]
    ids = torch.tensor([prompt.ids])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.cat([p.values for p in pixels]),
        "image_grid_thw": torch.tensor([p.grid for p in pixels]),
        "mm_token_type_ids": (ids == backbone.image_token_id).int(),
    }
