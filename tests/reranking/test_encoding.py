from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from radical_rerank.errors import InputError
from radical_rerank.lab.bench.payloads import polyglot
from radical_rerank.reranking import encoding as images
from radical_rerank.reranking import load_image
from radical_rerank.reranking.encoding import ImageLike, load_images


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """Left half red, right half blue: 20 x 10."""
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    image.paste((0, 0, 255), (10, 0, 20, 10))
    return image.convert(mode)


def test_every_kind_of_document_gives_the_same_picture(tmp_path: Path) -> None:
    image = halves()
    png = encoded(image, "PNG")
    path = tmp_path / "a picture.png"
    path.write_bytes(png)
    uri = "data:image/png;base64," + base64.b64encode(png).decode()
    array = np.asarray(image)
    documents: list[ImageLike] = [
        image,
        png,
        bytearray(png),
        path,
        str(path),
        uri,
        array,
        array / 255.0,
        array.astype(np.int64),
    ]
    for document in documents:
        loaded = load_image(document)
        assert loaded.mode == "RGB"
        assert np.array_equal(np.asarray(loaded), array), type(document)


def test_tensors_are_arrays() -> None:
    import torch

    image = halves()
    loaded = load_image(torch.from_numpy(np.array(image)))
    assert np.array_equal(np.asarray(loaded), np.asarray(image))


def test_exif_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to see it upright
    loaded = load_image(encoded(halves(), "JPEG", quality=95, exif=exif.tobytes()))
    assert loaded.size == (10, 20)
    top, bottom = np.asarray(loaded)[4, 5], np.asarray(loaded)[15, 5]
    assert top[0] > 200 > top[2]
    assert bottom[2] > 200 > bottom[0]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr", "LAB", "HSV", "RGBA", "LA"])
def test_modes(mode: str) -> None:
    image = halves("RGB").convert("L").convert(mode) if mode == "LA" else _converted(mode)
    loaded = load_image(image)
    assert (loaded.mode, loaded.size) == ("RGB", (20, 10))


def _converted(mode: str) -> Image.Image:
    if mode == "LAB":
        return Image.new("LAB", (20, 10), (120, 128, 128))
    return halves(mode)


def test_cmyk_jpeg_keeps_its_colours() -> None:
    loaded = np.asarray(load_image(encoded(halves("CMYK"), "JPEG", quality=95)))
    assert loaded[5, 2, 0] > 150 > loaded[5, 2, 2]
    assert loaded[5, 17, 2] > 150 > loaded[5, 17, 0]


def test_transparency_is_white() -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert np.asarray(load_image(image))[0, 0].tolist() == [255, 255, 255]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    loaded = load_image(encoded(palette, "PNG", transparency=1))
    assert np.asarray(loaded)[0, 0].tolist() == [255, 255, 255]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    for document in (encoded(Image.fromarray(ramp), "PNG"), ramp):
        values = np.asarray(load_image(document))[..., 0].astype(int)
        assert np.abs(values - np.arange(256).reshape(16, 16)).max() <= 1


def test_an_animation_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    gif = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(load_image(gif))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "is empty"),
        (b"not an image at all", "not in an image format"),
        ("/no/such/file.png", r"image \(/no/such/file.png\) does not exist"),
        ("/", "is not a file"),
        ("data:image/png,abc", "without base64"),
        ("data:image/png;base64,@@@", "broken base64"),
        (np.zeros((2, 2, 7)), "shape"),
        (np.zeros((0, 2)), "shape"),
        (np.full((2, 2), np.nan), "outside"),
        (np.full((2, 2), 300), "outside"),
        (np.array([["a", "b"]]), "not an image"),
        (17, "int"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_image_is_named(document: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_image(document)


def test_truncated_files_are_errors() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        data = encoded(noise, kind)
        with pytest.raises(InputError, match=r"document 3"):
            load_image(data[: len(data) // 2], name="document 3")


@pytest.mark.slow
def test_large_images_are_refused_before_they_are_decoded() -> None:
    for side, message in ((10_000, "10000 x 10000 pixels, more than the limit"), (20_000, "exceeds limit")):
        bomb = encoded(Image.new("1", (side, side)), "PNG")
        assert len(bomb) < 100_000
        with pytest.raises(InputError, match=message):
            load_image(bomb)
    with pytest.raises(InputError, match="more than the limit of 100"):
        load_image(halves(), max_pixels=100)


def test_many_are_loaded_as_one_by_one(tmp_path: Path) -> None:
    halves().save(tmp_path / "a.png")
    lazy = Image.open(tmp_path / "a.png")
    documents: list[ImageLike] = [
        lazy,
        b"not an image",
        tmp_path / "a.png",
        lazy,
        tmp_path / "missing.png",
        encoded(halves(), "PNG"),
    ]
    names = [f"document {i}" for i in range(len(documents))]
    loaded = load_images(documents, names=names)
    assert [isinstance(image, InputError) for image in loaded] == [False, True, False, False, True, False]
    assert "document 1" in str(loaded[1])
    assert "document 4" in str(loaded[4])
    assert "missing.png" in str(loaded[4])
    for image in (loaded[0], loaded[2], loaded[3], loaded[5]):
        assert isinstance(image, Image.Image)
        assert image.tobytes() == halves().tobytes()
    assert load_images([], names=[]) == []


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_large_pictures_are_made_upright_piece_by_piece(
    orientation: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces together are what Pillow makes of the whole."""
    noise = np.random.default_rng(orientation).integers(0, 255, (23, 17, 4), dtype=np.uint8)
    image = Image.fromarray(noise).convert("RGB").convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(noise[..., 3]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, "PNG", exif=exif)
    whole = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGBA")
    whole = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
    for pixels in (1, 40, 1 << 20):
        monkeypatch.setattr(images, "PIECE", pixels)
        loaded = load_image(data)
        assert loaded.size == whole.size
        assert loaded.tobytes() == whole.tobytes()


def test_a_picture_is_opened_once_and_in_the_allowed_formats_alone() -> None:
    """Bytes that are one format to the first reader and another to the second."""
    data = polyglot((64, 64), (600, 500))
    assert load_image(data).size == (600, 500)  # with every format of Pillow, it is the large one
    loaded = load_image(data, formats=("PNG", "WEBP"), max_pixels=10_000)
    assert loaded.size == (64, 64)
    with pytest.raises(InputError, match="not in one of PNG, JPEG"):
        load_image(data, formats=("PNG", "JPEG"))


def test_images_without_pixels_are_named() -> None:
    for size in ((0, 0), (0, 5), (7, 0)):
        with pytest.raises(InputError, match=rf"document 2 has {size[0]} x {size[1]} pixels"):
            load_image(Image.new("RGB", size), name="document 2")


def test_wrapped_base64_in_any_case_and_alphabet_is_a_data_uri() -> None:
    png = encoded(halves(), "PNG")
    body = base64.b64encode(png).decode()
    wrapped = "\r\n ".join(body[i : i + 60] for i in range(0, len(body), 60))
    for uri in (
        f"DATA:image/png;BASE64,{wrapped}\n",
        f"Data:image/png;base64,{base64.urlsafe_b64encode(png).decode().rstrip('=')}",
    ):
        assert load_image(uri).tobytes() == halves().tobytes()


def test_whatever_a_decoder_raises_names_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("a decoder's own")

    monkeypatch.setattr(Image, "open", fails)
    with pytest.raises(InputError, match="document 4 cannot be read as an image: a decoder's own"):
        load_image(encoded(halves(), "PNG"), name="document 4")
