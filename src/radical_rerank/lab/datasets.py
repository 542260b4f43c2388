"""What a data set is: pictures, queries, and which pictures are relevant."""

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
from radical_rerank.reranking.encoding import Document, load_image

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One query. Pictures go by their id in the data set.

    relevant: grades of the relevant pictures; all others count 0
    reference: the picture that the text changes (composed retrieval)
    candidates: the list to rank, where the data set fixes it; else a first stage finds one
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
    """Queries over pictures. `picture(id)` gives one; `gallery` are the ids that a first stage searches."""

    name: str
    tasks: Sequence[Task]
    picture: Callable[[str], Document] = field(repr=False)
    gallery: Sequence[str] = ()

    def contents(self, names: Iterable[str]) -> list[str]:
        """A digest of each of these pictures: what it shows, whatever it is called."""
        return [picture_digest(self.picture(name), f"the picture {name} of {self.name}") for name in names]

    def digest(self, first: int = 100) -> str:
        """What identifies a version: a hash of the gallery's ids and of the first tasks."""
        parts: list[Any] = [list(self.gallery)]
        for task in islice(self.tasks, first):
            relevant = sorted(task.relevant.items())
            parts.append([task.id, task.text, relevant, task.reference, task.candidates])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class QuestionSet:
    """Questions about single pictures."""

    name: str
    questions: Sequence[Question]
    picture: Callable[[str], Document] = field(repr=False)


def picture_digest(document: Document, name: str) -> str:
    """What a picture shows, whatever it is called. name: for the error where it cannot be read"""
    if isinstance(document, Path):  # as it is on disk: quicker than decoding it
        try:
            data = document.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {name} ({document}): {error.strerror}") from None
    else:
        image = load_image(document, name=name)
        data = f"{image.size}".encode() + image.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


class Lazy(Sequence[T]):
    """A sequence whose items are made when asked for; the last few are remembered."""

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
