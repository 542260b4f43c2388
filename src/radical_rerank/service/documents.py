"""From a client's document to a picture, or a refusal that names the document."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence
from typing import Protocol

from PIL import Image

from radical_rerank.errors import InputError
from radical_rerank.reranking.images import load_images
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.schema import ContentDocument, Document, ImageDocument

# What image libraries here may be asked to open: no SVG, no PDF, no PostScript, no TIFF.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")


class Fetcher(Protocol):
    def get(self, url: str) -> bytes:
        """The bytes behind an allowed URL, or a ServiceError."""


class Pictures:
    """Reads the pictures of one request within its limits. Nothing is decompressed before it is measured."""

    def __init__(self, fetcher: Fetcher | None, max_pixels: int, max_total_pixels: int) -> None:
        self.fetcher, self.max_pixels, self.left = fetcher, max_pixels, max_total_pixels

    def read(self, documents: Sequence[Document], names: Sequence[str]) -> list[Image.Image]:
        """Upright RGB pictures, decoded in parallel."""
        data = []
        for document, name in zip(documents, names, strict=True):
            data.append(self._bytes(source_of(document), name))
            self._check(data[-1], name)
        found = load_images(data, names=names, max_pixels=self.max_pixels)
        for image in found:
            if isinstance(image, InputError):
                raise ServiceError(422, "bad_image", str(image)) from None
        return [image for image in found if not isinstance(image, InputError)]

    def _check(self, data: bytes, name: str) -> None:
        """Format and size, from the header."""
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as header:
                pixels = header.width * header.height
        except Image.DecompressionBombError:
            raise ServiceError(422, "too_many_pixels", f"{name} has too many pixels") from None
        except Exception:  # any parser may fail in any way on hostile bytes
            raise ServiceError(
                422, "bad_image", f"{name} is not an image in one of the formats {', '.join(FORMATS)}"
            ) from None
        if pixels > self.max_pixels:
            limit = self.max_pixels
            raise ServiceError(
                422, "too_many_pixels", f"{name} has {pixels} pixels, more than the limit of {limit}"
            )
        self.left -= pixels
        if self.left < 0:
            raise ServiceError(422, "too_many_pixels", "the images have too many pixels together")

    def _bytes(self, source: str, name: str) -> bytes:
        source = source.strip()
        if source.startswith("data:"):
            head, comma, body = source.partition(",")
            if not comma or not head.endswith(";base64"):
                raise ServiceError(422, "bad_document", f"{name}: a data URI must be base64")
            return _decoded(body, name)
        if re.match(r"https?://", source, re.IGNORECASE):
            if self.fetcher is None:
                raise ServiceError(
                    422, "url_not_allowed", f"{name}: URLs are not fetched here; send a data URI or base64"
                )
            return self.fetcher.get(source)
        if len(source) < 64 or not _BASE64.fullmatch(source.replace("\n", "")):
            raise ServiceError(
                422,
                "bad_document",
                f"{name} is neither a data URI nor base64 nor an allowed URL; text and paths are not ranked",
            )
        return _decoded(source, name)


def source_of(document: Document) -> str:
    if isinstance(document, ImageDocument):
        return document.image
    if isinstance(document, ContentDocument):
        return document.content[0].image_url.url
    return document


def _decoded(body: str, name: str) -> bytes:
    body = body.replace("\n", "").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ServiceError(422, "bad_document", f"{name} is not valid base64") from None
    if not data:
        raise ServiceError(422, "bad_image", f"{name} is empty")
    return data
