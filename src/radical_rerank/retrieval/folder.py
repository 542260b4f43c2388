"""The pictures of a folder as a gallery: embedded once, kept on disk, brought up to date by what changed.

The pages of PDF files count as pictures, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from radical_rerank import progress as bars
from radical_rerank.errors import InputError, MissingExtraError
from radical_rerank.files import replacing
from radical_rerank.pruning.profile import cache_folder, file_stem
from radical_rerank.reranking.encoding import (
    MAX_PIXELS,
    PAGE_PIXELS,
    Document,
    is_pdf,
    load_images,
    open_image,
    with_page,
)
from radical_rerank.reranking.pages import Page, pages_of
from radical_rerank.retrieval.embedder import Embedder
from radical_rerank.retrieval.search import nearest

log = logging.getLogger("radical_rerank")

SUFFIXES = (
    ".avif",
    ".bmp",
    ".gif",
    ".jfif",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
"""how the names of pictures end, in lower case"""
EMBEDDED_PAGE_PIXELS = 400_000
"""the size at which a page is drawn to embed it; it is ranked as large as by `Reranker.rank`"""
MAX_PAGES = 100_000
"""longer PDF files are left out"""
BATCH = 32
"""pictures that are decoded together, at most"""
BATCH_PIXELS = 64_000_000
"""their pixels together; one picture alone may have as many"""
SAVED_EVERY = 30.0
"""seconds between two savings: no more work is lost if the process is killed"""
CLOCK_NS = 50_000_000
"""files that change twice within a file system's tick have the same time of change"""
VERSION = 1

Entry: TypeAlias = tuple[str, int]
"""a picture: its path in the folder, and 0 or the number of the page"""
Stamp: TypeAlias = tuple[int, int]
"""a file's size, and the time of its last change in nanoseconds"""
Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True)
class Found:
    """A picture that was found.

    Args:
        path: its file
        score: the first stage's
        page: the number of the page, if the file is a PDF
    """

    path: Path
    score: float
    page: int | None = None

    def document(self, *, page_text: bool = False) -> Document:
        """Return what a Reranker ranks: the path, or the picture of the page, with its text if requested."""
        if self.page is None:
            return self.path
        page = _pages(self.path)[self.page - 1]
        image = page.image(PAGE_PIXELS)
        return {"image": image, "text": page.text()} if page_text else image


@dataclass(frozen=True)
class Update:
    """What an update did.

    Args:
        new, changed, removed: how many files are new, changed or gone since the last update
        embedded: how many pictures were embedded
        unreadable: why pictures and folders cannot be read; of pictures, those that were tried now
    """

    new: int = 0
    changed: int = 0
    removed: int = 0
    embedded: int = 0
    unreadable: tuple[str, ...] = ()


@dataclass
class _State:
    """What is kept on disk.

    files: the stamp of every file
    pages: of every PDF, how many pages it has
    vectors, errors: of every picture its vector, or why it has none
    """

    files: dict[str, Stamp] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    vectors: dict[Entry, Vector] = field(default_factory=dict)
    errors: dict[Entry, str] = field(default_factory=dict)

    def forget(self, path: str) -> None:
        """Remove a file."""
        for number in range(self.pages.pop(path, 0) + 1):
            self.vectors.pop((path, number), None)
            self.errors.pop((path, number), None)
        self.files.pop(path, None)

    def missing(self) -> list[Entry]:
        """Return the pictures that have neither a vector nor an error."""
        return [
            entry
            for path in sorted(self.files)
            for entry in ((path, number) for number in _numbers(self.pages.get(path)))
            if entry not in self.vectors and entry not in self.errors
        ]


def _numbers(pages: int | None) -> range:
    """Return the numbers of a file's entries: of a picture 0, of a PDF those of its pages."""
    return range(1) if pages is None else range(1, pages + 1)


def _pages(path: Path) -> list[Page]:
    return pages_of(path, name="the PDF", max_pages=MAX_PAGES)


def check_folder(folder: str | Path) -> None:
    """Raise an InputError if this is no folder."""
    if not Path(folder).exists():
        raise InputError(f"the folder {folder} does not exist")
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is not a folder")


