"""The embedded world: things in scenes, sentences about them, and who is right.

A scene knows what it shows (its scene graph); whether it matches a description is decided by that
graph alone. Places are slots of a 4 × 4 grid laid over the image, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "heart")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "pink", "cyan")
SIZES = ("small", "large")
PLACES = ("left", "right", "top", "bottom")
RELATIONS = ("left of", "right of", "above", "below")
GRID = 4

_PLACE_WORDS = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}


@dataclass(frozen=True)
class Thing:
    """One object. `slot` is its (column, row) in the grid; a large thing covers that slot and the three
    to its right and below, and its centre lies where they meet."""

    shape: str
    colour: str
    size: str
    slot: tuple[int, int]

    @property
    def centre(self) -> tuple[float, float]:
        """In slots."""
        half = 1.0 if self.size == "large" else 0.5
        return self.slot[0] + half, self.slot[1] + half

    @property
    def slots(self) -> frozenset[tuple[int, int]]:
        reach = range(2 if self.size == "large" else 1)
        return frozenset((self.slot[0] + i, self.slot[1] + j) for i in reach for j in reach)

    def places(self) -> set[str]:
        """Which halves it lies in; a thing on the middle line lies in neither."""
        x, y = self.centre
        found = set()
        if x != GRID / 2:
            found.add("left" if x < GRID / 2 else "right")
        if y != GRID / 2:
            found.add("top" if y < GRID / 2 else "bottom")
        return found


def stands(a: Thing, relation: str, b: Thing) -> bool:
    """Does `a` stand in this relation to `b`? Centres must differ by at least one slot."""
    dx, dy = a.centre[0] - b.centre[0], a.centre[1] - b.centre[1]
    return {
        "left of": dx <= -1,
        "right of": dx >= 1,
        "above": dy <= -1,
        "below": dy >= 1,
    }[relation]


@dataclass(frozen=True)
class Phrase:
    """A thing as a sentence names it; None where it does not say."""

    colour: str | None = None
    shape: str | None = None
    size: str | None = None
    place: str | None = None

    def fits(self, thing: Thing) -> bool:
        return (
            self.colour in (None, thing.colour)
            and self.shape in (None, thing.shape)
            and self.size in (None, thing.size)
            and (self.place is None or self.place in thing.places())
        )

    def words(self) -> list[str]:
        """The words that carry meaning."""
        return [word for word in (self.size, self.colour, self.shape, self.place) if word]

    def text(self) -> str:
        noun = " ".join(word for word in (self.size, self.colour, self.shape or "thing") if word)
        article = "an" if noun[0] in "aeiou" else "a"
        return f"{article} {noun}" + (f" {_PLACE_WORDS[self.place]}" if self.place else "")


@dataclass(frozen=True)
class Description:
    """What is looked for: one or more phrases, the first two perhaps in a relation.

    shared: phrases that every candidate of a list fits, and that say nothing about their order.
    """

    phrases: tuple[Phrase, ...]
    relation: str | None = None
    shared: tuple[Phrase, ...] = ()

    def text(self) -> str:
        joint = f" {self.relation} " if self.relation else " and "
        text = joint.join(phrase.text() for phrase in self.phrases)
        return text + (
            " with " + " and ".join(phrase.text() for phrase in self.shared) if self.shared else ""
        )

    def matches(self, things: Sequence[Thing]) -> bool:
        return next(self.assignments(things), None) is not None

    def assignments(self, things: Sequence[Thing]) -> Iterator[tuple[Thing, ...]]:
        """Every way to find the description in the things: one thing per phrase, all different."""
        phrases = [*self.phrases, *self.shared]
        fitting = [[thing for thing in things if phrase.fits(thing)] for phrase in phrases]
        for chosen in product(*fitting):
            if len(set(chosen)) < len(chosen):
                continue
            if self.relation and not stands(chosen[0], self.relation, chosen[1]):
                continue
            yield chosen
