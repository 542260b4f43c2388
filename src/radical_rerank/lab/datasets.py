"""What a data set is: documents, queries, and which documents are relevant to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

from radical_rerank.errors import InputError
from radical_rerank.reranking import Query
from radical_rerank.reranking.encoding import Document, ImageLike, Parts, load_image

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One query. Documents and pictures are named by their ids in the data set.

    Args:
        id: the query's id
        text: the query
        relevant: grades of the relevant documents; all others have grade 0
        reference: the picture that the text changes (composed retrieval)
        candidates: the list to rank; None if a first stage retrieves it
        images: pictures that are a part of the query
        instruction: what to look for, for templates that have an `{instruction}`
    """

    id: str
    text: str
    relevant: dict[str, int]
    reference: str | None = None
    candidates: tuple[str, ...] | None = None
    images: tuple[str, ...] = ()
    instruction: str | None = None

    @property
    def pictures(self) -> tuple[str, ...]:
        """The ids of the query's own pictures."""
        return self.images if self.reference is None else (self.reference, *self.images)

    @property
    def facts(self) -> dict[str, Any]:
        """All of it but its candidates, for digests."""
        facts = asdict(replace(self, candidates=None))
        # What a query does not have is left out, so that records of earlier versions are still found.
        return {k: v for k, v in facts.items() if v or k not in ("images", "instruction")}


@dataclass(frozen=True)
class Question:
    """A question about one picture, with the answers to choose from."""

    id: str
    text: str
    picture: str
    answer: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """Queries over documents.

    Args:
        name: the data set's name
        tasks: the queries
        picture: returns a picture by its id
        gallery: the ids that a first stage searches; empty if every query has its own candidates
        mixed: returns a document by its id, as `Reranker.rank` takes it: for documents with texts or several
            pictures. By default every document is a picture

    Example:
        >>> from PIL import Image
        >>> task = Task("q1", "a red picture", {"red": 1}, candidates=("red", "blue"))
        >>> data = Dataset("colours", [task], lambda name: Image.new("RGB", (32, 32), name))
        >>> data.picture("red").size
        (32, 32)
    """

    name: str
    tasks: Sequence[Task]
    picture: Callable[[str], ImageLike] = field(repr=False)
    gallery: Sequence[str] = ()
    mixed: Callable[[str], Document] | None = field(default=None, repr=False)

    def document(self, name: str) -> Document:
        """Return a document by its id."""
        return self.picture(name) if self.mixed is None else self.mixed(name)

    def query(self, task: Task) -> Query:
        """Return a query as `Reranker.rank` takes it."""
        reference = None if task.reference is None else self.picture(task.reference)
        images = tuple(self.picture(name) for name in task.images)
        return Query(task.text, reference, images, task.instruction)

    def pairs(self, count: int | None = None) -> list[tuple[Query, list[Document]]]:
        """Return the first lists as `Reranker.rank_many` takes them: queries with their candidates."""
        return [
            (self.query(task), list(map(self.document, task.candidates or ())))
            for task in islice(self.tasks, count)
        ]

    def contents(self, names: Iterable[str]) -> list[str]:
        """Return a digest of each document's content, which does not depend on its id."""
        if self.mixed is None:
            return self.picture_contents(names)
        return [document_digest(self.mixed(name), f"the document {name} of {self.name}") for name in names]

    def picture_contents(self, names: Iterable[str]) -> list[str]:
        """Return a digest of each picture's content."""
        return [picture_digest(self.picture(name), f"the picture {name} of {self.name}") for name in names]

    def digest(self, first: int = 100) -> str:
        """Return a digest of this version of the data: the gallery's ids and the first tasks."""
        parts: list[Any] = [list(self.gallery)]
        for task in islice(self.tasks, first):
            relevant = sorted(task.relevant.items())
            parts.append([task.id, task.text, relevant, task.reference, task.candidates])
            if self.mixed is not None:
                parts.append([self.contents(task.candidates or ()), task.facts])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class QuestionSet:
    """Questions about single pictures.

    Args:
        name: the data set's name
        questions: the questions
        picture: returns a picture by its id
    """

    name: str
    questions: Sequence[Question]
    picture: Callable[[str], ImageLike] = field(repr=False)


def picture_digest(document: ImageLike, name: str) -> str:
    """Return a digest of a picture's content.

    Args:
        document: the picture
        name: how an error message names it
    """
    if isinstance(document, Path):  # the bytes on disk: faster than decoding them
        try:
            data = document.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {name} ({document}): {error.strerror}") from None
    else:
        image = load_image(document, name=name)
        data = f"{image.size}".encode() + image.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def document_digest(document: Document, name: str) -> str:
    """Return a digest of a document's content: its pictures and its text.

    Args:
        document: the document
        name: how an error message names it
    """
    parts = Parts.of(document, name)
    pictures = [picture_digest(image, name) for image in parts.images]
    return hashlib.sha256(json.dumps([pictures, parts.text]).encode()).hexdigest()[:16]


class LazySequence(Sequence[T]):
    """A sequence that makes its items on access and caches the last few.

    Args:
        length: how many items there are
        make: returns the item at an index

    Example:
        >>> squares = LazySequence(5, lambda number: number**2)
        >>> len(squares), squares[3]
        (5, 9)
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length = length
        self._make = lru_cache(maxsize=8)(make)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, slice):
            return [self._make(i) for i in range(*place.indices(self._length))]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        return self._make(place % self._length)

    def __iter__(self) -> Iterator[T]:
        return (self._make(i) for i in range(self._length))