class FolderIndex:
    """The vectors of all pictures in a folder, kept in the user's cache.

    The pages of PDF files are pictures, too (the extra `pdf`). Subfolders are searched. Files and folders
    whose name begins with a dot are left out. A link to a file is followed, a link to a folder is not, so
    that no loop is possible. A folder that cannot be listed is named in the update, and left out.

    A picture is known by its path in the folder, its size and the time of its last change: only new and
    changed files are read. One file holds the index, and is replaced as a whole. It belongs to the folder's
    true path, the embedder's name and its fingerprint. If it is damaged, it is made anew.

    Args:
        folder: the folder
        embedder: the first stage
        cache: where indexes are kept; by default the user's cache

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from radical_rerank import Backbone, generated_list
        >>> from radical_rerank.embedded.scenes.embedder import SceneEmbedder
        >>> query, images = generated_list(0, candidates=4)
        >>> with TemporaryDirectory() as folder:
        ...     for number, image in enumerate(images):
        ...         image.save(f"{folder}/{number}.png")
        ...     embedder = SceneEmbedder(Backbone.from_pretrained("scenes"))
        ...     index = FolderIndex(folder, embedder, cache=Path(folder) / ".index")
        ...     index.update().new, index.search(query, 1)[0].path.name
        (4, '0.png')
    """

    def __init__(self, folder: str | Path, embedder: Embedder, *, cache: Path | None = None) -> None:
        self.folder, self.embedder = Path(folder), embedder
        check_folder(folder)
        root = self.folder.resolve()
        self._owner = [os.fsencode(root).hex(), embedder.name, embedder.fingerprint]
        digest = hashlib.sha256(json.dumps(self._owner).encode()).hexdigest()[:16]
        stem = file_stem(os.fsencode(root).decode(errors="replace"), "folder")
        self.path = (cache or cache_folder() / "indexes") / f"{stem}-{digest}.npz"
        """the index's file"""
        self._state = self._read()
        self._gallery: tuple[list[Entry], Tensor] | None = None
        self._listed: tuple[Path, list[Page]] | None = None

    def __len__(self) -> int:
        return len(self._state.vectors)

    @property
    def unreadable(self) -> dict[str, str]:
        """Why pictures cannot be read, by path. They are tried again when they change."""
        return {_label(*entry): reason for entry, reason in sorted(self._state.errors.items())}

    def clear(self) -> None:
        """Forget everything: the next update reads all pictures."""
        self._state, self._gallery = _State(), None

    def update(self, progress: bars.Progress = bars.silent) -> Update:
        """Embed what is new or changed, and forget what is gone.

        What is done is saved every half a minute, and when an error or an interrupt ends the update.
        """
        state, self._listed = self._state, None
        earliest = time.time_ns() - CLOCK_NS
        files, unreadable = self._files()
        latest = time.time_ns() + CLOCK_NS
        removed = [path for path in state.files if path not in files]
        new = sorted(path for path in files if path not in state.files)
        changed = [path for path in files if path in state.files and files[path] != state.files[path]]
        for path in (*removed, *new, *changed):
            state.forget(path)
        broken = self._count_pages([path for path in (*new, *changed) if is_pdf(path)])
        for path in (*new, *changed):
            size, time_ns = files[path]
            # It may change again at what the file system calls the same time: look at it again next time.
            state.files[path] = size, -1 if earliest < time_ns < latest else time_ns
        missing = state.missing()
        if removed or new or changed or missing:
            self._gallery = None
            try:
                self._embed(missing, progress)
            finally:
                self._save()
        failed = [state.errors[entry] for entry in missing if entry in state.errors]
        embedded = len(missing) - len(failed)
        return Update(len(new), len(changed), len(removed), embedded, (*unreadable, *broken, *failed))

    def search(self, query: str, k: int) -> list[Found]:
        """Return the k pictures nearest to the query, best first; of equals, the first by path."""
        if not self._state.vectors:
            raise InputError(f"the folder {self.folder} has no pictures that can be read")
        if self._gallery is None:
            entries = sorted(self._state.vectors)
            self._gallery = entries, torch.from_numpy(_matrix(self._state, entries))
        entries, gallery = self._gallery
        scores, numbers = nearest(self.embedder.embed_queries([query]), gallery, k)
        each = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        return [
            Found(self.folder / path, score, number or None)
            for (path, number), score in ((entries[place], score) for place, score in each)
        ]

    # Reading the folder.

    def _files(self) -> tuple[dict[str, Stamp], list[str]]:
        """Return the stamp of every picture's file, and why folders are left out."""
        files: dict[str, Stamp] = {}
        unreadable: list[str] = []
        suffixes = (*SUFFIXES, ".pdf") if find_spec("pypdfium2") else SUFFIXES
        left_out = False
        folders = [""]
        while folders:
            inner = folders.pop()
            try:
                with os.scandir(self.folder / inner) as listing:
                    items = [item for item in listing if not item.name.startswith(".")]
            except OSError as error:
                reason = f"the folder {self.folder / inner} cannot be read: {error.strerror}"
                if not inner:
                    raise InputError(reason) from None
                unreadable.append(reason)
                continue
            for item in items:
                path = f"{inner}{item.name}"
                if item.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif item.name.lower().endswith(suffixes):
                    with suppress(OSError):  # a link to nowhere, or a file that has just gone
                        if item.is_file():
                            known = item.stat()
                            files[path] = known.st_size, known.st_mtime_ns
                elif is_pdf(item.name):
                    left_out = True
        if left_out:
            unreadable.append(f"PDF files in {self.folder}: {MissingExtraError('pypdfium2', 'pdf')}")
        return files, unreadable

    def _count_pages(self, paths: Sequence[str]) -> list[str]:
        """Count the pages of PDF files. Returns why files cannot be read."""
        state, broken = self._state, []
        for path in paths:
            try:
                state.pages[path] = len(_pages(self.folder / path))
            except InputError as error:
                state.pages[path] = 0
                state.errors[path, 0] = str(error)
                broken.append(str(error))
        return broken

    def _opened(self, entry: Entry) -> Image.Image | str:
        """Return a picture with its size known and its pixels not yet decoded, or why it cannot be read."""
        path, number = self.folder / entry[0], entry[1]
        try:
            if number:
                return self._page(path, number).image(EMBEDDED_PAGE_PIXELS)
            return open_image(path, name=str(path), max_pixels=MAX_PIXELS)
        except InputError as error:
            return str(error)
        except Exception as error:  # a parser may raise anything on broken bytes
            return f"{path} cannot be read as an image: {error}"

    def _page(self, path: Path, number: int) -> Page:
        """Return a page. The pages of the last file are kept: they are asked for one after the other."""
        if self._listed is None or self._listed[0] != path:
            self._listed = path, _pages(path)
        return self._listed[1][number - 1]

    # Embedding.

    def _embed(self, entries: Sequence[Entry], progress: bars.Progress) -> None:
        saved = time.monotonic()
        for batch in self._batches(entries, progress):
            self._embed_batch(batch)
            if time.monotonic() - saved > SAVED_EVERY:
                self._save()
                saved = time.monotonic()

    def _batches(
        self, entries: Sequence[Entry], progress: bars.Progress
    ) -> Iterator[list[tuple[Entry, Image.Image]]]:
        """Yield the pictures in batches that fit into memory."""
        batch: list[tuple[Entry, Image.Image]] = []
        pixels = 0
        for entry in progress(entries, "embedding", total=len(entries)) if entries else ():
            image = self._opened(entry)
            if isinstance(image, str):
                self._state.errors[entry] = image
                continue
            own = image.width * image.height
            if batch and (len(batch) == BATCH or pixels + own > BATCH_PIXELS):
                yield batch
                batch, pixels = [], 0
            batch.append((entry, image))
            pixels += own
        if batch:
            yield batch

    def _embed_batch(self, batch: Sequence[tuple[Entry, Image.Image]]) -> None:
        """Embed pictures together. What can be decoded and not embedded is found one by one."""
        names = [str(self.folder / _label(*entry)) for entry, _ in batch]
        pictures: dict[Entry, Image.Image] = {}
        for (entry, _), loaded in zip(batch, load_images([i for _, i in batch], names=names), strict=True):
            if isinstance(loaded, InputError):
                self._state.errors[entry] = str(loaded)
            else:
                pictures[entry] = loaded
        if not pictures:
            return
        try:
            vectors = self.embedder.embed_images(list(pictures.values()))
        except ValueError as error:  # an aspect ratio, for example, that the embedder does not take
            if len(batch) == 1:
                self._state.errors[batch[0][0]] = f"{names[0]} cannot be embedded: {error}"
                return
            for entry, picture in pictures.items():
                self._embed_batch([(entry, picture)])
            return
        for entry, vector in zip(pictures, vectors.float().cpu().numpy(), strict=True):
            if np.isfinite(vector).all():
                self._state.vectors[entry] = vector
            else:
                self._state.errors[entry] = f"{self.folder / _label(*entry)} has a vector that is not finite"

    # The file.

    def _save(self) -> None:
        """Write the index, whole or not at all."""
        state = self._state
        numbers = {path: number for number, path in enumerate(state.files)}
        entries = list(state.vectors)
        facts = {
            "version": VERSION,
            "owner": self._owner,
            "files": [[path, *stamp, state.pages.get(path)] for path, stamp in state.files.items()],
            "entries": [[numbers[path], page] for path, page in entries],
            "errors": [[numbers[path], page, reason] for (path, page), reason in state.errors.items()],
        }
        table = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        with replacing(self.path, "wb") as file:
            np.savez(file, table=table, vectors=_matrix(state, entries))

    def _read(self) -> _State:
        """Read the index. One that is missing is empty; so is a damaged one, with a warning."""
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                facts, vectors = json.loads(arrays["table"].tobytes()), arrays["vectors"]
            if facts["version"] != VERSION or facts["owner"] != self._owner:
                raise ValueError("it belongs to another version or folder")
            paths = [path for path, *_ in facts["files"]]
            entries = [(paths[number], page) for number, page in facts["entries"]]
            return _State(
                {path: (size, time_ns) for path, size, time_ns, _ in facts["files"]},
                {path: pages for path, _, _, pages in facts["files"] if pages is not None},
                dict(zip(entries, vectors, strict=True)),
                {(paths[number], page): reason for number, page, reason in facts["errors"]},
            )
        except FileNotFoundError:
            return _State()
        except Exception as error:  # damaged bytes can make the libraries raise anything
            log.warning("the index %s cannot be read, and is made anew: %s", self.path, error)
            return _State()


def _matrix(state: _State, entries: Sequence[Entry]) -> Vector:
    """(n, d) the vectors of these pictures."""
    if not entries:
        return np.zeros((0, 1), np.float32)
    return np.stack([state.vectors[entry] for entry in entries])


def _label(path: str, number: int) -> str:
    return with_page(path, number or None)
