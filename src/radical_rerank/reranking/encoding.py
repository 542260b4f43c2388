"""From queries and documents to vision features: their pictures and texts, the encoder and its cache.

The service's reader processes import this file to decode pictures, so it must not import torch.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from radical_rerank.errors import InputError, unknown_name
from radical_rerank.reranking.pages import Page, pages_of

if TYPE_CHECKING:
    from radical_rerank.backbones import Backbone, ImageFeatures, Pixels
    from radical_rerank.backbones.engine import PrefixState  # noqa: F401, named as a string below
    from radical_rerank.pruning import Look, Pruner, VisionSignals

MAX_PIXELS = 64_000_000
"""larger images are refused"""
MAX_IMAGE_TOKENS = 384
"""larger images are scaled down to this many visual tokens; COCO's have about 300"""
MAX_TEXT_TOKENS = 512
"""longer texts of documents are cut to this many tokens"""
VISION_CACHE_BYTES = 1 << 30
"""how much of the images encoded last is kept"""
PROMPT_CACHE_BYTES = 1 << 28
"""how much is kept of what the first layers computed for the candidates ranked last"""
TOKEN_SIDE = 64
"""pixels along a side of what becomes one visual token, at most; in most models it is 28 or 32"""
THREADS = min(8, os.cpu_count() or 1)
ENCODED_TOGETHER = 8
"""images per call of the encoder; the next ones are preprocessed at the same time"""
PAGE_PIXELS = 1_000_000
"""of the picture of a PDF's page, at most"""


class ArrayLike(Protocol):
    """Anything that NumPy can read as an array, such as a torch tensor on the CPU."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


ImageLike: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | ArrayLike"
"""A path, a data URI, encoded bytes, a PIL image, or an array (H, W), (H, W, 1|3|4) of any real type"""
Document: TypeAlias = "ImageLike | Mapping[str, Any]"
"""A picture, a text of several words, or a dict with `image` or `images`, and `text`; or vLLM's `content`"""


# What a document holds: pictures and a text, not loaded yet.


@dataclass(frozen=True)
class Parts:
    """The pictures and the text of a document or a query.

    Example:
        >>> Parts.of({"text": "a mug", "image": "mug.jpg"}, "document 0")
        Parts(images=('mug.jpg',), text='a mug')
        >>> Parts.of("a mug of coffee", "document 0").text
        'a mug of coffee'
    """

    images: tuple[ImageLike, ...] = ()
    text: str = ""

    @classmethod
    def of(cls, document: Document, name: str) -> Parts:
        """Read any form of a document. name: for error messages"""
        if isinstance(document, Mapping):
            alone = set(document) == {"content"}
            parts = _from_content(document["content"], name) if alone else _from_fields(document, name)
            if not parts.images and not parts.text.strip():
                raise InputError(f"{name} has neither a picture nor a text")
            return parts
        if isinstance(document, str) and is_text(document):
            return cls(text=document)
        return cls((document,))


@dataclass(frozen=True)
class Query:
    """What to look for: words, pictures, or both; or a change in words to a reference (composed retrieval).

    Args:
        text: the query, or how the reference is to change; may be empty if there are pictures
        reference: the image that the text changes
        images: pictures that are a part of the query
        instruction: what to look for, for templates that have an `{instruction}`; by default the Reranker's

    Example:
        >>> Query("a red star").reference is None
        True
        >>> Query.of({"text": "in brass", "image": "lamp.jpg"}).images
        ('lamp.jpg',)
    """

    text: str = ""
    reference: ImageLike | None = None
    images: Sequence[ImageLike] = ()
    instruction: str | None = None

    @classmethod
    def of(cls, query: str | Query | Mapping[str, Any]) -> Query:
        """Return a text or a dict with `text`, `image`, `images`, `content`, `instruction` as a query."""
        if isinstance(query, Query):
            return query
        if not isinstance(query, Mapping):
            return cls(query)
        fields = {name: value for name, value in query.items() if name != "instruction"}
        parts = Parts.of(fields, "the query")
        return cls(parts.text, images=parts.images, instruction=query.get("instruction"))


