"""One adapter per model family: where its parts are. The pruning mechanics never look here twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.hooks import Hooks
from radical_rerank.backbones.probe import rotate
from radical_rerank.errors import UnsupportedModelError
from radical_rerank.method import DecoderShape
from radical_rerank.pruning import VisionSignals

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
    signals: what the encoder's last block says of the tokens, where it was asked for
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]
    signals: VisionSignals | None = None

    @property
    def nbytes(self) -> int:
        found = () if self.signals is None else (self.signals.attention, self.signals.keys)
        return sum(t.numel() * t.element_size() for t in (self.tokens, *self.deepstack, *found))

    def owned(self) -> ImageFeatures:
        """A copy that does not keep the whole batch alive that it was encoded in."""
        signals = self.signals
        return replace(
            self,
            tokens=self.tokens.clone(),
            deepstack=tuple(level.clone() for level in self.deepstack),
            signals=signals and VisionSignals(signals.attention.clone(), signals.keys.clone()),
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

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        """How many visual tokens `preprocess` gives an image of this width and height."""

    def encode(self, model: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        """Run the vision encoder over these images at once; with its last block's signals if asked."""

    def inputs(self, model: Any, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        """The model arguments that stand for these images, in the order of the prompt(s)."""

    def positions(self, mask: Tensor) -> Tensor | None:
        """Positions of a padded batch, where the model's own would count the padding. mask: (B, S)."""


class QwenVL:
    """Qwen3-VL and Qwen2.5-VL: images of any size, merged 2 × 2, M-RoPE; DeepStack on Qwen3-VL."""

    markup = ("<|vision_start|>", "<|vision_end|>")

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
        return processor.get_number_of_image_patches(height, width, limits) // processor.merge_size**2

    def _pixels(self, processor: Any, max_tokens: int) -> tuple[int, int]:
        """The fewest and the most pixels that an image is scaled to."""
        per_token = (processor.patch_size * processor.merge_size) ** 2
        most = min(processor.size["longest_edge"], max_tokens * per_token)
        return min(processor.size["shortest_edge"], most), most

    def encode(self, model: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        tower = base_model(model).visual
        with _watching(tower.blocks[-1].attn, signals) as seen:
            output = base_model(model).get_image_features(
                torch.cat([p.values for p in pixels]).to(model.device),
                torch.tensor([p.grid for p in pixels], device=model.device),
                return_dict=True,
            )
        levels = list(zip(*(getattr(output, "deepstack_features", None) or []), strict=True))
        found = self._signals(tower, pixels, seen) if signals else [None] * len(pixels)
        return [
            ImageFeatures(tokens, tuple(levels[i]) if levels else (), p.grid, p.blocks, found[i])
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
        found: list[VisionSignals | None] = []
        start = 0
        for p in pixels:
            part = slice(start, start + math.prod(p.grid))
            start = part.stop
            received = _column_means(q[:, part], k[:, part], attention.scaling)
            keys = k[:, part].mean(dim=0)
            found.append(
                VisionSignals(received.view(-1, group).mean(-1), keys.unflatten(0, (-1, group)).mean(1))
            )
        if hasattr(tower, "fullatt_block_indexes"):  # Qwen2.5-VL's blocks see the tokens window by window
            found = self._in_order(tower, pixels, found)
        return found

    def _in_order(
        self, tower: Any, pixels: Sequence[Pixels], found: list[VisionSignals | None]
    ) -> list[VisionSignals | None]:
        from transformers.vision_utils import get_vision_window_index

        result: list[VisionSignals | None] = []
        for p, signals in zip(pixels, found, strict=True):
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

    def positions(self, mask: Tensor) -> Tensor | None:
        return None


class InternVL:
    """InternVL 2.5 (converted), 3 and 3.5 in their -hf form: square tiles, pixel shuffle, plain RoPE."""

    markup = ("<img>", "</img>")

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        options, blocks = self._tiles(processor, image.size, max_tokens)
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
        tiles = max_tokens // self.tokens_per_tile
        edge = round(self.tokens_per_tile**0.5)
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

    def __init__(self, config: Any) -> None:
        self.tokens_per_tile: int = config.image_seq_length

    def encode(self, model: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        found: dict[int, ImageFeatures] = {}
        for size in {p.values.shape[1:] for p in pixels}:  # tiles of one size run together
            same = [i for i, p in enumerate(pixels) if p.values.shape[1:] == size]
            batch = self._encode(model, [pixels[i] for i in same], signals)
            found |= dict(zip(same, batch, strict=True))
        return [found[i] for i in range(len(pixels))]

    def _encode(self, model: Any, pixels: Sequence[Pixels], signals: bool) -> list[ImageFeatures]:
        values = torch.cat([p.values for p in pixels]).to(model.device)
        attention = base_model(model).vision_tower.encoder.layer[-1].attention
        with _watching(attention, signals) as seen:
            tiles = base_model(model).get_image_features(pixel_values=values, return_dict=True).pooler_output
        counts = [len(p.values) for p in pixels]
        found: list[VisionSignals | None] = [None] * len(pixels)
        if signals:
            received, keys = self._signals(attention, seen["hidden_states"])
            found = [
                VisionSignals(a.flatten(), k.flatten(0, 1))
                for a, k in zip(received.split(counts), keys.split(counts), strict=True)
            ]
        return [
            ImageFeatures(part.flatten(0, 1), (), p.grid, p.blocks, own)
            for part, p, own in zip(tiles.split(counts), pixels, found, strict=True)
        ]

    def _signals(self, attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Per tile, (tiles, M) the CLS token's attention and (tiles, M, hd) keys, means over heads and
        over the 2 × 2 patches that the pixel shuffle joins."""
        split = (attention.num_heads, attention.head_dim)
        q = attention.q_norm(attention.q_proj(hidden[:, :1])).unflatten(-1, split).transpose(1, 2).float()
        k = attention.k_norm(attention.k_proj(hidden)).unflatten(-1, split).transpose(1, 2).float()
        weights = (q @ k.transpose(-1, -2) * attention.scale).softmax(-1).mean(dim=1)[:, 0, 1:]
        keys = k.mean(dim=1)[:, 1:]
        edge = math.isqrt(weights.shape[1])
        grid = (edge // 2, 2, edge // 2, 2)
        return (
            weights.unflatten(1, grid).mean(dim=(2, 4)).flatten(1),
            keys.unflatten(1, grid).mean(dim=(2, 4)).flatten(1, 2),
        )

    def inputs(self, model: Any, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        tiles = torch.cat([f.tokens for f in features])[None]
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tiles)}}

    def positions(self, mask: Tensor) -> Tensor | None:
        # Counted from the first real token: keys of a padded prompt are then those of the prompt alone.
        return (mask.cumsum(dim=1) - 1).clamp(min=0) if not mask.all() else None


@contextmanager
def _watching(module: Any, wanted: bool) -> Iterator[dict[str, Any]]:
    """What a module is called with inside the block."""
    seen: dict[str, Any] = {}

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, **({"hidden_states": args[0]} if args else {}))

    if not wanted:
        yield seen
        return
    with Hooks() as hooks:
        hooks.before(module, note)
        yield seen


def _column_means(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """(heads, n, hd) each -> (n,) attention received, mean over heads and rows, row chunk by row chunk."""
    total = q.new_zeros(q.shape[1])
    for rows in q.split(256, dim=1):
        total += (rows @ k.transpose(-1, -2) * scaling).softmax(-1).sum(dim=1).mean(dim=0)
    return total / q.shape[1]


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


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside torch.compile's, PEFT's or a data-parallel wrapper."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def base_model(model: Any) -> Any:
    """The model without its output head."""
    model = unwrapped(model)
    return model.model if hasattr(model, "lm_head") else model


def text_model(model: Any) -> Any:
    """The decoder of a supported model: it has `layers`, and its layers are called with keyword arguments."""
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model")
    family_of(model.config)
    return base_model(model).language_model


def encoder_blocks(model: Any) -> list[Any]:
    """The blocks of a supported model's vision encoder."""
    base = base_model(model)
    return list(base.visual.blocks if hasattr(base, "visual") else base.vision_tower.encoder.layer)


def deepstack_levels(model: Any) -> int:
    """How many of the decoder's first layers get visual features added to their output."""
    return len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())


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
