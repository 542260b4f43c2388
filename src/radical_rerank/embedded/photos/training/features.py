"""The first stage of training: EfficientNet-lite0 over all photographs, once, in several views of each."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.lite_vision import HEAD, MIDDLE
from radical_rerank.embedded.photos.datasets import photo_gallery
from radical_rerank.embedded.photos.training.model import CELLS, make_image_processor
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking.encoding import ImageLike, load_image

TOGETHER = 4
"""photographs that run through the tower together; more no longer fit the processor's cache"""
STEP = 6 / 255
"""lite0's last map lies between 0 and 6; it is kept in 8 bits"""


@dataclass(frozen=True)
class Photo:
    """A photograph and its captions."""

    name: str
    picture: ImageLike
    captions: tuple[str, ...]


def load_split(data: str | Path, split: str) -> list[Photo]:
    """Return the photographs of a split of Flickr8k. split: "train" or "dev" """
    corpus = photo_gallery(data, split=split, captions="all")
    captions: dict[str, list[str]] = {name: [] for name in corpus.gallery}
    for task in corpus.tasks:
        captions[next(iter(task.relevant))].append(task.text)
    return [Photo(name, corpus.picture(name), tuple(texts)) for name, texts in captions.items()]


def view_of(photo: Photo, view: int) -> Image.Image:
    """Return one view of a photograph as an RGB image. The same photograph and number give the same view."""
    image = load_image(photo.picture, name=photo.name)
    rng = random.Random(f"{photo.name} {view}")
    if view >= 2:
        scale, stretch = rng.uniform(0.5, 1.0) ** 0.5, np.exp(rng.uniform(-0.25, 0.25))
        width = min(image.width, round(image.width * scale * stretch))
        height = min(image.height, round(image.height * scale / stretch))
        left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
        image = image.crop((left, top, left + width, top + height))
    if view == 1 or (view >= 2 and rng.random() < 0.5):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


class Features:
    """The maps of one view of all training photographs, as files that are read where needed.

    Args:
        folder: of the run
        view: the number of the view
    """

    def __init__(self, folder: Path, view: int) -> None:
        self.files = [folder / "features" / f"train-{view}-{name}.npy" for name in ("last", "fine")]

    @property
    def exist(self) -> bool:
        """Whether the maps were made."""
        return all(file.is_file() for file in self.files)

    def make(self, cells: Any, photos: Sequence[Photo], view: int, progress: Progress = silent) -> None:
        """Run the tower's convolutions over these photographs and write their maps.

        A kill leaves no file under a final name.
        """
        self.files[0].parent.mkdir(parents=True, exist_ok=True)
        parts = [file.with_suffix(".part") for file in self.files]
        shapes = ((len(photos), CELLS, HEAD), (len(photos), CELLS, 4 * MIDDLE))
        last, fine = (
            np.lib.format.open_memmap(part, "w+", dtype, shape)
            for part, dtype, shape in zip(parts, (np.uint8, np.float16), shapes, strict=True)
        )
        with torch.inference_mode():
            batches = -(-len(photos) // TOGETHER)
            for start, pixels in progress(_batches(photos, view), self.files[0].stem, total=batches):
                rows = slice(start, start + len(pixels))
                maps = cells.maps(pixels)
                last[rows] = (maps[0] / STEP).round().byte().numpy()
                fine[rows] = maps[1].half().numpy()
        for array, part, file in zip((last, fine), parts, self.files, strict=True):
            array.flush()
            os.replace(part, file)

    def read(self, rows: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (n, M, 1280) and (n, M, 448): the maps of these photographs."""
        last, fine = (np.load(file, mmap_mode="r")[rows] for file in self.files)
        return torch.from_numpy(last).float() * STEP, torch.from_numpy(fine).float()


def _batches(photos: Sequence[Photo], view: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first, pixels) of a few photographs at a time, prepared one batch ahead."""
    processor = make_image_processor()

    def prepared(start: int) -> Tensor:
        images = [view_of(photo, view) for photo in photos[start : start + TOGETHER]]
        pixels: Tensor = processor(images, return_tensors="pt")["pixel_values"]
        return pixels

    with ThreadPoolExecutor(1) as pool:
        starts = range(0, len(photos), TOGETHER)
        waiting = pool.submit(prepared, 0)
        for start in starts:
            pixels = waiting.result()
            if start + TOGETHER < len(photos):
                waiting = pool.submit(prepared, start + TOGETHER)
            yield start, pixels
