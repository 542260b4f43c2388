"""From whatever a user calls an image to an upright RGB picture, or an error that names it."""

from __future__ import annotations

import base64
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from radical_rerank.errors import InputError

Document = Any
"""A path, a data URI, encoded bytes, a PIL image, or an array (H, W), (H, W, 1|3|4) of any real type"""

MAX_PIXELS = 64_000_000


THREADS = min(8, os.cpu_count() or 1)


def load_image(
    document: Document,
    *,
    name: str = "image",
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
) -> Image.Image:
    """The document as an upright RGB picture. Animations show their first frame, transparency is white."""
    (image,) = load_images([document], names=[name], max_pixels=max_pixels, formats=formats)
    if isinstance(image, InputError):
        raise image
    return image


def load_images(
    documents: Sequence[Document],
    *,
    names: Sequence[str],
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
) -> list[Image.Image | InputError]:
    """The same of many, decoded in parallel; where one cannot be read, the error that says so.

    formats: Pillow's names of the formats that encoded images may have; by default all that it knows
    """
    opened: list[tuple[str, Any]] = []
    for document, name in zip(documents, names, strict=True):
        if isinstance(document, (str, os.PathLike)) and not _is_data_uri(document):
            name = f"{name} ({os.fspath(document)})"
        opening = partial(open_image, document, name=name, max_pixels=max_pixels, formats=formats)
        opened.append((name, _attempt(name, opening)))
    # An image object may be there twice, and decodes itself in place: each goes to one thread.
    distinct = {id(image): (name, image) for name, image in opened}

    def decoded(pair: tuple[str, Any]) -> Image.Image | InputError:
        name, image = pair
        return image if isinstance(image, InputError) else _attempt(name, partial(_upright_rgb, image))

    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(zip(distinct, pool.map(decoded, distinct.values()), strict=True))
    return [results[id(image)] for _, image in opened]