_PDF = b"%PDF-"
_PATH = re.compile(r"(\.{0,2}/|~|[A-Za-z]:[\\/])")
FILE_NAME = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|svg|pdf)$", re.IGNORECASE)
"""the end of the name of a file that might be meant"""


def is_text(string: str) -> bool:
    """Whether a plain string is a text, not a path or a URL: it has several words, and no form of a path.

    A misspelt path must not be ranked as a text, so a single word is a path. Pass {"text": …} for any text.

    Example:
        >>> is_text("a red mug"), is_text("mug.jpg"), is_text("my photos/a mug.jpg"), is_text("mug")
        (True, False, False, False)
    """
    words = string.split()
    if len(words) < 2 or _is_data_uri(string) or "://" in words[0]:
        return False
    return not (_PATH.match(string) or FILE_NAME.search(string.strip()) or os.path.isfile(string))


def is_pdf(document: Any) -> bool:
    """Return whether this is the path of a PDF file by its name, or the bytes of one by their beginning.

    Example:
        >>> is_pdf("report.PDF"), is_pdf(b"%PDF-1.7 ..."), is_pdf("report.png")
        (True, True, False)
    """
    if isinstance(document, (bytes, bytearray, memoryview)):
        return bytes(document[: len(_PDF)]) == _PDF
    if not isinstance(document, (str, os.PathLike)):
        return False
    name = os.fspath(document)
    return isinstance(name, str) and name[-4:].lower() == ".pdf" and name[:5].lower() != "data:"


def _from_fields(fields: Mapping[str, Any], name: str) -> Parts:
    known = ("image", "images", "text")
    for field_name in fields:
        if field_name not in known:
            raise unknown_name("field", str(field_name), (*known, "content"), of=name)
    images, text = fields.get("images"), fields.get("text")
    if images is not None and (isinstance(images, (str, bytes)) or not isinstance(images, Sequence)):
        raise InputError(f"{name}: images must be a list")
    if text is not None and not isinstance(text, str):
        raise InputError(f"{name}: text must be a string, not a {type(text).__name__}")
    single = [] if fields.get("image") is None else [fields["image"]]
    return Parts((*single, *(images or ())), text or "")


def _from_content(content: Any, name: str) -> Parts:
    """Read vLLM's content: a text, or a list of {"type": "text" | "image_url" | "image", …}."""
    if isinstance(content, str):
        return Parts(text=content)
    images: list[ImageLike] = []
    texts: list[str] = []
    for part in content if isinstance(content, Sequence) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if kind in ("text", "image_url", "image") else None
        if kind == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
        if value is None or (kind == "text" and not isinstance(value, str)):
            raise InputError(f'{name}: a part of its content is not {{"type": "text" or "image_url", …}}')
        (texts if kind == "text" else images).append(value)
    return Parts(tuple(images), "\n".join(texts))


# Loading: from a picture in any form to an upright RGB one, or an error that names the document.


def load_image(
    document: ImageLike,
    *,
    name: str = "image",
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
    side: int | None = None,
) -> Image.Image:
    """Load a document as an upright RGB picture. Animations give their first frame, transparency is white.

    Arguments: see `load_images`
    """
    (image,) = load_images([document], names=[name], max_pixels=max_pixels, formats=formats, side=side)
    if isinstance(image, InputError):
        raise image
    return image


def load_images(
    documents: Sequence[ImageLike],
    *,
    names: Sequence[str],
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
    side: int | None = None,
) -> list[Image.Image | InputError]:
    """Load many documents in parallel. A document that cannot be read gives its error instead.

    formats: the encoded formats to accept, by Pillow's names; by default all that Pillow knows
    side: pixels that are enough along each side, see `decode`; by default pictures keep their size
    """
    opened: list[tuple[str, Any]] = []
    for document, name in zip(documents, names, strict=True):
        if isinstance(document, (str, os.PathLike)) and not _is_data_uri(document):
            name = f"{name} ({os.fspath(document)})"
        opening = partial(open_image, document, name=name, max_pixels=max_pixels, formats=formats)
        opened.append((name, _attempt(name, opening)))
    # An image object may occur twice, and decodes itself in place: each goes to one thread.
    distinct = {id(image): (name, image) for name, image in opened}
    given = {id(document) for document in documents}

    def decoded(pair: tuple[str, Any]) -> Image.Image | InputError:
        name, image = pair
        if isinstance(image, InputError):
            return image
        # The caller's own image object is decoded in place, so it must keep its size.
        upright: Image.Image | InputError = _attempt(
            name, partial(_upright_rgb, image, None if id(image) in given else side)
        )
        return upright

    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(zip(distinct, pool.map(decoded, distinct.values()), strict=True))
    return [results[id(image)] for _, image in opened]


