"""Errors that a user can act on. Each message names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class RadicalError(ValueError):
    """Base class of every error that this package raises on purpose."""


class InputError(RadicalError):
    """A query, an image or an option that cannot be used."""


class MissingExtraError(InputError, ImportError):
    """A library is not installed that belongs to an extra of this package."""

    def __init__(self, library: str, extra: str) -> None:
        text = f"this needs {library}: pip install 'radical-rerank[{extra}]'"
        ImportError.__init__(self, text, name=library)


class UnsupportedModelError(RadicalError):
    """A model whose architecture is not supported."""


class LayoutError(RadicalError):
    """The layout does not describe the prompt that runs."""


class CalibrationError(RadicalError):
    """A trust profile is missing or does not fit the model."""


class OutOfWorldWarning(UserWarning):
    """A query or a picture that the embedded model was not made for."""


class SmallModelWarning(UserWarning):
    """The model that ranks is a small one that ships with the package."""


class ScoringError(RadicalError):
    """The model's answer cannot be turned into a ranking."""


class UnreadableAnswerError(ScoringError):
    """The model generated text without an order in it."""


class StoppedError(RadicalError):
    """The caller's `stop` function ended the ranking."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into an error that names the extra to install.

    Example:
        >>> with needs_extra("lab"):
        ...     import json
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        raise MissingExtraError(error.name or str(error), extra) from error


def unknown_name(kind: str, name: str, choices: Iterable[str], of: str = "") -> InputError:
    """Return an error that names the choice nearest to a misspelt name, or all choices if none is near."""
    choices = list(dict.fromkeys(choices))
    near = get_close_matches(name, choices, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(choices)}"
    return InputError(f"unknown {kind} {name!r}{f' of {of}' if of else ''}; {hint}")
