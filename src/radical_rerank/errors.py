"""Errors that a user can act on. Each message names the culprit."""

from __future__ import annotations


class RadicalError(ValueError):
    """Base of every error that this package raises on purpose."""


class InputError(RadicalError):
    """A query, an image or an option that cannot be used."""


class UnsupportedModelError(RadicalError):
    """A model whose architecture the engine does not know."""


class LayoutError(RadicalError):
    """The prompt that runs is not the prompt that the layout describes."""


class CalibrationError(RadicalError):
    """A trust profile is missing or does not fit the model."""


class OutOfWorldWarning(UserWarning):
    """A query or a picture that the embedded model was not made for."""


class ScoringError(RadicalError):
    """The model's answer cannot be turned into a ranking."""


class UnreadableAnswerError(ScoringError):
    """The model was to write an order, and wrote something else."""


class StoppedError(RadicalError):
    """The caller's `stop` said that the ranking is no longer wanted."""
