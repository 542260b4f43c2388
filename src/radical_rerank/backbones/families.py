"""One adapter per model family: where its parts are. The pruning mechanics never look here twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.errors import UnsupportedModelError
from radical_rerank.method import DecoderShape

# Decoders whose layers have input_layernorm and self_attn.{q,k}_proj (and q/k norms where they have
# any), and rotate halves: all that the row probe relies on.
TEXT_TYPES = ("qwen3_vl_text", "qwen2_5_vl_text", "llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Block:
    """A rectangle of an image, (left, top, right, bottom) in fractions of it, and its grid of tokens."""

    box: tuple[float, float, float, float]
    rows: int
    columns: int


WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class ImageFeatures:
    """What the vision encoder made of one image: M tokens of width d.

    tokens: (M, d) after the merger, as they enter the decoder
    deepstack: for each of the first decoder layers, (M, d) to add to its output
    grid: the family's own measure of the image, for positions
    blocks: which part of the image each token shows, block by block, row by row
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, *self.deepstack))

    def owned(self) -> ImageFeatures:
        """A copy that does not keep the whole batch alive that it was encoded in."""
        return replace(
            self, tokens=self.tokens.clone(), deepstack=tuple(level.clone() for level in self.deepstack)
        )


@dataclass(frozen=True)
class Pixels:
    """One preprocessed image: what the encoder takes, and the same measures as `ImageFeatures`."""

    values: Tensor
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]


class Family(Protocol):
    """What the rest of the package asks of a model family."""

    markup: tuple[str, str]
    """the text around an image's placeholder tokens"""

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        """One RGB image, scaled down to at most `max_tokens` visual tokens."""

    def encode(self, model: Any, pixels: Sequence[Pixels]) -> list[ImageFeatures]:
        """Run the vision encoder over these images at once."""

    def inputs(self, model: Any, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        """The model arguments that stand for these images, in the order of the prompt(s)."""


class QwenVL:
    """Qwen3-VL and Qwen2.5-VL: images of any size, merged 2 × 2, M-RoPE; DeepStack on Qwen3-VL."""

    markup = ("<|vision_start|>", "<|vision_end|>")

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        per_token = (processor.patch_size * processor.merge_size) ** 2
        largest = min(processor.size["longest_edge"], max_tokens * per_token)
        size = {"longest_edge": largest, "shortest_edge": min(processor.size["shortest_edge"], largest)}
        batch = processor([image], size=size, return_tensors="pt")
        t, h, w = batch["image_grid_thw"][0].tolist()
        block = Block(WHOLE, h // processor.merge_size, w // processor.merge_size)
        return Pixels(batch["pixel_values"], (t, h, w), (block,))

    def encode(self, model: Any, pixels: Sequence[Pixels]) -> list[ImageFeatures]:
        output = base_model(model).get_image_features(
            torch.cat([p.values for p in pixels]).to(model.device),
            torch.tensor([p.grid for p in pixels], device=model.device),
            return_dict=True,
        )
        levels = list(zip(*(getattr(output, "deepstack_features", None) or []), strict=True))
        return [
            ImageFeatures(tokens, tuple(levels[i]) if levels else (), p.grid, p.blocks)
            for i, (tokens, p) in enumerate(zip(output.pooler_output, pixels, strict=True))
        ]

    def inputs(self, model: Any, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        image = BaseModelOutputWithDeepstackFeatures(
            pooler_output=tuple(f.tokens for f in features),
            deepstack_features=[list(level) for level in zip(*(f.deepstack for f in features), strict=True)],
        )
        return {
            "mm_encoder_outputs": {"image": image},
            "image_grid_thw": torch.tensor([f.grid for f in features], device=input_ids.device),
            "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
        }


class InternVL:
    """InternVL 2.5 (converted), 3 and 3.5 in their -hf form: square tiles, pixel shuffle, plain RoPE."""

    markup = ("<img>", "</img>")

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        side = processor.size["height"], processor.size["width"]
        tiles = max_tokens // self.tokens_per_tile
        if tiles < 3:  # two tiles and their thumbnail are the least that cropping gives
            batch = processor([image], crop_to_patches=False, return_tensors="pt")
            boxes = [WHOLE]
        else:
            most = min(tiles - 1, processor.max_patches)
            batch = processor([image], crop_to_patches=True, max_patches=most, return_tensors="pt")
            columns, rows = get_optimal_tiled_canvas(
                (image.height, image.width), side, processor.min_patches, most
            )
            boxes = [
                (c / columns, r / rows, (c + 1) / columns, (r + 1) / rows)
                for r in range(rows)
                for c in range(columns)
            ]
            boxes += [WHOLE] if len(boxes) > 1 else []
        edge = round(self.tokens_per_tile**0.5)
        blocks = tuple(Block(box, edge, edge) for box in boxes)
        return Pixels(torch.as_tensor(batch["pixel_values"]), (len(blocks),), blocks)

    def __init__(self, config: Any) -> None:
        self.tokens_per_tile: int = config.image_seq_length

    def encode(self, model: Any, pixels: Sequence[Pixels]) -> list[ImageFeatures]:
        values = torch.cat([p.values for p in pixels]).to(model.device)
        tiles = base_model(model).get_image_features(pixel_values=values, return_dict=True).pooler_output
        parts = tiles.split([len(p.values) for p in pixels])
        return [
            ImageFeatures(part.flatten(0, 1), (), p.grid, p.blocks)
            for part, p in zip(parts, pixels, strict=True)
        ]

    def inputs(self, model: Any, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        tokens = torch.cat([f.tokens for f in features])
        tiles = tokens.view(-1, self.tokens_per_tile, tokens.shape[-1])
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tiles)}}


def family_of(config: Any) -> Family:
    """The adapter for a model's configuration, or an error that names what is not supported."""
    known = {"qwen3_vl": QwenVL, "qwen2_5_vl": QwenVL}
    kind = getattr(config, "model_type", type(config).__name__)
    text = getattr(getattr(config, "text_config", None), "model_type", None)
    if kind not in (*known, "internvl"):
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported; there are: {', '.join(sorted([*known, 'internvl']))}"
        )
    if text not in TEXT_TYPES:
        raise UnsupportedModelError(
            f"{kind} on a {text!r} text model is not supported; there are: {', '.join(TEXT_TYPES)}"
        )
    if "sliding_attention" in (getattr(config.text_config, "layer_types", None) or ()):
        raise UnsupportedModelError(f"{kind} with sliding-window attention layers is not supported")
    return InternVL(config) if kind == "internvl" else known[kind]()


def base_model(model: Any) -> Any:
    """The model without its output head."""
    return model.model if hasattr(model, "lm_head") else model


def text_model(model: Any) -> Any:
    """The decoder of a supported model: it has `layers`, and its layers are called with keyword arguments."""
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model")
    family_of(model.config)
    return base_model(model).language_model


def decoder_shape(config: Any) -> DecoderShape:
    text = config.text_config
    return DecoderShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp=text.intermediate_size,
    )
