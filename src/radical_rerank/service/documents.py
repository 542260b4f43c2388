"""From the bytes of a request to its fields and images, or an error that names the bad document.

This code runs in the reader processes (`reader`), so it imports neither torch nor the web framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pydantic_core
from PIL import Image
from pydantic import ValidationError

from radical_rerank.errors import InputError, MissingExtraError
from radical_rerank.reranking.encoding import (
    FILE_NAME,
    LoadedImage,
    PageImage,
    Parts,
    base64_bytes,
    image_names,
    open_image,
    with_page,
)
from radical_rerank.reranking.pages import pages_of
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.schema import MAX_QUERY, MixedDocument, RequestDocument, RerankRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""the image formats to accept: not SVG, PDF, PostScript or TIFF"""
MAX_SCANS = 16
"""scans of a progressive JPEG of the largest size; smaller images may have more"""
MAX_VALUES = 100_000
"""JSON values in a request; a request of 200 documents has about a thousand"""
# Base64 begins with 64 characters without a space: a text does not, and no image is smaller.
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-]{64}[A-Za-z0-9+/_\-\s]*={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)
_PATH = re.compile(r"(\.{0,2}/|~|[a-z]:[\\/])\S*$|\w+://", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    methods: the names that it may use
    max_text, max_total_text: characters of one document's text, and of all texts
    max_pixels, max_total_pixels: of one image, and of all images
    """

    methods: tuple[str, ...]
    max_documents: int
    max_images: int
    max_text: int
    max_total_text: int
    max_pixels: int
    max_total_pixels: int


@dataclass(frozen=True)
class ParsedRequest:
    """A request without its images.

    composed: whether the query's only image is a reference
    context: the number of the query's images
    places: per candidate, the document's place in the request, and the page's number if it is a PDF
    counts: per candidate, the number of its images
    texts: per candidate, its text, or an empty string
    sources: per image, the query's first: its URL, or None if it was in the request
    shown: the documents as the client sent them, if the response repeats them
    """

    query: str
    instruction: str | None
    composed: bool
    context: int
    places: list[tuple[int, int | None]]
    counts: list[int]
    texts: list[str]
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
        own = ["the reference" if self.composed else "the query's image"] * self.context
        return own + list(chain(*map(image_names, self.candidate_names, self.counts)))

    @property
    def has_pages(self) -> bool:
        """Whether a document is a PDF."""
        return any(page is not None for _, page in self.places)

    @property
    def candidate_names(self) -> list[str]:
        """The names of the candidates in error messages."""
        return [with_page(f"document {index}", page) for index, page in self.places]


def parsed_request(fields: dict[str, Any]) -> ParsedRequest:
    """Return a request from the JSON of its fields, in which tuples are lists."""
    places = [(index, page) for index, page in fields["places"]]
    return ParsedRequest(**{**fields, "places": places})


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
    if body.method is not None and body.method not in limits.methods:
        choices = ", ".join(limits.methods)
        raise ServiceError(422, "unknown_method", f"unknown method; choose from: {choices}")
    return body


def _invalid(message: str) -> ServiceError:
    return ServiceError(422, "invalid_request", message)


NamedImage = tuple[str, LoadedImage]
"""an image that is opened but not decoded, or a page that is not drawn, with its name for error messages"""


@dataclass(frozen=True)
class _Candidate:
    """A document, or a page of one. images: as they were sent, or a page; not opened yet"""

    index: int
    images: Sequence[Any]
    text: str
    page: int | None = None


def open_request(body: RerankRequest, opener: ImageOpener) -> tuple[ParsedRequest, list[NamedImage]]:
    """Open the images of a request.

    Args:
        body: the request
        opener: checks each image

    Returns:
        The request without its images, and those of them that are not URLs.
    """
    query, composed = _query_of(body)
    candidates = list(_candidates(body.documents, opener))
    _check_sizes(query, candidates, opener.limits)
    parsed = ParsedRequest(
        query=query.text.strip(),
        instruction=(body.instruction or "").strip() or None,
        composed=composed,
        context=len(query.images),
        places=[(candidate.index, candidate.page) for candidate in candidates],
        counts=[len(candidate.images) for candidate in candidates],
        texts=[candidate.text.strip() for candidate in candidates],
        sources=[],
        model=body.model,
        top_n=body.top_n,
        method=body.method,
        keep=body.keep,
        return_pruning=body.return_pruning,
        return_survivors=body.return_survivors,
        shown=list(map(_shown, body.documents)) if body.return_documents else None,
    )
    images: list[NamedImage] = []
    sources = chain(query.images, *(candidate.images for candidate in candidates))
    for name, source in zip(parsed.names, sources, strict=True):
        is_url = isinstance(source, str) and _URL.match(source.strip()) is not None
        parsed.sources.append(source.strip() if is_url else None)
        if isinstance(source, PageImage):
            images.append((name, source))
        elif not is_url:
            images.append((name, opener.open(_bytes_of(source.strip(), name), name)))
    return parsed, images


def has_pdf(body: RerankRequest) -> bool:
    """Check whether a document is a PDF: nobody can tell beforehand how long reading it takes."""
    return any(
        isinstance(document, MixedDocument) and document.pdf is not None for document in body.documents
    )


def _candidates(documents: Sequence[RequestDocument], opener: ImageOpener) -> Iterator[_Candidate]:
    """Yield the documents; of a PDF, its pages."""
    left = opener.limits.max_documents
    for index, document in enumerate(documents):
        name = f"document {index}"
        if isinstance(document, str) or document.pdf is None:
            parts = _parts_of(document, name)
            yield _Candidate(index, parts.images, parts.text)
            left -= 1
            continue
        if len(document.model_dump(exclude_none=True)) > 1:
            raise _bad_document(f"{name} has a pdf and other fields; send one of them")
        try:
            for page in pages_of(_bytes_of(document.pdf.strip(), name), name=name, max_pages=max(1, left)):
                image = PageImage.of(page)
                opener.count(*image.size, with_page(name, page.number))
                yield _Candidate(index, [image], page.text(), page.number)
                left -= 1
        except MissingExtraError:
            raise _bad_document(f"{name}: this service does not read PDF files") from None
        except InputError as error:
            raise _bad_document(str(error)) from None


def _query_of(body: RerankRequest) -> tuple[Parts, bool]:
    """Return the query's text and images, and whether the only image is a reference."""
    query = Parts(text=body.query) if isinstance(body.query, str) else _parts_of(body.query, "the query")
    if len(query.text) > MAX_QUERY:
        raise _invalid(f"query: a text may have at most {MAX_QUERY} characters")
    if not query.text.strip() and not query.images:
        raise _invalid("query: must not be empty")
    if body.reference is None:
        return query, False
    reference = _parts_of(body.reference, "the reference")
    if query.images or len(reference.images) != 1 or reference.text:
        raise _invalid("reference: must be one image without a text, for a query of words alone")
    return Parts(reference.images, query.text), True


def _parts_of(document: RequestDocument, name: str) -> Parts:
    """Return the text of a document, and its images as they were sent."""
    if not isinstance(document, str):
        fields = document.model_dump(exclude_none=True)
        if "content" in fields and len(fields) > 1:
            raise _bad_document(f"{name} has a content and other fields; send one of them")
        try:
            return Parts.of(fields, name)
        except InputError as error:
            raise _bad_document(str(error)) from None
    string = document.strip()
    if _is_image(string):
        return Parts((string,))
    if not string:
        raise _bad_document(f"{name} is empty")
    if _PATH.match(string) or FILE_NAME.search(string[-5:]):
        raise _bad_document(
            f"{name} looks like a file path, which is not supported: send a data URI, base64 or an allowed "
            'URL; or {"text": …} if it is a text'
        )
    return Parts(text=string)


def _is_image(string: str) -> bool:
    """Check whether a plain string is an image: a data URI, a URL or base64."""
    return bool(string[:5].lower() == "data:" or _URL.match(string) or _BASE64.fullmatch(string))


def _check_sizes(query: Parts, candidates: Sequence[_Candidate], limits: Limits) -> None:
    """Check the numbers of pages and images, and the lengths of texts."""
    if len(candidates) > limits.max_documents:
        message = f"a request may have at most {limits.max_documents} documents and pages"
        raise ServiceError(422, "too_many_documents", message)
    if len(query.images) + sum(len(candidate.images) for candidate in candidates) > limits.max_images:
        raise ServiceError(422, "too_many_images", f"a request may have at most {limits.max_images} images")
    for candidate in candidates:
        if len(candidate.text) > limits.max_text:
            message = f"the text of document {candidate.index} has more than {limits.max_text} characters"
            raise ServiceError(422, "too_much_text", message)
    if len(query.text) + sum(len(candidate.text) for candidate in candidates) > limits.max_total_text:
        message = f"the texts together have more than {limits.max_total_text} characters"
        raise ServiceError(422, "too_much_text", message)


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
        # Each scan of a progressive JPEG goes over all pixels, and may take no more than 50 bytes.
        scans = data.count(b"\xff\xda") if image.format in ("JPEG", "MPO") else 1
        self.count(image.width, image.height, name, scans)
        return image

    def count(self, width: int, height: int, name: str, scans: int = 1) -> None:
        """Count the pixels of an image, or raise a ServiceError if there are too many."""
        limit, pixels = self.limits.max_pixels, width * height
        if pixels > limit:
            raise _too_many_pixels(f"{name} has {pixels} pixels, more than the limit of {limit}")
        if pixels * scans > MAX_SCANS * limit:
            raise ServiceError(422, "bad_image", f"{name} has {scans} scans, too many for its size")
        self.pixels += pixels
        self.work += pixels * scans
        total = self.limits.max_total_pixels
        if self.pixels > total:
            raise _too_many_pixels(f"the images together have more than {total} pixels")

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


def _shown(document: RequestDocument) -> dict[str, Any]:
    if isinstance(document, str):
        return {"image" if _is_image(document.strip()) else "text": document}
    return document.model_dump(exclude_unset=True)


def _bytes_of(source: str, name: str) -> bytes:
    if source[:5].lower() == "data:":
        head, comma, body = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise _bad_document(f"{name}: a data URI must be base64")
    elif not _BASE64.fullmatch(source):
        raise _bad_document(
            f"{name} is not a data URI, base64 or an allowed URL; file paths are not supported"
        )
    else:
        body = source
    try:
        return base64_bytes(body)
    except ValueError:
        raise _bad_document(f"{name} is not valid base64") from None


def _bad_document(message: str) -> ServiceError:
    return ServiceError(422, "bad_document", message)
