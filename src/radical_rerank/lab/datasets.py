"""What a data set is: pictures, queries, and which pictures are relevant to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

from radical_rerank.errors import InputError
from radical_rerank.reranking.encoding import ImageLike, load_image

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One query. Pictures are named by their id in the data set.

    Args:
        id: the query's id
        text: the query
        relevant: grades of the relevant pictures; all others have grade 0
        reference: the picture that the text changes (composed retrieval)
        candidates: the list to rank; None if a first stage retrieves it
    """

    id: str
    text: str
    relevant: dict[str, int]
    reference: str | None = None
    candidates: tuple[str, ...] | None = None


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
    """Queries over pictures.

    Args:
        name: the data set's name
        tasks: the queries
        picture: returns a picture by its id
        gallery: the ids that a first stage searches; empty if every query has its own candidates

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

    def contents(self, names: Iterable[str]) -> list[str]:
        """Return a digest of each picture's content, which does not depend on its id."""
        return [picture_digest(self.picture(name), f"the picture {name} of {self.name}") for name in names]

    def digest(self, first: int = 100) -> str:
        """Return a digest of this version of the data: the gallery's ids and the first tasks."""
        parts: list[Any] = [list(self.gallery)]
        for task in islice(self.tasks, first):
            relevant = sorted(task.relevant.items())
            parts.append([task.id, task.text, relevant, task.reference, task.candidates])
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
