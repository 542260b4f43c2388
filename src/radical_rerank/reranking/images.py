"""From whatever a user calls an image to an upright RGB picture, or an error that names it."""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from radical_rerank.errors import InputError

Document = Any
"""A path, a data URI, encoded bytes, a PIL image, or an array (H, W), (H, W, 1|3|4) of any real type"""

MAX_PIXELS = 64_000_000


THREADS = min(8, os.cpu_count() or 1)


def load_image(document: Document, *, name: str = "image", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An upright RGB copy of the document. Animations show their first frame, transparency is white."""
    (image,) = load_images([document], names=[name], max_pixels=max_pixels)
    if isinstance(image, InputError):
        raise image
    return image


def load_images(
    documents: Sequence[Document], *, names: Sequence[str], max_pixels: int = MAX_PIXELS
) -> list[Image.Image | InputError]:
    """The same of many, decoded in parallel; where one cannot be read, the error that says so."""
    opened: list[tuple[str, Any]] = []
    for document, name in zip(documents, names, strict=True):
        if isinstance(document, (str, os.PathLike)) and not _is_data_uri(document):
            name = f"{name} ({os.fspath(document)})"
        opened.append((name, _attempt(name, partial(_open_checked, document, name, max_pixels))))
    # An image object may be there twice, and decodes itself in place: each goes to one thread.
    distinct = {id(image): (name, image) for name, image in opened}

    def decoded(pair: tuple[str, Any]) -> Image.Image | InputError:
        name, image = pair
        if isinstance(image, InputError):
            return image
        return _attempt(name, lambda: _to_rgb(_upright(image)))

    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(zip(distinct, pool.map(decoded, distinct.values()), strict=True))
    return [results[id(image)] for _, image in opened]


def _attempt(name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except InputError as error:
        return error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        return InputError(f"{name} cannot be read as an image: {error}")


def _open_checked(document: Document, name: str, max_pixels: int) -> Image.Image:
    image = _open(document, name)
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


def _open(document: Document, name: str) -> Image.Image:
    if isinstance(document, Image.Image):
        return document
    if _is_data_uri(document):
        return _decode(_data_uri_bytes(document, name), name)
    if isinstance(document, (str, os.PathLike)):
        path = Path(document)
        if not path.is_file():
            raise InputError(f"{name} does not exist" if not path.exists() else f"{name} is not a file")
        return _decode(path.read_bytes(), name)
    if isinstance(document, (bytes, bytearray, memoryview)):
        return _decode(bytes(document), name)
    if hasattr(document, "__array__"):
        return _from_array(np.asarray(document), name)
    raise InputError(f"{name} is a {type(document).__name__}, not a path, image, array, bytes or data URI")


def _data_uri_bytes(uri: str, name: str) -> bytes:
    header, separator, body = uri.partition(",")
    if not separator or not header.lower().endswith(";base64"):
        raise InputError(f"{name} is a data URI without base64 content")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{name} is a data URI with broken base64 content") from None


def _decode(data: bytes, name: str) -> Image.Image:
    if not data:
        raise InputError(f"{name} is empty")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; the pixel limit is checked next, before any is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise InputError(f"{name} is not in an image format that can be read") from None


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


def _upright(image: Image.Image) -> Image.Image:
    """First frame, rotated as its EXIF data say. Decodes, so a truncated file fails here."""
    if getattr(image, "is_animated", False):
        image.seek(0)
    image.load()
    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits per pixel: scale, do not clip
        values = np.asarray(image, dtype=np.float64)
        if image.mode == "F" and not np.isfinite(values).all():
            raise ValueError("it has values that are not finite")
        top = 65535.0 if values.max(initial=0) > 255 else 255.0
        image = Image.fromarray((values.clip(0, top) * (255 / top)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
