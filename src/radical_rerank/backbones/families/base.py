"""What a model family must provide: the `Family` contract and the data it works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from radical_rerank.backbones.view import project
from radical_rerank.method import DecoderShape
from radical_rerank.pruning import VisionSignals

# The kinds of decoder layers, by the names that configurations use.
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Block:
    """A rectangle of an image, (left, top, right, bottom) as fractions of it, and its grid of tokens."""

    box: tuple[float, float, float, float]
    rows: int
    columns: int


WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class ImageFeatures:
    """The vision encoder's output for one image: M tokens of width d.

    tokens: (M, d) after the merger, as they enter the decoder
    deepstack: for each of the first decoder layers, (M, d) to add to its output
    grid: the image's size as the family counts it, for positions
    blocks: which part of the image each token shows, block by block, row by row
    signals: attention and keys of the encoder's last block, if requested
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]
    signals: VisionSignals | None = None


@dataclass(frozen=True)
class Pixels:
    """One preprocessed image: the encoder's input, with the same `grid` and `blocks` as `ImageFeatures`."""

    values: Tensor
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]


class Family(ABC):
    """Everything the package needs to know about a model family. One file per family implements it.

    The first part says how images become tokens. The second part declares what is special about the decoder;
    most families leave it as it is.
    """

    markup: ClassVar[tuple[str, str]]
    """the text around an image's placeholder tokens"""
    text_types: ClassVar[tuple[str, ...]]
    """the text models that it is tested with, by their `model_type`"""

    def __init__(self, config: Any) -> None:
        """Take the model's configuration."""
        self.config = config

    # Images.

    @abstractmethod
    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        """Prepare one RGB image, scaled down to at most `max_tokens` visual tokens."""

    @abstractmethod
    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        """Return how many visual tokens `preprocess` gives an image of this (width, height)."""

    @abstractmethod
    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        """Run the vision encoder over these images at once.

        base: the model without its output head
        signals: also return the last block's `VisionSignals`
        """

    @abstractmethod
    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        """Return the encoder's blocks: a ranking can be stopped between any two of them."""

    @abstractmethod
    def inputs(self, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        """Return the model arguments for these images, given in the order of the prompt(s)."""

    def positions(self, mask: Tensor) -> Tensor | None:
        """Return positions for a left-padded batch if the model would count the padding, else None.

        mask: (B, S)
        """
        # Counted from the first real token: keys of a padded prompt are then those of the prompt alone.
        return (mask.cumsum(dim=1) - 1).clamp(min=0) if not mask.all() else None

    # The decoder.

    decoder: ClassVar[str] = "language_model"
    """the decoder's name in the model without its head"""
    known_kinds: ClassVar[tuple[str, ...]] = (FULL,)
    """the kinds of layers that it is tested with"""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        text = self.config.text_config
        return tuple(getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers)

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """The layers that keep keys and values."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind != LINEAR)

    @cached_property
    def readable(self) -> tuple[int, ...]:
        """The layers whose attention tells all visual tokens apart: stages that read attention go there."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind == FULL)

    @property
    def levels(self) -> int:
        """After how many of the first layers features are added to the visual tokens (DeepStack)."""
        return len(getattr(self.config.vision_config, "deepstack_visual_indexes", None) or ())

    def project(self, layer: Any, which: str, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's queries ("q") or keys ("k") as its attention uses them.

        hidden: (..., n, d) entering the layer; cos, sin: (..., n, hd) -> (..., heads, n, hd)
        """
        return project(layer, which, hidden, cos, sin)

    def rotary(self, text: Any, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Return rotary embeddings of these positions, (B, n), the same on all axes of M-RoPE."""
        sections = (getattr(text.config, "rope_parameters", None) or {}).get("mrope_section")
        cos, sin = text.rotary_emb(hidden, positions.expand(3, -1, -1) if sections else positions)
        return cos, sin

    def mask(
        self, kind: str, config: Any, hidden: Tensor, valid: Tensor | None, cache: Any, layer: int
    ) -> Any:
        """Return the mask that the model would make for a layer of this kind, as its kernel expects it.

        config: the text model's
        hidden: (B, r, d) the tokens that enter the layer
        valid: (B, n) which of all its tokens, cached ones first, are not padding; None if all
        """
        if kind == LINEAR:
            return valid
        from transformers.masking_utils import create_causal_mask

        return create_causal_mask(
            config=config, inputs_embeds=hidden, attention_mask=valid, past_key_values=cache, layer_idx=layer
        )

    @property
    def shape(self) -> DecoderShape:
        """The decoder's dimensions, for counting costs."""
        text = self.config.text_config
        return DecoderShape(
            num_layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            mlp=text.intermediate_size,
        )
