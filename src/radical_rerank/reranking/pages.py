"""The pages of PDF files as documents: each page's picture, and its own text.

A page is read when it is asked for, and nothing of it is kept. The library behind this (PDFium, the extra
`pdf`) allows one call at a time: a lock sees to it. This file must not import torch, as `encoding` must not.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from PIL import Image

from radical_rerank.errors import InputError, needs_extra

MAX_PAGES = 1000
"""longer files are refused"""
MAX_SCALE = 300 / 72
"""pixels per point: no page is drawn finer than 300 dots per inch"""
OPEN_FILES = 4
"""files that are kept open"""
OPENED_FOR = 8
"""pages after which a file is closed: the library keeps the pictures of all pages that it has drawn"""
T = TypeVar("T")


def pages_of(
    document: str | os.PathLike[str] | bytes | bytearray | memoryview,
    *,
    name: str,
    max_pages: int = MAX_PAGES,
) -> list[Page]:
    """Return the pages of a PDF, in order. Only their number is read.

    Args:
        document: the path of a file, or its bytes
        name: what to call it in messages
        max_pages: longer files are refused

    Returns:
        The pages. An InputError names a PDF that is broken or needs a password, and one without pages.
    """
    if isinstance(document, (str, os.PathLike)):
        path = Path(document)
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{name} ({path}) {what}")
        source, name = str(path), f"{name} ({path})"
        file = _File(name, path=path.resolve(), stamp=_stamp(path))
    else:
        source, data = name, bytes(document)
        file = _File(name, data=data, stamp=(len(data), hashlib.blake2b(data, digest_size=16).hexdigest()))
    with _opened(file) as pdf:
        count = len(pdf)
    if count > max_pages:
        raise InputError(f"{name} has {count} pages, more than the limit of {max_pages}")
    return [Page(source, number, file) for number in range(1, count + 1)]


@dataclass(frozen=True)
class _File:
    """A PDF: the path of a file, or its bytes. Two are equal if the path and the stamp are."""

    name: str = field(compare=False)
    path: Path | None = None
    data: bytes | None = field(default=None, compare=False, repr=False)
    stamp: tuple[int, int | str] = (0, 0)

    def check(self) -> None:
        """Raise an InputError if the file is not the one whose pages were listed."""
        if self.path is None:
            return
        try:
            same = _stamp(self.path) == self.stamp
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror}") from None
        if not same:
            raise InputError(f"{self.name} has changed since its pages were listed")

    @cached_property
    def digest(self) -> str:
        """A digest of its bytes, which are read once."""
        found = hashlib.blake2b(self.data or b"", digest_size=16)
        if self.path is not None:
            self.check()
            with open(self.path, "rb") as file:
                while piece := file.read(1 << 20):
                    found.update(piece)
            self.check()
        return found.hexdigest()


@dataclass(frozen=True)
class Page:
    """A page of a PDF. Two are equal if they are the same page of the same file.

    Args:
        source: the path of the file, or the name of the document
        number: the page's number, from 1
    """

    source: str = field(compare=False)
    number: int
    _file: _File = field(repr=False)

    def key(self) -> str:
        """Return a digest of the file's bytes and the page's number, to cache what is made of the page."""
        return hashlib.blake2b(f"{self._file.digest} {self.number}".encode(), digest_size=16).hexdigest()

    def text(self) -> str:
        """Return the page's own text, with single spaces. A scanned page has none."""

        def read(page: Any) -> str:
            texts = page.get_textpage()
            try:
                return str(texts.get_text_bounded())
            finally:
                texts.close()

        text = self._read(read)
        # PDFium marks a hyphen at the end of a line: the word goes on without it.
        return " ".join(re.sub("[\ufffe\x02]", "", text).replace("\x00", " ").split())

    def size(self, max_pixels: int) -> tuple[int, int]:
        """Return the size of the picture that `image` would draw."""

        def measure(page: Any) -> tuple[int, int]:
            width, height = page.get_size()
            scale = self._scale(page, max_pixels)
            return math.ceil(width * scale), math.ceil(height * scale)

        return self._read(measure)

    def image(self, max_pixels: int) -> Image.Image:
        """Draw the page: upright, RGB, on white, with at most so many pixels and 300 dots per inch."""

        def draw(page: Any) -> Image.Image:
            bitmap = page.render(scale=self._scale(page, max_pixels))
            try:
                image: Image.Image = bitmap.to_pil()  # of another order of colours: a copy
                return image.convert("RGB")
            finally:
                bitmap.close()

        return self._read(draw)

    def _scale(self, page: Any, max_pixels: int) -> float:
        if max_pixels < 1:
            raise InputError(f"max_pixels must be at least 1, not {max_pixels}")
        width, height = page.get_size()
        scale = _largest_scale(width, height, max_pixels)
        if scale is None:
            raise InputError(f"page {self.number} of {self._file.name} has no size")
        return scale

    def _read(self, work: Callable[[Any], T]) -> T:
        """Open the page, work on it, and close it."""
        with _opened(self._file) as pdf:
            page = None
            try:
                page = pdf[self.number - 1]
                return work(page)
            except InputError:
                raise
            except Exception as error:  # the library may raise anything on a broken page
                raise InputError(f"page {self.number} of {self._file.name} cannot be read: {error}") from None
            finally:
                if page is not None:
                    page.close()


