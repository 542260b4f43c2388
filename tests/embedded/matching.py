"""Matching a description, in the most obvious way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from radical_rerank.embedded.scenes.world import Description, Thing, stands


def obvious_match(description: Description, things: Sequence[Thing]) -> bool:
    """Try every ordered choice of different things."""
    phrases = [*description.phrases, *description.shared]
    for chosen in permutations(things, len(phrases)):
        good = all(
            (p.colour is None or p.colour == t.colour)
            and (p.shape is None or p.shape == t.shape)
            and (p.size is None or p.size == t.size)
            and (p.place is None or p.place in t.places())
            for p, t in zip(phrases, chosen, strict=True)
        )
        if good and (description.relation is None or stands(chosen[0], description.relation, chosen[1])):
            return True
    return False
