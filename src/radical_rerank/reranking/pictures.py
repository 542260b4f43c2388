"""Plain generated pictures with a query each: enough to calibrate on, and to try the machinery with."""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (45, 96, 214),
    "yellow": (240, 200, 40),
    "purple": (142, 68, 173),
    "orange": (235, 124, 30),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "bar")


def draw_list(seed: int, count: int) -> tuple[str, list[Image.Image], int]:
    """A query, `count` pictures of different sizes, and the number of the one that shows what it names."""
    rng = random.Random(seed)
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    target, *others = rng.sample(kinds, min(count, len(kinds)))
    pool = [target, *others, *rng.choices(others or [target], k=max(0, count - len(kinds)))]
    order = rng.sample(range(count), count)
    images = [_draw(rng, *pool[i]) for i in order]
    return f"a {target[0]} {target[1]}", images, order.index(0)


def _draw(rng: random.Random, colour: str, shape: str) -> Image.Image:
    width, height = rng.randrange(96, 161, 16), rng.randrange(96, 161, 16)
    shade = rng.randrange(170, 235)
    image = Image.new("RGB", (width, height), (shade, shade - rng.randrange(30), shade - rng.randrange(30)))
    pen = ImageDraw.Draw(image)
    for _ in range(6):  # clutter that no query names
        x, y = rng.randrange(width), rng.randrange(height)
        pen.line((x, y, x + rng.randrange(-40, 40), y + rng.randrange(-40, 40)), (shade - 60,) * 3, 2)
    size = rng.randrange(28, 48)
    x, y = rng.randrange(width - size), rng.randrange(height - size)
    _shape(pen, shape, (x, y, x + size, y + size), COLOURS[colour])
    return image


def _shape(pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, ...], fill: tuple[int, ...]) -> None:
    left, top, right, bottom = box
    third = (right - left) // 3
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill)
    elif shape == "triangle":
        pen.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill)
    elif shape == "cross":
        pen.rectangle((left + third, top, right - third, bottom), fill)
        pen.rectangle((left, top + third, right, bottom - third), fill)
    elif shape == "ring":
        pen.ellipse((left, top, right, bottom), outline=fill, width=max(third // 2, 3))
    else:
        pen.rectangle((left, top + third, right, bottom - third), fill)
