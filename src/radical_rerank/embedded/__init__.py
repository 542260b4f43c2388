"""Models that ship with the package, and how they are made."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from radical_rerank.embedded.scenes.drawing import IMAGE_SIZES
from radical_rerank.errors import OutOfWorldWarning


@dataclass(frozen=True)
class ShippedModel:
    """A model that ships with the package.

    Args:
        folder: its files, in Hugging Face format
        sizes: the (width, height) of the pictures that it was trained on
    """

    folder: Path
    sizes: frozenset[tuple[int, int]]

    def warn_of_other_worlds(self) -> None:
        """Warn that a picture is not of the world that the model was trained on."""
        warnings.warn(
            "the embedded model knows only generated scenes: for photographs, name a large model, for "
            'example "Qwen/Qwen3-VL-4B-Instruct"',
            OutOfWorldWarning,
            stacklevel=3,
        )


DEFAULT_MODEL = "scenes"
"""the model that is used when none is named"""

MODELS = {
    "scenes": ShippedModel(Path(__file__).parent / "scenes" / "weights", frozenset(IMAGE_SIZES)),
}
"""the models that ship, by name"""
