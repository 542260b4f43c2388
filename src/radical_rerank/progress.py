"""Progress of long work, in one form: a function that wraps what is iterated over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Yields the items and may show how many are done. `bar` and `silent` are two."""

    def __call__(self, items: Iterable[T], label: str, *, total: int | None = None) -> Iterable[T]:
        """Yield the items. total: how many there are, if `items` has no length"""


def silent(items: Iterable[T], label: str, *, total: int | None = None) -> Iterable[T]:
    """Show nothing."""
    return items


def bar(items: Iterable[T], label: str, *, total: int | None = None) -> Iterable[T]:
    """Show a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(items, label, total=total, console=Console(stderr=True))
