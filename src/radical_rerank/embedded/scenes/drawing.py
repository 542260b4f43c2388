"""Draws scenes: seeded backgrounds, clutter and sprites. Also says which cell of a picture shows which thing.

The train, validation and test splits share no sprite and no background.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from radical_rerank.embedded.scenes.world import COLOURS, GRID, SHAPES, SIZES, Thing

SPLITS = ("train", "validation", "test")
CELL = 16
"""the side of a visual token, in pixels"""
IMAGE_SIZES = ((96, 96), (96, 96), (112, 80), (80, 112), (112, 96), (96, 112), (128, 80), (80, 128))
"""(width, height); the square is there twice, since it is the most frequent"""

_RGB = {
    "red": (208, 32, 36),
    "green": (36, 150, 60),
    "blue": (34, 78, 208),
    "yellow": (238, 208, 34),
    "purple": (128, 42, 168),
    "orange": (240, 128, 20),
    "pink": (246, 140, 190),
    "cyan": (40, 200, 214),
}
_PIXELS = {"small": (14, 18), "large": (29, 36)}
_VARIANTS = {"train": 160, "validation": 20, "test": 20}
"""sprites per shape and size; many for training, so that the model generalizes to those of other splits"""
_BACKGROUNDS = 64
_ODDITIES = ("zigzag", "hash", "blot", "spokes")
"""eye-catching marks that no sentence mentions"""


@dataclass(frozen=True)
class Scene:
    """What a picture shows.

    Args:
        width, height: of the picture, in pixels
        things: what sentences can mention
        background: the number of the texture behind them
        seed: of everything else: clutter, jitter and which sprites are used
        split: "train", "validation" or "test"
        oddities: (kind, slot) of marks that no sentence mentions
    """

    width: int
    height: int
    things: tuple[Thing, ...]
    background: int
    seed: int
    split: str
    oddities: tuple[tuple[str, tuple[int, int]], ...] = field(default=())


def render(scene: Scene) -> tuple[Image.Image, np.ndarray]:
    """Draw a scene.

    Returns:
        The picture, and an array (things, rows, columns): the fraction of each 16 × 16 cell that each thing
        covers.

    Example:
        >>> scene = Scene(96, 96, (Thing("star", "red", "small", (0, 0)),), 0, 0, "test")
        >>> image, cover = render(scene)
        >>> image.size, cover.shape
        ((96, 96), (1, 6, 6))
    """
    rng = np.random.default_rng([SPLITS.index(scene.split), scene.seed])
    canvas = _background(scene.split, scene.background)[: scene.height, : scene.width].copy()
    _clutter(canvas, rng)
    for kind, slot in scene.oddities:
        mask = _oddities(scene.split)[_ODDITIES.index(kind), int(rng.integers(_VARIANTS[scene.split]))]
        shade = float(rng.choice([18.0, 245.0]))
        _paste(canvas, mask, *_corner(scene, slot, 1, mask.shape, rng), np.array([shade] * 3))
    cover = np.zeros((len(scene.things), scene.height // CELL, scene.width // CELL), dtype=np.float32)
    for number, thing in enumerate(scene.things):
        mask = _sprites(scene.split)[thing.shape, thing.size][rng.integers(_VARIANTS[scene.split])]
        colour = np.array(_RGB[thing.colour]) * rng.uniform(0.86, 1.1) + rng.normal(0, 7, 3)
        x, y = _corner(scene, thing.slot, 2 if thing.size == "large" else 1, mask.shape, rng)
        _paste(canvas, mask, x, y, colour)
        whole = np.zeros((scene.height, scene.width), dtype=np.float32)
        whole[y : y + mask.shape[0], x : x + mask.shape[1]] = mask
        cover[number] = whole.reshape(cover.shape[1], CELL, cover.shape[2], CELL).mean(axis=(1, 3))
    canvas += rng.normal(0, 3, canvas.shape).astype(np.float32)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8)), cover


def shrink(image: Image.Image, cover: np.ndarray, factor: float) -> tuple[Image.Image, np.ndarray]:
    """Scale a picture and its cover down. The new sides are multiples of a cell, too."""
    rows, columns = (max(2, round(side * factor)) for side in cover.shape[1:])
    small = image.resize((columns * CELL, rows * CELL), Image.Resampling.BICUBIC)
    down, across = (_overlap(*sides) for sides in zip((rows, columns), cover.shape[1:], strict=True))
    return small, (down @ cover @ across.T).astype(np.float32)


def _overlap(new: int, old: int) -> np.ndarray:
    """Return (new, old): the fraction of each of `new` equal parts of a line in each of `old` equal parts."""
    edges = np.arange(new + 1) * old / new
    part = np.arange(old)
    low, high = np.maximum(edges[:-1, None], part), np.minimum(edges[1:, None], part + 1)
    return (high - low).clip(min=0) * new / old


def _corner(
    scene: Scene, slot: tuple[int, int], reach: int, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[int, int]:
    """Return the corner (x, y) of a sprite: centred in its slots, moved a little if there is room."""
    place = []
    for axis, (extent, size) in enumerate(((scene.width, shape[1]), (scene.height, shape[0]))):
        start, room = slot[axis] * extent / GRID, reach * extent / GRID
        free = (room - size) / 2
        offset = free + (rng.uniform(-0.7, 0.7) * free if free > 0 else 0)
        place.append(int(np.clip(round(start + offset), 0, extent - size)))
    return place[0], place[1]


def _paste(canvas: np.ndarray, mask: np.ndarray, x: int, y: int, colour: np.ndarray) -> None:
    region = canvas[y : y + mask.shape[0], x : x + mask.shape[1]]
    region += mask[..., None] * (colour.astype(np.float32) - region)


def _clutter(canvas: np.ndarray, rng: np.random.Generator) -> None:
    """Draw muted strokes and specks."""
    height, width = canvas.shape[:2]
    layer = Image.new("L", (width, height))
    pen = ImageDraw.Draw(layer)
    for _ in range(int(rng.integers(1, 5))):
        x, y = rng.integers(0, width), rng.integers(0, height)
        dx, dy = rng.integers(-30, 31, 2)
        pen.line((int(x), int(y), int(x + dx), int(y + dy)), fill=170, width=int(rng.integers(1, 3)))
    for _ in range(int(rng.integers(2, 9))):
        left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
        pen.ellipse((left, top, left + 2, top + 2), fill=200)
    shade = np.full(3, rng.uniform(50, 210)) + rng.normal(0, 12, 3)
    _paste(canvas, np.asarray(layer, dtype=np.float32) / 255, 0, 0, shade)


# Sprites and backgrounds of each split.


def _seeded(split: str, what: int) -> np.random.Generator:
    return np.random.default_rng([17, SPLITS.index(split), what])


@lru_cache(maxsize=len(SPLITS))
def _sprites(split: str) -> dict[tuple[str, str], list[np.ndarray]]:
    rng = _seeded(split, 0)
    bank: dict[tuple[str, str], list[np.ndarray]] = {}
    for shape in SHAPES:
        for size in SIZES:
            low, high = _PIXELS[size]
            bank[shape, size] = [
                _mask(_outline(shape, rng), int(rng.integers(low, high + 1)), shape == "ring")
                for _ in range(_VARIANTS[split])
            ]
    return bank


def _outline(shape: str, rng: np.random.Generator) -> np.ndarray:
    """Return (n, 2) corners of a shape in the unit square, turned and stretched a little."""
    turn = math.radians(float(rng.uniform(-12, 12)))
    if shape in ("circle", "ring"):
        angles = np.linspace(0, 2 * math.pi, 40, endpoint=False)
        points = np.stack([np.cos(angles), np.sin(angles)], 1)
    elif shape == "square":
        points = np.array([[-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]])
    elif shape == "diamond":
        points = np.array([[0, -1], [0.72, 0], [0, 1], [-0.72, 0]], dtype=float)
    elif shape == "triangle":
        points = np.array([[0, -0.95], [0.98, 0.8], [-0.98, 0.8]])
    elif shape == "star":
        angles = np.arange(10) * math.pi / 5 - math.pi / 2
        radius = np.where(np.arange(10) % 2, 0.42, 1.0)
        points = np.stack([np.cos(angles), np.sin(angles)], 1) * radius[:, None]
    elif shape == "cross":
        a, b = 0.32, 0.95
        arm = [[-a, -b], [a, -b], [a, -a]]  # and the same turned by 90°, three times
        points = np.array(
            [*arm, *([-y, x] for x, y in arm), *([-x, -y] for x, y in arm), *([y, -x] for x, y in arm)]
        )
    else:  # heart
        t = np.linspace(0, 2 * math.pi, 40, endpoint=False)
        points = np.stack(
            [
                np.sin(t) ** 3,
                -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)) / 16 - 0.1,
            ],
            1,
        )
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    points = points @ rotation.T * rng.uniform(0.92, 1.0, (1, 2))
    points = points + rng.normal(0, 0.015, points.shape)  # no two sprites are the same, not even circles
    unit: np.ndarray = points / np.abs(points).max() / 2 + 0.5
    return unit


def _mask(points: np.ndarray, size: int, hollow: bool = False) -> np.ndarray:
    """Return (size, size): the fraction of each pixel that a polygon covers."""
    scale = 8 * size
    layer = Image.new("L", (scale, scale))
    pen = ImageDraw.Draw(layer)
    pen.polygon([(float(x) * (scale - 1), float(y) * (scale - 1)) for x, y in points], fill=255)
    if hollow:
        inner = 0.5 + (points - 0.5) * 0.52
        pen.polygon([(float(x) * (scale - 1), float(y) * (scale - 1)) for x, y in inner], fill=0)
    small = layer.resize((size, size), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / 255


@lru_cache(maxsize=len(SPLITS))
def _oddities(split: str) -> dict[tuple[int, int], np.ndarray]:
    rng = _seeded(split, 1)
    bank = {}
    for number, kind in enumerate(_ODDITIES):
        for variant in range(_VARIANTS[split]):
            size = int(rng.integers(14, 19))
            layer = Image.new("L", (4 * size, 4 * size))
            _draw_oddity(ImageDraw.Draw(layer), kind, 4 * size - 1, rng)
            small = layer.resize((size, size), Image.Resampling.BOX)
            bank[number, variant] = np.asarray(small, dtype=np.float32) / 255
    return bank


def _draw_oddity(pen: ImageDraw.ImageDraw, kind: str, edge: int, rng: np.random.Generator) -> None:
    if kind == "zigzag":
        xs = np.linspace(4, edge - 4, 6)
        ys = [edge * (0.2 if i % 2 else 0.8) + rng.uniform(-4, 4) for i in range(6)]
        pen.line([(float(x), float(y)) for x, y in zip(xs, ys, strict=True)], fill=255, width=8)
    elif kind == "hash":
        for part in (0.3, 0.7):
            pen.line((edge * part, 2, edge * part, edge - 2), fill=255, width=8)
            pen.line((2, edge * part, edge - 2, edge * part), fill=255, width=8)
    elif kind == "blot":
        for _ in range(5):
            x, y, r = rng.uniform(0.2, 0.8) * edge, rng.uniform(0.2, 0.8) * edge, rng.uniform(6, 13)
            pen.ellipse((x - r, y - r, x + r, y + r), fill=255)
    else:
        for angle in np.arange(6) * math.pi / 6 + rng.uniform(0, 0.5):
            dx, dy = math.cos(angle) * edge / 2, math.sin(angle) * edge / 2
            pen.line((edge / 2 - dx, edge / 2 - dy, edge / 2 + dx, edge / 2 + dy), fill=255, width=5)


@lru_cache(maxsize=len(SPLITS) * _BACKGROUNDS)
def _background(split: str, number: int) -> np.ndarray:
    """Return (128, 128, 3): a muted texture, one of six kinds."""
    rng = np.random.default_rng([18, SPLITS.index(split), number])
    side = 128
    y, x = np.mgrid[0:side, 0:side] / side
    kind = number % 6
    if kind == 0:
        pattern = x * rng.uniform(-1, 1) + y * rng.uniform(-1, 1)
    elif kind == 1:
        pattern = (
            np.sign(np.sin((x * rng.uniform(-1, 1) + y * rng.uniform(-1, 1)) * rng.uniform(20, 45))) * 0.4
        )
    elif kind == 2:
        n = float(rng.integers(5, 11))
        pattern = ((np.floor(x * n) + np.floor(y * n)) % 2 - 0.5) * 0.7
    elif kind == 3:
        coarse = Image.fromarray(rng.uniform(0, 255, (8, 8)).astype(np.uint8)).resize(
            (side, side), Image.Resampling.BICUBIC
        )
        pattern = np.asarray(coarse) / 255 * 1.4 - 0.7
    elif kind == 4:
        n = rng.uniform(6, 11)
        pattern = (np.hypot((x * n) % 1 - 0.5, (y * n) % 1 - 0.5) < 0.25) * 0.7 - 0.3
    else:
        pattern = np.sin(y * rng.uniform(15, 35) + np.sin(x * rng.uniform(6, 14)) * 2) * 0.4
    base = rng.uniform(95, 190) + rng.normal(0, 14, 3)
    picture: np.ndarray = base + pattern[..., None] * rng.uniform(14, 34)
    return picture.astype(np.float32)


def random_background(rng: np.random.Generator) -> int:
    """Draw the number of a background."""
    return int(rng.integers(_BACKGROUNDS))


def random_oddity(rng: np.random.Generator) -> str:
    """Draw a kind of oddity."""
    return _ODDITIES[int(rng.integers(len(_ODDITIES)))]


assert set(_RGB) == set(COLOURS)
