"""What a model family must provide: the `Family` contract and the data it works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.view import project
from radical_rerank.errors import LayoutError
from radical_rerank.method import DecoderShape, LayerCost
from radical_rerank.pruning import VisionSignals

# The kinds of decoder layers, by the names that configurations use.
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class Block:
    """A rectangle of an image, (left, top, right, bottom) as fractions of it, and its grid of tokens."""

    box: tuple[float, float, float, float]
    rows: int
    columns: int


WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Row:
    """A run of an image's visual tokens in the prompt, and the markup that leaves with the last of them.

    tokens: the visual tokens
    before, after: text around them
    ends: image placeholders after them that show no part of the image (newline embeddings)
    """

    tokens: int
    before: str = ""
    after: str = ""
    ends: int = 0


Size: TypeAlias = "int | tuple[Row, ...]"
"""An image in the prompt: a number of visual tokens, or rows of them with markup between"""


@dataclass(frozen=True)
class ImageFeatures:
    """The vision encoder's output for one image: M tokens of width d.

    tokens: (M, d) after the merger, as they enter the decoder
    deepstack: for each of the first decoder layers, (M, d) to add to its output
    grid: the image's size as the family counts it, for positions
    blocks: which part of the image each token shows, block by block, row by row
    signals: attention and keys of the encoder's last block, if requested
    rows: the image in the prompt (`Size`), if there is markup between its tokens
    end: (d,) what enters the decoder at the rows' `ends`
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]
    signals: VisionSignals | None = None
    rows: tuple[Row, ...] = ()
    end: Tensor | None = None

    def text(self, mark: str) -> str:
        """Return the image as text. mark: the image token"""
        rows = self.rows or (Row(len(self.tokens)),)
        return "".join(f"{row.before}{mark * (row.tokens + row.ends)}{row.after}" for row in rows)

    @property
    def stream(self) -> Tensor:
        """(placeholders, d) what enters the decoder: the tokens, and `end` at the rows' ends."""
        if self.end is None:
            return self.tokens
        parts: list[Tensor] = []
        for row, tokens in zip(self.rows, self.tokens.split([row.tokens for row in self.rows]), strict=True):
            parts += [tokens, self.end.expand(row.ends, -1)]
        return torch.cat(parts)


@dataclass(frozen=True)
class Pixels:
    """One preprocessed image: the encoder's input, with the same `grid` and `blocks` as `ImageFeatures`."""

    values: Tensor
    grid: tuple[int, ...]
    blocks: tuple[Block, ...]


ImageSpan: TypeAlias = tuple[range, tuple[tuple[int, range], ...]]
"""The positions of an image in a prompt, and its markup as `Layout` takes it"""


def runs_of(ids: Sequence[int], token: int) -> list[range]:
    """Return the runs of one token."""
    runs: list[range] = []
    for position, other in enumerate(ids):
        if other != token:
            continue
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs


def find_rows(ids: Sequence[int], token: int, images: Sequence[Sequence[Row]]) -> list[ImageSpan]:
    """Find images in a prompt whose rows are known. Other tokens between two rows are markup.

    It belongs to the row before, if only that has text after it; one token does, if both have text between
    them; else all belong to the row after. Text before an image's first row is not found.
    """
    places = [position for position, other in enumerate(ids) if other == token]
    if sum(row.tokens + row.ends for rows in images for row in rows) != len(places):
        raise LayoutError(
            f"the prompt has {len(places)} image tokens, which the images' sizes do not explain: pass "
            "image_sizes=, as the processor gives them"
        )
    spans: list[ImageSpan] = []
    rest = iter(places)
    for rows in images:
        runs = [[next(rest) for _ in range(row.tokens + row.ends)] for row in rows]
        markup: list[tuple[int, range]] = []
        stop = runs[0][0]
        for number, (row, run) in enumerate(zip(rows, runs, strict=True)):
            span = range(run[0], run[0] + row.tokens)
            if number:
                markup += [(p, span) for p in range(stop, run[0])]
            stop = run[-1] + 1 + bool(row.after)
            if row.after and number + 1 < len(rows) and not rows[number + 1].before:
                stop = runs[number + 1][0]
            markup += [(p, span) for p in range(span.stop, stop)]
        spans.append((range(runs[0][0], stop), tuple(markup)))
    return spans


@dataclass(frozen=True)
class Tokens:
    """The tokens that a layer's attention sees, cached ones first: n of a prompt of S, and `new` after it.

    valid: (B, n + new) which are not padding; None if all are not
    index: (B, n) their positions in the prompt
    groups: (B, S) the group of each token of the prompt; tokens of one group, not −1, see each other in both
        directions. None if there are no groups
    """

    valid: Tensor | None
    index: Tensor
    length: int
    new: int = 0
    groups: Tensor | None = None

    def sees(self, rows: int, window: int | None) -> Tensor:
        """Return (B, rows, n + new): what the last `rows` tokens see, at most `window` positions back."""
        later = torch.arange(self.length, self.length + self.new, device=self.index.device)
        place = torch.cat((self.index, later.expand(len(self.index), -1)), dim=1)
        order = torch.arange(place.shape[1], device=place.device)
        seen = (order <= order[-rows:, None]).expand(len(place), -1, -1)
        if window is not None:
            seen = seen & (place[:, -rows:, None] - place[:, None] < window)
        if self.groups is not None:
            own = torch.cat((self.groups.gather(1, self.index), later.expand(len(place), -1) * 0 - 1), dim=1)
            seen = seen | ((own[:, -rows:, None] == own[:, None]) & (own[:, None] >= 0))
        if self.valid is not None:
            # Padding sees itself, so that its softmax has something to sum over.
            seen = (seen & self.valid[:, None].bool()) | (order == order[-rows:, None])
        return seen