def _largest_scale(width: float, height: float, max_pixels: int) -> float | None:
    """Return the largest scale at which a page has at most so many pixels; None if the page has no size."""
    if not (math.isfinite(width * height) and width > 0 and height > 0):
        return None

    def fits(scale: float) -> bool:
        return math.ceil(width * scale) * math.ceil(height * scale) <= max_pixels

    low, high = 0.0, min(MAX_SCALE, math.sqrt(max_pixels / (width * height)) * 1.01)
    if fits(high):
        return high
    for _ in range(60):  # sides are rounded up to whole pixels: a formula would not be exact
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# The library's documents. All of this happens under one lock.

_lock = RLock()
_open: OrderedDict[_File, Any] = OrderedDict()
_uses: Counter[_File] = Counter()


@contextmanager
def _opened(file: _File) -> Iterator[Any]:
    """Yield the library's document, with the lock held. The last few files stay open for some time."""
    with _lock:
        file.check()
        if file not in _open:
            _open[file] = _load(file)
        _open.move_to_end(file)
        _uses[file] += 1
        try:
            yield _open[file]
        finally:
            if _uses[file] > OPENED_FOR:
                _close(file)
            while len(_open) > OPEN_FILES:
                _close(next(iter(_open)))


def _close(file: _File) -> None:
    _open.pop(file).close()
    del _uses[file]


def _load(file: _File) -> Any:
    pdfium = _library()
    # A path goes to the library as a path: it reads what it needs, not the whole file. Bytes must stay where
    # they are: `file` holds them.
    if file.path is not None:
        handle = pdfium.raw.FPDF_LoadDocument(os.fsencode(file.path), None)
    else:
        handle = pdfium.raw.FPDF_LoadMemDocument64(file.data, len(file.data or b""), None)
    if not handle:
        reason = REASONS.get(pdfium.raw.FPDF_GetLastError(), "is not a PDF that can be read")
        raise InputError(f"{file.name} {reason}")
    pdf = pdfium.PdfDocument(handle)
    if not len(pdf):
        pdf.close()
        raise InputError(f"{file.name} has no pages")
    pdf.init_forms()  # without it, what is filled into forms is not drawn
    return pdf


REASONS = {4: "is encrypted: it needs a password", 5: "is encrypted in a way that is not supported"}
"""what PDFium's error codes mean"""


@cache
def _library() -> Any:
    with needs_extra("pdf"):
        import pypdfium2
    atexit.register(close_all)  # after the library's own, so that it runs before
    return pypdfium2


def _stamp(path: Path) -> tuple[int, int]:
    known = path.stat()
    return known.st_size, known.st_mtime_ns


def close_all() -> None:
    """Close the files that are kept open."""
    with _lock:
        while _open:
            _close(next(iter(_open)))