def _attempt(name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except InputError as error:
        return error
    except Exception as error:  # a parser may fail in any way on bytes that were made to break it
        return InputError(f"{name} cannot be read as an image: {error}")


def open_image(
    document: Document, *, name: str, max_pixels: int, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """The document as an image whose size is checked and whose pixels are not decoded yet.

    This very object is to be decoded: opened again, the same bytes may be taken for another format.
    """
    image = _open(document, name, formats)
    if not image.width or not image.height:
        raise InputError(f"{name} has {image.width} x {image.height} pixels")
    if image.width * image.height > max_pixels:
        raise InputError(
            f"{name} has {image.width} x {image.height} pixels, more than the limit of {max_pixels}"
        )
    return image


def data_uri(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """The image as a document that needs no file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _is_data_uri(document: Any) -> bool:
    return isinstance(document, str) and document[:5].lower() == "data:"


def _open(document: Document, name: str, formats: tuple[str, ...] | None) -> Image.Image:
    if isinstance(document, Image.Image):
        return document
    if _is_data_uri(document):
        return _decode(_data_uri_bytes(document, name), name, formats)
    if isinstance(document, (str, os.PathLike)):
        path = Path(document)
        if not path.is_file():
            raise InputError(f"{name} does not exist" if not path.exists() else f"{name} is not a file")
        return _decode(path.read_bytes(), name, formats)
    if isinstance(document, (bytes, bytearray, memoryview)):
        return _decode(bytes(document), name, formats)
    if hasattr(document, "__array__"):
        return _from_array(np.asarray(document), name)
    raise InputError(f"{name} is a {type(document).__name__}, not a path, image, array, bytes or data URI")


def _data_uri_bytes(uri: str, name: str) -> bytes:
    header, separator, body = uri.partition(",")
    if not separator or not header.lower().endswith(";base64"):
        raise InputError(f"{name} is a data URI without base64 content")
    try:
        return base64_bytes(body)
    except ValueError:
        raise InputError(f"{name} is a data URI with broken base64 content") from None


_BASE64 = bytes.maketrans(b"-_", b"+/")


def base64_bytes(text: str) -> bytes:
    """The bytes of base64, in either alphabet, with or without line breaks and padding. Or a ValueError."""
    body = text.encode("ascii").translate(_BASE64, delete=b" \t\r\n\f\v")
    return base64.b64decode(body + b"=" * (-len(body) % 4), validate=True)


def _decode(data: bytes, name: str, formats: tuple[str, ...] | None) -> Image.Image:
    if not data:
        raise InputError(f"{name} is empty")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; the pixel limit is checked next, before any is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        known = "an image format that can be read" if formats is None else f"one of {', '.join(formats)}"
        raise InputError(f"{name} is not in {known}") from None


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or 0 in array.shape:
        raise InputError(f"{name} is an array of shape {array.shape}, not (H, W), (H, W, 3) or (H, W, 4)")
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    elif array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise InputError(f"{name} is a float array with values outside [0, 1]")
        array = np.round(array * 255).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.integer):
        if array.min() < 0 or array.max() > 255:
            raise InputError(f"{name} is an integer array with values outside [0, 255]")
        array = array.astype(np.uint8)
    else:
        raise InputError(f"{name} is an array of {array.dtype}, which is no image")
    return Image.fromarray(np.ascontiguousarray(array))


# How the EXIF orientations other than 1 are undone: the transposition, whether it swaps the sides, and
# whether the first rows become the last rows or columns.
_TURNS = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT, False, False),
    3: (Image.Transpose.ROTATE_180, False, True),
    4: (Image.Transpose.FLIP_TOP_BOTTOM, False, True),
    5: (Image.Transpose.TRANSPOSE, True, False),
    6: (Image.Transpose.ROTATE_270, True, True),
    7: (Image.Transpose.TRANSVERSE, True, True),
    8: (Image.Transpose.ROTATE_90, True, False),
}
PIECE = 1 << 20
"""pixels that are converted at a time"""


def decode(image: Image.Image) -> tuple[int, int]:
    """Decode the first frame: a truncated file fails here. Returns the size of the upright picture."""
    if getattr(image, "is_animated", False):
        image.seek(0)
    image.load()
    swapped = _TURNS.get(_orientation(image), (None, False))[1]
    return (image.height, image.width) if swapped else image.size


def pieces(image: Image.Image) -> Iterator[tuple[tuple[int, int], Image.Image]]:
    """A decoded image as upright RGB pieces, each with its left upper corner: no second copy of the whole."""
    turn, swapped, reversed_ = _TURNS.get(_orientation(image), (None, False, False))
    top_value = _top_value(image)
    rows = max(1, PIECE // image.width)
    for start in range(0, image.height, rows):
        end = min(start + rows, image.height)
        part = image if end - start == image.height else image.crop((0, start, image.width, end))
        part = _to_rgb(part, top_value)
        if turn is not None:
            part = part.transpose(turn)
        place = image.height - end if reversed_ else start
        yield ((place, 0) if swapped else (0, place)), part


def _upright_rgb(image: Image.Image) -> Image.Image:
    """The image itself where it is upright and RGB already."""
    size = decode(image)
    if image.mode == "RGB" and "transparency" not in image.info and _orientation(image) not in _TURNS:
        return image
    picture = Image.new("RGB", size)
    for corner, piece in pieces(image):
        picture.paste(piece, corner)
    return picture


def _orientation(image: Image.Image) -> Any:
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _top_value(image: Image.Image) -> float | None:
    """What stands for white where pixels have 16 or 32 bits: they are scaled, not clipped."""
    if not (image.mode.startswith("I") or image.mode == "F"):
        return None
    values = np.asarray(image)
    if image.mode == "F" and not np.isfinite(values).all():
        raise ValueError("it has values that are not finite")
    return 65535.0 if values.max(initial=0) > 255 else 255.0


def _to_rgb(image: Image.Image, top_value: float | None) -> Image.Image:
    if top_value is not None:
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((values.clip(0, top_value) * (255 / top_value)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
