"""One short file per reduction method, and the registry of their names."""

from __future__ import annotations

from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.pruning.base import Layout, Pruner, PruningRun, Stage, StageRecord, StageView
from radical_rerank.pruning.dense import Dense
from radical_rerank.pruning.profile import Profile
from radical_rerank.pruning.radical import RaDiCal
from radical_rerank.pruning.random import Random

METHODS: dict[str, type[Pruner]] = {
    "radical": RaDiCal,
    "random": Random,
    "dense": Dense,
}


def build(name: str, **options: Any) -> Pruner:
    """The method of this name, with its options: `build("radical", keep=0.1)`."""
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}; there are: {', '.join(sorted(METHODS))}")
    try:
        return METHODS[name](**options)
    except TypeError as error:
        raise InputError(f"method {name!r}: {error}") from None


__all__ = [
    "METHODS",
    "Dense",
    "Layout",
    "Profile",
    "Pruner",
    "PruningRun",
    "RaDiCal",
    "Random",
    "Stage",
    "StageRecord",
    "StageView",
    "build",
]
