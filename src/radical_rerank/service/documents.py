"""From a request's bytes to its fields and pictures, or a refusal that names the culprit.

This runs in a process that may be killed (`reader`): what is imported here is imported there, so neither
torch nor the web framework.
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

# What image libraries here may be asked to open: no SVG, no PDF, no PostScript, no TIFF.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SCANS = 16
"""how often a JPEG of the largest size may go over its pixels; smaller ones may do so more often"""
VALUES = 100_000
"""JSON values in a request; one of 200 documents has about a thousand"""
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """methods: those that a request may name"""

    methods: tuple[str, ...]
    max_documents: int
    max_pixels: int
    max_total_pixels: int


@dataclass(frozen=True)
class Asked:
    """A request without its pictures.

    sources: per picture, the reference first if there is one, its URL, or None where it was in the request
    shown: the documents as the client sent them, where the answer is to repeat them
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
        documents = [f"document {number}" for number in range(len(self.sources) - self.composed)]
        return ["the reference", *documents] if self.composed else documents


def parse(data: bytes | bytearray, limits: Limits) -> RerankRequest:
    """The request that these bytes are, checked from the outside in: counts first, then elements."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{", b":")) > VALUES:
        raise ServiceError(422, "invalid_request", f"the request has more than {VALUES} values")
    try:
        fields = pydantic_core.from_json(data)
    except ValueError as error:
        raise ServiceError(422, "invalid_request", f"the request is not JSON: {error}") from None
    documents = fields.get("documents") if isinstance(fields, dict) else None
    if isinstance(documents, list) and len(documents) > limits.max_documents:
        raise ServiceError(
            422, "too_many_documents", f"at most {limits.max_documents} documents are ranked at once"
        )
    try:
        body = RerankRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ServiceError(
            422, "invalid_request", f"{where}: {first['msg']}" if where else first["msg"]
        ) from None
    if not body.query.strip():
        raise ServiceError(422, "invalid_request", "query: it is empty")
    if body.method is not None and body.method not in limits.methods:
        raise ServiceError(
            422, "unknown_method", f"there is no such method; there are {', '.join(limits.methods)}"
        )
    return body


Named = tuple[str, Image.Image]


def asked_of(body: RerankRequest, pictures: Pictures) -> tuple[Asked, list[Named]]:
    """The request without its pictures, and those that were in it, opened, with their names."""
    documents = ([] if body.reference is None else [body.reference]) + body.documents
    asked = Asked(
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
    found: list[Named] = []
    for number, (document, name) in enumerate(zip(documents, asked.names, strict=True)):
        source = _source_of(document).strip()
        if _URL.match(source):
            asked.sources[number] = source
        else:
            found.append((name, pictures.open(_bytes(source, name), name)))
    return asked, found


class Pictures:
    """Opens pictures within the limits of one request. Nothing is decompressed before it is measured.

    pixels: of all that were opened
    work: the same, each as often as decoding goes over them
    """

    def __init__(self, limits: Limits, pixels: int = 0) -> None:
        self.limits, self.pixels, self.work = limits, pixels, 0

    def open(self, data: bytes, name: str) -> Image.Image:
        if not data:
            raise ServiceError(422, "bad_image", f"{name} is empty")
        most = self.limits.max_pixels
        try:
            image = open_image(data, name=name, max_pixels=2**62, formats=FORMATS)
        except Image.DecompressionBombError:
            raise ServiceError(422, "too_many_pixels", f"{name} has too many pixels") from None
        except InputError as error:
            raise ServiceError(422, "bad_image", str(error)) from None
        except Exception:  # any parser may fail in any way on hostile bytes
            raise ServiceError(422, "bad_image", f"{name} cannot be read as an image") from None
        pixels = image.width * image.height
        if pixels > most:
            raise ServiceError(
                422, "too_many_pixels", f"{name} has {pixels} pixels, more than the limit of {most}"
            )
        # Each scan of a progressive JPEG goes over all pixels, and may take no more than 50 bytes.
        scans = data.count(b"\xff\xda") if image.format in ("JPEG", "MPO") else 1
        if pixels * scans > SCANS * most:
            raise ServiceError(422, "bad_image", f"{name} has {scans} scans, too many for its size")
        self.pixels += pixels
        self.work += pixels * scans
        if self.pixels > self.limits.max_total_pixels:
            raise ServiceError(
                422,
                "too_many_pixels",
                f"the images have more than {self.limits.max_total_pixels} pixels together",
            )
        return image


def _source_of(document: RequestDocument) -> str:
    if isinstance(document, ImageDocument):
        return document.image
    if isinstance(document, ContentDocument):
        return document.content[0].image_url.url
    return document


def _shown(document: RequestDocument) -> dict[str, Any]:
    return {"image": document} if isinstance(document, str) else document.model_dump()


def _bytes(source: str, name: str) -> bytes:
    if source[:5].lower() == "data:":
        head, comma, body = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ServiceError(422, "bad_document", f"{name}: a data URI must be base64")
    elif len(source) < 64 or not _BASE64.fullmatch(source):
        raise ServiceError(
            422,
            "bad_document",
            f"{name} is neither a data URI nor base64 nor an allowed URL; text and paths are not ranked",
        )
    else:
        body = source
    try:
        return base64_bytes(body)
    except ValueError:
        raise ServiceError(422, "bad_document", f"{name} is not valid base64") from None
