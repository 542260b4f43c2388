"""Large JPEGs are decoded at a part of their size, where the model does not see the difference."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from radical_rerank import Reranker
from radical_rerank.embedded.photos.pictures import sample_pictures
from radical_rerank.reranking import load_image
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, enough_side


def jpeg(image: Image.Image, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, exif=exif)
    return buffer.getvalue()


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """The astronaut at 12 megapixels."""
    (file,) = [file for file in sample_pictures() if file.stem == "astronaut"]
    return load_image(file).resize((4000, 3000))


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 400), st.integers(1, 400)), st.integers(1, 150))
def test_each_side_keeps_enough_pixels(size: tuple[int, int], side: int) -> None:
    data = jpeg(noise(*size))
    loaded = load_image(data, side=side)
    scale = max(s for s in (1, 2, 4, 8) if s == 1 or min(size) >= s * side)  # the largest that leaves enough
    assert loaded.size == tuple(-(-length // scale) for length in size)
    if scale == 1:
        assert loaded.tobytes() == load_image(data).tobytes()


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(28, 8000), st.integers(28, 8000)).filter(lambda size: max(size) < 100 * min(size)),
    st.integers(4, 4096),
)
def test_no_model_makes_more_of_a_picture(size: tuple[int, int], max_tokens: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    scale = max(s for s in (1, 2, 4, 8) if s == 1 or min(size) >= s * enough_side(max_tokens))
    if scale == 1:
        return
    left = [length // scale for length in size]
    height, width = smart_resize(size[1], size[0], 32, 4 * 32 * 32, max_tokens * 32 * 32)  # Qwen3-VL
    assert left[0] >= 2 * width
    assert left[1] >= 2 * height
    if max_tokens >= 3 * 256:  # InternVL's tiles
        across, down = get_optimal_tiled_canvas(size[::-1], (448, 448), 1, min(12, max_tokens // 256 - 1))
        assert left[0] >= 448 * across
        assert left[1] >= 448 * down
    if max_tokens >= 256:
        assert min(left) >= 896  # Gemma 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_picture_is_upright(orientation: int) -> None:
    image = Image.new("RGB", (320, 160), (200, 30, 30))
    image.paste((30, 30, 200), (160, 0, 320, 80))
    data = jpeg(image, orientation)
    loaded = load_image(data, side=40)
    whole = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert loaded.size == (whole.width // 4, whole.height // 4)
    difference = np.asarray(loaded, dtype=int) - np.asarray(whole.resize(loaded.size), dtype=int)
    assert np.abs(difference).mean() < 4


def test_the_callers_own_image_keeps_its_size(tmp_path: Path) -> None:
    noise(320, 160).save(tmp_path / "a.jpg")
    own = Image.open(tmp_path / "a.jpg")
    assert load_image(own, side=40).size == own.size == (320, 160)
    assert load_image(tmp_path / "a.jpg", side=40).size == (80, 40)


def test_a_truncated_file_is_still_an_error() -> None:
    data = jpeg(noise(320, 160))
    with pytest.raises(ValueError, match="truncated"):
        load_image(data[: len(data) // 2], side=40)


def test_the_model_does_not_see_the_difference(photograph: Image.Image) -> None:
    reranker = Reranker("photos", "radical", keep=0.5)
    others = [file for file in sample_pictures() if file.stem in ("chelsea", "coffee", "rocket")]
    data = jpeg(photograph)
    assert load_image(data, side=enough_side(MAX_IMAGE_TOKENS)).size == (2000, 1500)
    for query in ("a woman", "a flag"):
        reduced, whole = (reranker.rank(query, [first, *others]) for first in (data, load_image(data)))
        assert reduced.order == whole.order
        scores = [{result.index: result.probability for result in ranking} for ranking in (reduced, whole)]
        assert scores[0] == pytest.approx(scores[1], abs=0.01)


def test_the_same_file_is_encoded_once(photograph: Image.Image) -> None:
    reranker = Reranker("photos", "dense")
    data = jpeg(photograph)
    reranker.rank("a woman", [data, sample_pictures()[0]])
    reranker.rank("a flag", [data, sample_pictures()[0]])
    assert (reranker.vision_cache.misses, reranker.vision_cache.hits) == (2, 2)