def _attempt(name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except InputError as error:
        return error
    except Exception as error:  # a parser may raise anything on broken bytes
        return InputError(f"{name} cannot be read as an image: {error}")


def open_image(
    document: ImageLike, *, name: str, max_pixels: int, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """Open a document as an image: its size is checked, its pixels are not decoded yet.

    Decode this very object: opened again, the same bytes might be read as another format.
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
    """Return the image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _is_data_uri(document: Any) -> TypeGuard[str]:
    return isinstance(document, str) and document[:5].lower() == "data:"


def _open(document: ImageLike, name: str, formats: tuple[str, ...] | None) -> Image.Image:
    if isinstance(document, Image.Image):
        return document
    if _is_data_uri(document):
        return _decode(_data_uri_bytes(document, name), name, formats)
    if isinstance(document, (str, os.PathLike)):
        path = Path(document)
        if not path.is_file():
            hint = "" if path.suffix else '; a text of one word is {"text": …}'
            raise InputError(f"{name} is not a file" if path.exists() else f"{name} does not exist{hint}")
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
    """Decode base64 in either alphabet, with or without line breaks and padding. Raises ValueError."""
    body = text.encode("ascii").translate(_BASE64, delete=b" \t\r\n\f\v")
    return base64.b64decode(body + b"=" * (-len(body) % 4), validate=True)


def _decode(data: bytes, name: str, formats: tuple[str, ...] | None) -> Image.Image:
    if not data:
        raise InputError(f"{name} is empty")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; our pixel limit is checked next, before decoding.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        known = "an image format that can be read" if formats is None else f"one of {', '.join(formats)}"
        raise InputError(f"{name} is not in {known}") from None


def _from_array(array: np.ndarray[Any, Any], name: str) -> Image.Image:
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
        raise InputError(f"{name} is an array of {array.dtype}, which is not an image")
    return Image.fromarray(np.ascontiguousarray(array))


# How to undo each EXIF orientation but 1: the transposition, whether it swaps the sides, and whether the
# first rows become the last rows or columns.
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
"""pixels to convert at a time"""


def enough_side(max_tokens: int) -> int:
    """Return how many pixels along each side are enough for a picture of up to so many visual tokens.

    Models that keep the shape of a picture, or nearly so, never make more of it.
    """
    return math.ceil(TOKEN_SIDE * math.sqrt(max_tokens))


def decode(image: Image.Image, side: int | None = None) -> tuple[int, int]:
    """Decode the first frame; a truncated file fails here. Returns the size of the upright picture.

    side: a JPEG is decoded at a half, a quarter or an eighth of its size, if both sides keep so many pixels:
        this is faster by far, and the model does not see the difference
    """
    if getattr(image, "is_animated", False):
        image.seek(0)
    if side is not None:
        image.draft(None, (side, side))  # other formats than JPEG ignore it
    image.load()
    swapped = _TURNS.get(_orientation(image), (None, False))[1]
    return (image.height, image.width) if swapped else image.size


def pieces(image: Image.Image) -> Iterator[tuple[tuple[int, int], Image.Image]]:
    """Yield a decoded image as upright RGB pieces with their upper left corners, to avoid a second copy."""
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


def _upright_rgb(image: Image.Image, side: int | None = None) -> Image.Image:
    """Return an upright RGB picture; the image itself if it is one already. side: see `decode`"""
    size = decode(image, side)
    if image.mode == "RGB" and "transparency" not in image.info and _orientation(image) not in _TURNS:
        return image
    picture = Image.new("RGB", size)
    for corner, piece in pieces(image):
        picture.paste(piece, corner)
    return picture


def _orientation(image: Image.Image) -> Any:
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _top_value(image: Image.Image) -> float | None:
    """Return the value of white if pixels have 16 or 32 bits: they are scaled, not clipped."""
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


# Features: from pictures to the encoder's output, each distinct picture encoded once.


@dataclass(frozen=True)
class PageImage:
    """The picture of a PDF's page, drawn each time it is used: a long file is never in memory as a whole."""

    page: Page
    size: tuple[int, int]

    @classmethod
    def of(cls, page: Page) -> PageImage:
        """Measure the page; a page without a size is an InputError."""
        return cls(page, page.size(PAGE_PIXELS))

    def drawn(self) -> Image.Image:
        """Draw the page."""
        return self.page.image(PAGE_PIXELS)


LoadedImage: TypeAlias = "Image.Image | PageImage"


@dataclass(frozen=True)
class Picture:
    """An RGB image to encode at up to `max_tokens` visual tokens. name: for error messages"""

    name: str
    image: LoadedImage
    max_tokens: int

    def key(self, *, signals: bool) -> str:
        """Name it by its content, the size at which it is encoded, and whether signals are requested."""
        if isinstance(self.image, PageImage):
            return f"{self.image.page.key()} {self.image.size} {self.max_tokens} {signals}"
        return content_key(self.image, self.max_tokens, signals)


@dataclass(frozen=True)
class Candidate:
    """A document, loaded.

    index: its place in the user's list of documents
    images: its pictures, none if it is a text
    page: its number, if it is a page of the document
    """

    index: int
    images: tuple[LoadedImage, ...] = ()
    text: str = ""
    page: int | None = None

    @property
    def name(self) -> str:
        """What error messages call it."""
        return with_page(f"document {self.index}", self.page)


@dataclass(frozen=True)
class CandidateList:
    """A query and its candidates, loaded.

    text: the query's words
    context: the query's pictures
    composed: the only picture is a reference that the words change
    """

    text: str
    candidates: Sequence[Candidate]
    context: Sequence[Image.Image] = ()
    composed: bool = False
    instruction: str | None = None

    @property
    def images(self) -> list[LoadedImage]:
        """All pictures of the candidates."""
        return [image for candidate in self.candidates for image in candidate.images]

    @property
    def names(self) -> list[str]:
        """What error messages call each of these pictures."""
        return list(chain(*(image_names(one.name, len(one.images)) for one in self.candidates)))

    def pictures(self, limits: Sequence[int], context_limit: int) -> list[Picture]:
        """Return what to encode, at up to these numbers of tokens: the query's pictures first."""
        name = REFERENCE if self.composed else CONTEXT
        context = [Picture(name, image, context_limit) for image in self.context]
        return context + list(map(Picture, self.names, self.images, limits))

    def own(self, features: Sequence[ImageFeatures]) -> list[Sequence[ImageFeatures]]:
        """Return each candidate's features: all but those of the query's pictures."""
        remaining = iter(features[len(self.context) :])
        return [list(islice(remaining, len(candidate.images))) for candidate in self.candidates]


def with_page(name: str, page: int | None) -> str:
    """Name a document, or a page of it."""
    return name if page is None else f"{name}, page {page}"


def image_names(name: str, images: int) -> list[str]:
    """Name each picture of a document."""
    return [name if images == 1 else f"{name}, image {number}" for number in range(images)]


REFERENCE, CONTEXT = "the reference image", "the query's picture"
LookFunction = Callable[[CandidateList, Sequence["ImageFeatures"]], "Look"]


class Clock:
    """Measures seconds by part, shared equally by the lists of a batch."""

    def __init__(self, lists: int) -> None:
        self.seconds: dict[str, float] = {"preprocess": 0.0, "vision": 0.0}
        self._lists = lists

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part."""
        start = time.perf_counter()
        yield
        self.add(part, time.perf_counter() - start)

    def add(self, part: str, spent: float) -> None:
        """Add seconds (negative: take them away) to a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + spent / self._lists


@dataclass(frozen=True)
class Encoder:
    """Loads documents and encodes them with a model's vision encoder, through a cache.

    Args:
        backbone: the model
        cache: features of pictures that were encoded before
        max_image_tokens: larger images are scaled down to this many visual tokens
        max_pixels: larger images are refused
    """

    backbone: Backbone
    cache: VisionCache
    max_image_tokens: int = MAX_IMAGE_TOKENS
    max_pixels: int = MAX_PIXELS

    def load(
        self, documents: Sequence[Document], *, skip: bool, page_text: bool = False
    ) -> tuple[list[Candidate], dict[int, str]]:
        """Load documents. Returns them, and why each unusable one was skipped (by index).

        skip: leave out documents that cannot be used, instead of raising an InputError
        page_text: pages of PDF files come with their own text
        """
        unusable: dict[int, InputError] = {}
        read: dict[int, Parts] = {}
        pages: dict[int, list[Candidate]] = {}
        for index, document in enumerate(documents):
            try:
                if is_pdf(document):
                    pages[index] = list(_pages(document, index, page_text=page_text))
                else:
                    read[index] = Parts.of(document, f"document {index}")
            except InputError as error:
                unusable[index] = error
        names = list(chain(*(image_names(f"document {i}", len(parts.images)) for i, parts in read.items())))
        sources = list(chain(*(parts.images for parts in read.values())))
        opened = iter(zip(names, self._opened(sources, names), strict=True))
        loaded: list[Candidate] = list(chain(*pages.values()))
        for index, parts in read.items():
            own = list(islice(opened, len(parts.images)))
            try:
                images = tuple(self._usable(image, name, thoroughly=skip) for name, image in own)
                loaded.append(Candidate(index, images, parts.text.strip()))
            except InputError as error:
                unusable[index] = error
        if unusable and not skip:
            raise unusable[min(unusable)]
        shipped = self.backbone.shipped
        loaded.sort(key=lambda candidate: candidate.index)  # stable: pages stay in their order
        sizes = {image.size for candidate in loaded for image in candidate.images}
        if shipped is not None and (shipped.sizes is None or not sizes <= shipped.sizes):
            shipped.warn_of_limits()
        return loaded, {index: str(unusable[index]) for index in sorted(unusable)}

    def _usable(self, image: Image.Image | InputError, name: str, *, thoroughly: bool = False) -> Image.Image:
        if isinstance(image, InputError):
            raise image
        if thoroughly:
            self.check(image, name, thoroughly=True)
        return image

    def load_context(self, images: Sequence[ImageLike], name: str) -> list[Image.Image]:
        """Load the pictures of a query."""
        return [self._usable(image, name) for image in self._opened(images, [name] * len(images))]

    def _opened(self, images: Sequence[ImageLike], names: Sequence[str]) -> list[Image.Image | InputError]:
        """Load pictures at a size that is enough for the model."""
        side = enough_side(self.max_image_tokens)
        return load_images(images, names=names, max_pixels=self.max_pixels, side=side)

    def check(self, image: LoadedImage, name: str, *, thoroughly: bool = False) -> None:
        """Raise an InputError if the model cannot take this RGB image, for example for its aspect ratio.

        thoroughly: preprocess it, instead of checking only its size
        """
        try:
            self.backbone.count_tokens(image, self.max_image_tokens)
            if thoroughly and not isinstance(image, PageImage):
                self.backbone.preprocess(image, self.max_image_tokens)
        except Exception as error:  # processors may raise anything
            raise _unusable(name, error) from error

    def encode(self, pictures: Sequence[Picture], clock: Clock, *, signals: bool) -> list[ImageFeatures]:
        """Return the features of each picture; with the encoder's signals if requested."""
        encoded: dict[str, ImageFeatures] = {}
        new: dict[str, Picture] = {}
        with clock("preprocess"), ThreadPoolExecutor(THREADS) as pool:
            keys = list(pool.map(lambda picture: picture.key(signals=signals), pictures))
            for key, picture in zip(keys, pictures, strict=True):
                if key in encoded or key in new:
                    continue
                cached = self.cache.get(key)
                if cached is None:
                    new[key] = picture
                else:
                    encoded[key] = cached
        with ThreadPoolExecutor(THREADS) as pool:
            pixels = _ahead(pool, self._preprocessed, new.values())
            remaining = iter(new)
            while batch := list(islice(remaining, ENCODED_TOGETHER)):
                with clock("preprocess"):
                    prepared = list(islice(pixels, len(batch)))
                with clock("vision"):
                    for key, features in zip(batch, self.backbone.encode(prepared, signals), strict=True):
                        # The kept copy is used at once: what is kept of a prompt knows pictures by identity.
                        encoded[key] = self.cache.put(key, features)
        return [encoded[key] for key in keys]

    def _preprocessed(self, picture: Picture) -> Pixels:
        image = picture.image.drawn() if isinstance(picture.image, PageImage) else picture.image
        try:
            return self.backbone.preprocess(image, picture.max_tokens)
        except Exception as error:
            raise _unusable(picture.name, error) from error

    def encode_lists(
        self,
        lists: Sequence[CandidateList],
        pruner: Pruner,
        look: LookFunction,
        clock: Clock,
    ) -> tuple[list[list[int]], list[list[ImageFeatures]]]:
        """Return, per list, each picture's visual tokens at full size and its features at the sizes wanted.

        The sizes are those of the candidates' pictures. The features of the query's pictures come first.
        look: for methods that resize by content, from features at full size to `pruning.Look`
        """
        limits = [[self.max_image_tokens] * len(work.images) for work in lists]
        sizes = None
        if pruner.resizes:
            resized = [
                self._resized(work, own, pruner, look, clock) for work, own in zip(lists, limits, strict=True)
            ]
            sizes, limits = [whole for whole, _ in resized], [own for _, own in resized]
        pictures = [w.pictures(own, self.max_image_tokens) for w, own in zip(lists, limits, strict=True)]
        flat = [picture for own in pictures for picture in own]
        remaining = iter(self.encode(flat, clock, signals=pruner.reads_encoder))
        features = [list(islice(remaining, len(own))) for own in pictures]
        if sizes is None:
            sizes = [
                [len(feature.tokens) for images in work.own(own) for feature in images]
                for work, own in zip(lists, features, strict=True)
            ]
        return sizes, features

    def _resized(
        self,
        work: CandidateList,
        limits: list[int],
        pruner: Pruner,
        look: LookFunction,
        clock: Clock,
    ) -> tuple[list[int], list[int]]:
        """Return the pictures' visual tokens at full size, and the most that the method gives each."""

        def looked() -> Look:
            pictures = work.pictures(limits, self.max_image_tokens)
            return look(work, self.encode(pictures, clock, signals=pruner.reads_encoder))

        with clock("preprocess"):
            for name, image in zip(work.names, work.images, strict=True):
                self.check(image, name)
            sizes = [self.backbone.count_tokens(image, self.max_image_tokens) for image in work.images]
        chosen = pruner.resize(sizes, looked) if sizes else None
        if chosen is None:
            return sizes, limits
        with clock("preprocess"):
            budget = pruner.budget_of(sum(sizes))
            return sizes, self.fill_budget(work.images, chosen, budget)

    def fill_budget(self, images: Sequence[LoadedImage], limits: Sequence[int], budget: int) -> list[int]:
        """Scale the limits by the largest factor at which the images have at most `budget` tokens together.

        An image has whole rows and columns of tokens, so usually fewer than its limit. Without this, small
        images would leave a good part of the budget unused.
        """

        def scaled(factor: float) -> list[int]:
            return [min(self.max_image_tokens, int(limit * factor)) for limit in limits]

        def fits(limits: Sequence[int]) -> bool:
            pairs = zip(images, limits, strict=True)
            return sum(self.backbone.count_tokens(image, limit) for image, limit in pairs) <= budget

        low, high = 1.0, float(self.max_image_tokens)
        for _ in range(20):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if fits(scaled(middle)) else (low, middle)
        return scaled(low)


def _pages(document: Any, index: int, *, page_text: bool) -> Iterator[Candidate]:
    """Yield the pages of a PDF file as candidates; their pictures are not drawn yet."""
    for page in pages_of(document, name=f"document {index}"):
        text = page.text() if page_text else ""
        yield Candidate(index, (PageImage.of(page),), text, page.number)


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[Picture], Pixels], pictures: Iterable[Picture]
) -> Iterator[Pixels]:
    """Yield what `work` makes of each picture, in order. Only the next two batches are in memory."""
    remaining = iter(pictures)
    running = deque(pool.submit(work, picture) for picture in islice(remaining, 2 * ENCODED_TOGETHER))
    while running:
        done = running.popleft().result()
        running.extend(pool.submit(work, picture) for picture in islice(remaining, 1))
        yield done


