"""Models that ship with the package, and how they are made."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from radical_rerank.embedded.scenes.drawing import IMAGE_SIZES
from radical_rerank.errors import OutOfWorldWarning, SmallModelWarning

LARGE = '"Qwen/Qwen3-VL-4B-Instruct"'
"""a model for real work"""


@dataclass(frozen=True)
class ShippedModel:
    """A model that ships with the package.

    Args:
        folder: its files, in Hugging Face format
        limits: what it is and is not, in one line
        sizes: the (width, height) of the pictures that it was trained on; None for any
    """

    folder: Path
    limits: str
    sizes: frozenset[tuple[int, int]] | None = None

    def warn_of_limits(self) -> None:
        """Say what the model is and is not. Of a model for any picture it is said once."""
        if self.sizes is not None:
            warnings.warn(self.limits, OutOfWorldWarning, stacklevel=2)
        elif self.limits not in _said:
            _said.add(self.limits)
            warnings.warn(self.limits, SmallModelWarning, stacklevel=2)


_said: set[str] = set()
"""Python itself forgets which warnings it has shown whenever somebody changes its filters"""

DEFAULT_MODEL = "photos"
"""the model that is used when none is named"""

_HERE = Path(__file__).parent
MODELS = {
    "photos": ShippedModel(
        _HERE / "photos" / "weights",
        "photos is a small model, trained on 6,000 photographs of people, dogs and the outdoors: for real "
        f"work, name a large model, for example {LARGE}",
    ),
    "scenes": ShippedModel(
        _HERE / "scenes" / "weights",
        "the model scenes knows only generated scenes: for photographs, use the model photos or a large "
        f"model, for example {LARGE}",
        frozenset(IMAGE_SIZES),
    ),
}
"""the models that ship, by name"""
