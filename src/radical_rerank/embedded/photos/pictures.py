"""Freely licensed photographs to try the model on: scikit-image's sample pictures, all public domain."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from radical_rerank.errors import MissingExtraError

ASKED = {
    "a cat": "chelsea.png",
    "a cup of coffee": "coffee.png",
    "a rocket": "rocket.jpg",
    "a motorcycle": "motorcycle_left.png",
    "an astronaut in a space suit": "astronaut.png",
    "a man with a camera on a tripod": "camera.png",
    "old coins": "coins.png",
    "a clock": "clock_motion.png",
    "a brick wall": "brick.png",
    "grass": "grass.png",
    "gravel and stones": "gravel.png",
    "the moon": "moon.png",
}
"""plain words for the pictures, and the file that each means"""
OTHERS = ("hubble_deep_field.jpg",)
"""pictures that no query asks for"""


def sample_pictures() -> list[Path]:
    """Return the files of the pictures, in the order of their names."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise MissingExtraError("scikit-image", "demo")
    folder = Path(spec.origin).parent / "data"
    return [folder / name for name in sorted({*ASKED.values(), *OTHERS})]
