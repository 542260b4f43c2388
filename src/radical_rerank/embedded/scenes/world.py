"""The world of scenes: things, and sentences about them.

Whether a scene matches a description is decided by its things alone, never by a picture. Positions are slots
of a 4 × 4 grid laid over the picture, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "heart")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "pink", "cyan")
SIZES = ("small", "large")
PLACES = ("left", "right", "top", "bottom")
RELATIONS = ("left of", "right of", "above", "below")
ATTRIBUTE_WORDS = (*COLOURS, *SHAPES, *SIZES, *PLACES)
"""every word for what a visual token can show"""
GRID = 4
"""slots per side"""

_PLACE_WORDS = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}


@dataclass(frozen=True)
class Thing:
    """One object of a scene.

    A large thing covers its slot and the three to the right and below. Its centre is where the four meet.

    Args:
        shape: one of `SHAPES`
        colour: one of `COLOURS`
        size: one of `SIZES`
        slot: (column, row) in the grid

    Example:
        >>> star = Thing("star", "red", "small", (0, 3))
        >>> star.centre, sorted(star.places())
        ((0.5, 3.5), ['bottom', 'left'])
    """

    shape: str
    colour: str
    size: str
    slot: tuple[int, int]

    @property
    def centre(self) -> tuple[float, float]:
        """The (x, y) of the centre, in slots."""
        half = 1.0 if self.size == "large" else 0.5
        return self.slot[0] + half, self.slot[1] + half

    @property
    def slots(self) -> frozenset[tuple[int, int]]:
        """All slots that the thing covers."""
        reach = range(2 if self.size == "large" else 1)
        return frozenset((self.slot[0] + i, self.slot[1] + j) for i in reach for j in reach)

    def places(self) -> set[str]:
        """Return the halves of the picture that the thing is in. On a middle line it is in neither half."""
        x, y = self.centre
        halves = set()
        if x != GRID / 2:
            halves.add("left" if x < GRID / 2 else "right")
        if y != GRID / 2:
            halves.add("top" if y < GRID / 2 else "bottom")
        return halves


def stands(a: Thing, relation: str, b: Thing) -> bool:
    """Return whether `a` is in this relation to `b`. Their centres must be at least one slot apart."""
    dx, dy = a.centre[0] - b.centre[0], a.centre[1] - b.centre[1]
    return {
        "left of": dx <= -1,
        "right of": dx >= 1,
        "above": dy <= -1,
        "below": dy >= 1,
    }[relation]


@dataclass(frozen=True)
class Phrase:
    """The words for one thing in a sentence. An attribute that the sentence does not mention is None.

    Example:
        >>> phrase = Phrase("red", "star", place="left")
        >>> phrase.text()
        'a red star on the left'
        >>> phrase.fits(Thing("star", "red", "small", (0, 3)))
        True
    """

    colour: str | None = None
    shape: str | None = None
    size: str | None = None
    place: str | None = None

    def fits(self, thing: Thing) -> bool:
        """Return whether the thing has all the attributes that are mentioned."""
        return (
            self.colour in (None, thing.colour)
            and self.shape in (None, thing.shape)
            and self.size in (None, thing.size)
            and (self.place is None or self.place in thing.places())
        )

    def words(self) -> list[str]:
        """Return the attribute words, in the order in which the text has them."""
        return [word for word in (self.size, self.colour, self.shape, self.place) if word]

    def text(self) -> str:
        """Return the phrase in English."""
        noun = " ".join(word for word in (self.size, self.colour, self.shape or "thing") if word)
        article = "an" if noun[0] in "aeiou" else "a"
        return f"{article} {noun}" + (f" {_PLACE_WORDS[self.place]}" if self.place else "")


@dataclass(frozen=True)
class Description:
    """A query: one or more phrases.

    Args:
        phrases: each must fit a thing of its own
        relation: how the thing of the first phrase is placed relative to that of the second, if mentioned
        shared: phrases that fit every candidate of a list; they do not affect the order

    Example:
        >>> description = Description((Phrase("red", "star"), Phrase("blue", "ring")), "left of")
        >>> description.text()
        'a red star left of a blue ring'
        >>> star, ring = Thing("star", "red", "small", (0, 0)), Thing("ring", "blue", "small", (3, 0))
        >>> description.matches([star, ring]), description.matches([star])
        (True, False)
    """

    phrases: tuple[Phrase, ...]
    relation: str | None = None
    shared: tuple[Phrase, ...] = ()

    def text(self) -> str:
        """Return the description in English."""
        joint = f" {self.relation} " if self.relation else " and "
        text = joint.join(phrase.text() for phrase in self.phrases)
        return text + (
            " with " + " and ".join(phrase.text() for phrase in self.shared) if self.shared else ""
        )

    def matches(self, things: Sequence[Thing]) -> bool:
        """Return whether a scene of these things shows what is described."""
        phrases = [*self.phrases, *self.shared]
        fitting = [[thing for thing in things if phrase.fits(thing)] for phrase in phrases]
        return any(
            len(set(chosen)) == len(chosen)  # one thing per phrase, all different
            and (self.relation is None or stands(chosen[0], self.relation, chosen[1]))
            for chosen in product(*fitting)
        )
