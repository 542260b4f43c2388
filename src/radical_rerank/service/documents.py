"""From the bytes of a request to its fields and images, or an error that names the bad document.

This code runs in the reader processes (`reader`), so it imports neither torch nor the web framework.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pydantic_core
from PIL import Image
from pydantic import ValidationError

from radical_rerank.errors import InputError
from radical_rerank.reranking.encoding import base64_bytes, open_image
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.schema import ContentDocument, ImageDocument, RequestDocument, RerankRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""the image formats to accept: not SVG, PDF, PostScript or TIFF"""
MAX_SCANS = 16
"""scans of a progressive JPEG of the largest size; smaller images may have more"""
MAX_VALUES = 100_000
"""JSON values in a request; a request of 200 documents has about a thousand"""
MIN_BASE64 = 64
"""characters of the shortest string that is taken for base64: no image is smaller"""
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """The limits of one request. methods: the names that it may use"""

    methods: tuple[str, ...]
    max_documents: int
    max_pixels: int
    max_total_pixels: int


@dataclass(frozen=True)
class ParsedRequest:
    """A request without its images.

    composed: whether there is a reference image
    sources: per image, the reference first if there is one: its URL, or None if it was in the request
    shown: the documents as the client sent them, if the response repeats them
    """

    query: str
    composed: bool
    sources: list[str | None]
    model: str | None
    top_n: int | None
    method: str | None
    keep: float | None
    return_pruning: bool
    return_survivors: bool
    shown: list[dict[str, Any]] | None

    @property
    def names(self) -> list[str]:
        """The names of the images in error messages, in the order of `sources`."""
        documents = [f"document {number}" for number in range(len(self.sources) - self.composed)]
        return ["the reference", *documents] if self.composed else documents


def parse(data: bytes | bytearray, limits: Limits) -> RerankRequest:
    """Parse and validate a request, or raise a ServiceError. Counts are checked before elements."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{", b":")) > MAX_VALUES:
        raise _invalid(f"the request has more than {MAX_VALUES} JSON values")
    try:
        fields = pydantic_core.from_json(data)
    except ValueError as error:
        raise _invalid(f"the request is not JSON: {error}") from None
    documents = fields.get("documents") if isinstance(fields, dict) else None
    if isinstance(documents, list) and len(documents) > limits.max_documents:
        raise ServiceError(
            422, "too_many_documents", f"a request may have at most {limits.max_documents} documents"
        )
    try:
        body = RerankRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _invalid(f"{where}: {first['msg']}" if where else first["msg"]) from None
    if not body.query.strip():
        raise _invalid("query: must not be empty")
    if body.method is not None and body.method not in limits.methods:
        choices = ", ".join(limits.methods)
        raise ServiceError(422, "unknown_method", f"unknown method; choose from: {choices}")
    return body


def _invalid(message: str) -> ServiceError:
    return ServiceError(422, "invalid_request", message)


NamedImage = tuple[str, Image.Image]
"""an image that is opened but not decoded, with its name for error messages"""


def open_request(body: RerankRequest, opener: ImageOpener) -> tuple[ParsedRequest, list[NamedImage]]:
    """Open the images of a request.

    Args:
        body: the request
        opener: checks each image

    Returns:
        The request without its images, and those of them that are not URLs.
    """
    documents = ([] if body.reference is None else [body.reference]) + body.documents
    parsed = ParsedRequest(
        query=body.query,
        composed=body.reference is not None,
        sources=[None] * len(documents),
        model=body.model,
        top_n=body.top_n,
        method=body.method,
        keep=body.keep,
        return_pruning=body.return_pruning,
        return_survivors=body.return_survivors,
        shown=[_shown(document) for document in body.documents] if body.return_documents else None,
    )
    images: list[NamedImage] = []
    for number, (document, name) in enumerate(zip(documents, parsed.names, strict=True)):
        source = _source_of(document).strip()
        if _URL.match(source):
            parsed.sources[number] = source
        else:
            images.append((name, opener.open(_bytes_of(source, name), name)))
    return parsed, images


class ImageOpener:
    """Opens the images of one request and checks their sizes before anything is decompressed.

    Args:
        limits: the limits of the request
        pixels: of images of the same request that were opened before

    `pixels` then counts all images. `work` counts the pixels that decoding goes over, once per scan.
    """

    def __init__(self, limits: Limits, pixels: int = 0) -> None:
        self.limits, self.pixels, self.work = limits, pixels, 0

    def open(self, data: bytes, name: str) -> Image.Image:
        """Open an image file without decoding its pixels, or raise a ServiceError that names it."""
        image = self._open(data, name)
        limit = self.limits.max_pixels
        pixels = image.width * image.height
        if pixels > limit:
            raise _too_many_pixels(f"{name} has {pixels} pixels, more than the limit of {limit}")
        # Each scan of a progressive JPEG goes over all pixels, and may take no more than 50 bytes.
        scans = data.count(b"\xff\xda") if image.format in ("JPEG", "MPO") else 1
        if pixels * scans > MAX_SCANS * limit:
            raise ServiceError(422, "bad_image", f"{name} has {scans} scans, too many for its size")
        self.pixels += pixels
        self.work += pixels * scans
        total = self.limits.max_total_pixels
        if self.pixels > total:
            raise _too_many_pixels(f"the images together have more than {total} pixels")
        return image

    def _open(self, data: bytes, name: str) -> Image.Image:
        if not data:
            raise ServiceError(422, "bad_image", f"{name} is empty")
        try:
            return open_image(data, name=name, max_pixels=2**62, formats=FORMATS)
        except Image.DecompressionBombError:
            raise _too_many_pixels(f"{name} has too many pixels") from None
        except InputError as error:
            raise ServiceError(422, "bad_image", str(error)) from None
        except Exception:  # a parser may raise anything on hostile bytes
            raise ServiceError(422, "bad_image", f"{name} cannot be read as an image") from None


def _too_many_pixels(message: str) -> ServiceError:
    return ServiceError(422, "too_many_pixels", message)


def _source_of(document: RequestDocument) -> str:
    if isinstance(document, ImageDocument):
        return document.image
    if isinstance(document, ContentDocument):
        return document.content[0].image_url.url
    return document


def _shown(document: RequestDocument) -> dict[str, Any]:
    return {"image": document} if isinstance(document, str) else document.model_dump()


def _bytes_of(source: str, name: str) -> bytes:
    if source[:5].lower() == "data:":
        head, comma, body = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise _bad_document(f"{name}: a data URI must be base64")
    elif len(source) < MIN_BASE64 or not _BASE64.fullmatch(source):
        raise _bad_document(
            f"{name} is not a data URI, base64 or an allowed URL; text and file paths are not supported"
        )
    else:
        body = source
    try:
        return base64_bytes(body)
    except ValueError:
        raise _bad_document(f"{name} is not valid base64") from None


def _bad_document(message: str) -> ServiceError:
    return ServiceError(422, "bad_document", message)
