"""A small corpus of drawn pictures in the files of Flickr8k, and a plan that trains on it in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from radical_rerank.embedded.photos.training.plan import Phase, Plan

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 60, 220), "yellow": (230, 210, 60)}
TINY = Plan(
    num_layers=6,
    views=2,
    held_out=4,
    align_steps=4,
    align_pictures=6,
    phases=(Phase(2, 3, 2, 4), Phase(2, 4, 2, 6)),
)


def write_corpus(folder: Path, train: int = 12, dev: int = 8) -> Path:
    """Write pictures of one colour, with two captions each."""
    (folder / "images").mkdir(parents=True)
    lines, splits = [], {"train": range(train), "dev": range(train, train + dev)}
    rng = np.random.default_rng(0)
    for number in range(train + dev):
        colour = list(COLOURS)[number % len(COLOURS)]
        noise = rng.integers(-20, 20, (48 + 4 * (number % 3), 64, 3))
        pixels = (np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.jpg")
        lines += [f"{number}.jpg#0\tA {colour} wall .", f"{number}.jpg#1\tThe picture is {colour} ."]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for split, numbers in splits.items():
        names = "".join(f"{number}.jpg\n" for number in numbers)
        (folder / f"Flickr_8k.{split}Images.txt").write_text(names, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("flickr8k") / "data")