@dataclass
class Family(ABC):
    """Everything the package needs to know about a model family. One file per family implements it.

    The first part says how images become tokens. The second part declares what is special about the decoder;
    most families leave it as it is.
    """

    markup: ClassVar[tuple[str, str]]
    """the text around an image's placeholder tokens"""
    text_types: ClassVar[tuple[str, ...]]
    """the text models that it is tested with, by their `model_type`"""

    config: Any
    """the model's configuration"""
    kinds: tuple[str, ...] = ()
    """the kind of each layer; this and the next two are set by `family_of`"""
    attending: tuple[int, ...] = ()
    """the layers that keep keys and values"""
    readable: tuple[int, ...] = ()
    """the layers whose attention tells all visual tokens apart: stages that read attention go there"""

    # Images.

    encoder: ClassVar[str] = "vision_tower"
    """the vision encoder's name in the model without its head"""

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
        pixels: on the encoder's device
        signals: also return the last block's `VisionSignals`
        """

    @abstractmethod
    def encoder_blocks(self, base: Any) -> Sequence[Any]:
        """Return the encoder's blocks: a ranking can be stopped between any two of them."""

    def inputs(self, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        """Return the model arguments for these images, given in the order of the prompt(s)."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        streams = [feature.stream for feature in features]
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=streams)}}

    def positions(self, mask: Tensor) -> Tensor | None:
        """Return positions for a left-padded batch if the model would count the padding, else None.

        mask: (B, S)
        """
        # Counted from the first real token: keys of a padded prompt are then those of the prompt alone.
        return (mask.cumsum(dim=1) - 1).clamp(min=0) if not mask.all() else None

    def images_in(self, ids: Sequence[int], grids: Sequence[tuple[int, ...]]) -> list[ImageSpan]:
        """Find the images of a prompt that another program wrote: each run of image tokens is one.

        grids: the images' sizes as the model takes them, or as `ImageFeatures` has them; for families that
            cannot tell without
        """
        return [(run, ()) for run in runs_of(ids, self.config.image_token_id)]

    # The decoder.

    decoder: ClassVar[str] = "language_model"
    """the decoder's name in the model without its head"""
    known_kinds: ClassVar[tuple[str, ...]] = (FULL,)
    """the kinds of layers that it is tested with"""
    own_masks: ClassVar[bool] = False
    """whether `mask` and `groups` make the masks of its layers; else they are causal"""

    project = staticmethod(project)
    """(layer, "q" or "k", hidden, cos, sin) -> the layer's queries or keys, as its attention uses them"""

    def rotary(self, text: Any, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Return rotary embeddings of these positions, (B, n), the same on all axes of M-RoPE."""
        sections = (getattr(text.config, "rope_parameters", None) or {}).get("mrope_section")
        cos, sin = text.rotary_emb(hidden, positions.expand(3, -1, -1) if sections else positions)
        return cos, sin

    def groups(self, arguments: dict[str, Any], images: Tensor) -> Tensor | None:
        """Return the groups of tokens that see each other in both directions (`Tokens`), if there are any.

        arguments: of the model without its head; images: (B, S) where the prompt has image tokens
        """
        return None

    def mask(self, kind: str, config: Any, hidden: Tensor, tokens: Tokens, cache: Any, layer: int) -> Any:
        """Return the mask that the model would make for a layer of this kind, as its kernel expects it.

        config: the text model's
        hidden: (B, r, d) the tokens that enter the layer
        tokens: all that its attention sees
        """
        raise NotImplementedError

    def layer_cost(self, layer: int, shape: DecoderShape) -> LayerCost:
        """Return what layer `layer` costs. shape: the decoder's dimensions, as if its layers were plain"""
        mlp = self.mlp_macs(layer) - 3 * shape.hidden * shape.mlp
        window = self.config.text_config.sliding_window - 1 if self.kinds[layer] == WINDOW else 0
        return replace(shape.plain, per_token=shape.plain.per_token + mlp, window=window)

    def mlp_macs(self, layer: int) -> int:
        """Return a token's multiply-accumulates in a layer's MLP: of a mixture, of its active experts."""
        text = self.config.text_config
        d, experts = text.hidden_size, getattr(text, "num_experts", None) or 0
        step = getattr(text, "decoder_sparse_step", 1)
        if not experts or layer in (getattr(text, "mlp_only_layers", None) or ()) or (layer + 1) % step:
            return int(3 * d * text.intermediate_size)
        shared = getattr(text, "shared_expert_intermediate_size", 0)
        width = text.num_experts_per_tok * text.moe_intermediate_size + shared
        # The router, the experts, and the gate of the shared one.
        return int(d * experts + 3 * d * width + (d if shared else 0))
