"""Pictures are drawn from their seed, and show what they should."""

from __future__ import annotations

import hashlib

import numpy as np

from radical_rerank.embedded.scenes import drawing
from radical_rerank.embedded.scenes.drawing import SPLITS, render
from radical_rerank.embedded.scenes.lists import make_composed, make_list
from radical_rerank.embedded.scenes.training.batches import shown_by
from radical_rerank.embedded.scenes.world import COLOURS


def test_the_same_seed_gives_the_same_bytes() -> None:
    def digest() -> str:
        # Banks are built anew: nothing may depend on what was drawn before.
        for bank in (drawing._sprites, drawing._oddities, drawing._background):
            bank.cache_clear()
        value = hashlib.sha256()
        item = make_list("test", 5, 6, queries=2)
        for image in item.images:
            value.update(image.tobytes())
        value.update(" ".join(d.text() for d in item.descriptions).encode())
        composed = make_composed("test", 5, 6)
        value.update(composed.changes[0].text.encode() + composed.images[3].tobytes())
        return value.hexdigest()

    first = digest()
    make_list("train", 1, 4).images  # noqa: B018
    assert digest() == first


def test_splits_share_no_sprite_and_no_background() -> None:
    def sprites(split: str) -> set[bytes]:
        return {m.tobytes() + bytes(m.shape) for bank in drawing._sprites(split).values() for m in bank}

    def backgrounds(split: str) -> set[bytes]:
        return {drawing._background(split, n).tobytes() for n in range(drawing._BACKGROUNDS)}

    for kind in (sprites, backgrounds):
        banks = [kind(split) for split in SPLITS]
        assert all(len(bank) > 50 for bank in banks)
        assert sum(map(len, banks)) == len(set().union(*banks))
    texts = [make_list(split, 0, 6).images[0].tobytes() for split in SPLITS]
    assert len(set(texts)) == 3


def test_cells_show_the_things_that_are_there() -> None:
    """The colour of the cells that a thing fills is the thing's colour."""
    checked = 0
    for seed in range(30):
        item = make_list("test", seed, 4)
        for scene, (image, cover) in zip(item.scenes, item.rendered, strict=True):
            assert cover.shape == (len(scene.things), scene.height // 16, scene.width // 16)
            pixels = np.asarray(image, dtype=float)
            for number, thing in enumerate(scene.things):
                assert shown_by(cover)[number].any()
                for row, column in zip(*np.nonzero(cover[number] > 0.9), strict=True):
                    cell = pixels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].mean((0, 1))
                    nearest = min(COLOURS, key=lambda c: np.abs(cell - drawing._RGB[c]).sum())
                    assert nearest == thing.colour
                    checked += 1
    assert checked > 20


def test_a_smaller_picture_shows_the_same_things() -> None:
    scene = make_list("test", 0, 1).scenes[0]
    image, cover = render(scene)
    small, less = drawing.shrink(image, cover, 0.5)
    assert (
        (small.height // 16, small.width // 16)
        == less.shape[1:]
        == tuple(round(side / 2) for side in cover.shape[1:])
    )
    # A thing keeps its share of the picture, and the fullest cell is where it was.
    np.testing.assert_allclose(less.mean((1, 2)), cover.mean((1, 2)), rtol=0.02)
    for before, after in zip(cover, less, strict=True):
        old, new = (np.array(np.unravel_index(c.argmax(), c.shape)) / c.shape for c in (before, after))
        assert np.abs(old - new).max() <= 0.5
