"""What a model family must provide: the `Family` contract and the data it works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from PIL import Image
from torch import Tensor

from radical_rerank.pruning import VisionSignals


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


class Family(Protocol):
    """Everything the package needs to know about a model family. One file per family implements it."""

    markup: ClassVar[tuple[str, str]]
    """the text around an image's placeholder tokens"""

    def __init__(self, config: Any) -> None:
        """Take the model's configuration."""

    def preprocess(self, processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        """Prepare one RGB image, scaled down to at most `max_tokens` visual tokens."""

    def count_tokens(self, processor: Any, size: tuple[int, int], max_tokens: int) -> int:
        """Return how many visual tokens `preprocess` gives an image of this (width, height)."""

    def encode(self, base: Any, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        """Run the vision encoder over these images at once.

        base: the model without its output head
        signals: also return the last block's `VisionSignals`
        """

    def inputs(self, features: Sequence[ImageFeatures], input_ids: Tensor) -> dict[str, Any]:
        """Return the model arguments for these images, given in the order of the prompt(s)."""

    def positions(self, mask: Tensor) -> Tensor | None:
        """Return positions for a left-padded batch if the model would count the padding, else None.

        mask: (B, S)
        """