def joined_signals(features: Sequence[ImageFeatures]) -> VisionSignals:
    """Join the encoder's signals of a list's pictures."""
    import torch

    from radical_rerank.pruning import VisionSignals

    signals = [feature.signals for feature in features if feature.signals is not None]
    if not signals:  # texts alone
        return VisionSignals(torch.zeros(0), torch.zeros(0, 1))
    attention, keys = ([getattr(own, name) for own in signals] for name in ("attention", "keys"))
    return replace(signals[0], attention=torch.cat(attention), keys=torch.cat(keys))


def _unusable(name: str, error: Exception) -> InputError:
    return InputError(f"{name} cannot be prepared for the model: {error}")


def content_key(image: Image.Image, max_tokens: int, signals: bool = False) -> str:
    """Name an RGB image by its pixels, the size at which it is encoded, and whether signals are requested."""
    digest = hashlib.blake2b(digest_size=16)
    rows = max(1, PIECE // max(1, image.width))
    for start in range(0, image.height, rows):  # in pieces, to avoid a second copy of a large image
        box = (0, start, image.width, min(start + rows, image.height))
        digest.update(image.crop(box).tobytes())
    digest.update(f"{image.size} {max_tokens} {signals}".encode())
    return digest.hexdigest()


def content_of(candidate: Candidate) -> str:
    """Name a candidate by its text and the pixels of its pictures."""
    text = hashlib.blake2b(candidate.text.encode(), digest_size=16).hexdigest()
    pictures = (Picture("", image, 0).key(signals=False) for image in candidate.images)
    return " ".join([text, *pictures])


K = TypeVar("K")
V = TypeVar("V")


@dataclass
class BoundedCache(Generic[K, V]):
    """The values used last, up to `max_bytes`. Threads may share one.

    Args:
        max_bytes: the limit; 0 keeps nothing
    """

    max_bytes: int
    bytes: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    _entries: OrderedDict[K, tuple[V, int]] = field(default_factory=OrderedDict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_bytes,)  # a copy elsewhere starts empty

    def get(self, key: K) -> V | None:
        """Return the value of this key, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def keep(self, key: K, value: V, size: int) -> None:
        """Keep a value, instead of an earlier one of this key; those used longest ago make room.

        size: its bytes
        """
        with self._lock:
            self.bytes -= self._entries.pop(key, (None, 0))[1]
            if size > self.max_bytes:
                return
            self._entries[key] = value, size
            self.bytes += size
            while self.bytes > self.max_bytes:
                _, (_, oldest) = self._entries.popitem(last=False)
                self.bytes -= oldest

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0


class VisionCache(BoundedCache[str, "ImageFeatures"]):
    """The features of the images used last, up to `max_bytes`.

    Example:
        >>> cache = VisionCache(1 << 28)
        >>> len(cache), cache.hits, cache.misses
        (0, 0, 0)
    """

    def put(self, key: str, features: ImageFeatures) -> ImageFeatures:
        """Keep a copy of these features: those of a batch are views of one tensor. Returns what is used."""
        size = _nbytes(features)
        if size > self.max_bytes:
            return features
        copied = _copied(features)
        self.keep(key, copied, size)
        return copied


class PromptCache(BoundedCache[Hashable, "PrefixState"]):
    """What the layers before the first cut made of the candidates used last, up to `max_bytes`."""


def _nbytes(features: ImageFeatures) -> int:
    signals = () if features.signals is None else (features.signals.attention, features.signals.keys)
    return sum(tensor.nbytes for tensor in (features.tokens, *features.deepstack, *signals))


def _copied(features: ImageFeatures) -> ImageFeatures:
    """Copy the features, so that they do not keep the whole batch in memory that they were encoded in."""
    signals = features.signals
    if signals is not None:
        signals = replace(signals, attention=signals.attention.clone(), keys=signals.keys.clone())
    return replace(
        features,
        tokens=features.tokens.clone(),
        deepstack=tuple(level.clone() for level in features.deepstack),
        signals=signals,
    )
