"""Lists, composed queries and questions, each drawn from a seed.

The same seed gives the same data, byte for byte. The splits draw from different random streams.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from PIL import Image

from radical_rerank.embedded.scenes.drawing import (
    IMAGE_SIZES,
    SPLITS,
    Scene,
    random_background,
    random_oddity,
    render,
)
from radical_rerank.embedded.scenes.world import (
    COLOURS,
    GRID,
    PLACES,
    RELATIONS,
    SHAPES,
    Description,
    Phrase,
    Thing,
    stands,
)

Rng = np.random.Generator


@dataclass(frozen=True)
class SceneList:
    """Candidates, and descriptions that each match exactly one of them.

    Args:
        scenes: the candidates
        descriptions: the queries
        targets: per description, the place of its match in `scenes`, -1 if nothing matches
    """

    scenes: tuple[Scene, ...]
    descriptions: tuple[Description, ...]
    targets: tuple[int, ...]

    def without(self, hidden: Collection[int]) -> SceneList:
        """Return the list without the scenes at some places: nothing matches their descriptions then."""
        left = [place for place in range(len(self.scenes)) if place not in hidden]
        targets = tuple(left.index(target) if target in left else -1 for target in self.targets)
        return replace(self, scenes=tuple(self.scenes[place] for place in left), targets=targets)

    @cached_property
    def rendered(self) -> list[tuple[Image.Image, np.ndarray]]:
        """Per candidate, what `render` returns."""
        return [render(scene) for scene in self.scenes]

    @property
    def images(self) -> list[Image.Image]:
        """The candidates' pictures."""
        return [image for image, _ in self.rendered]


def stream(split: str, kind: int, seed: int) -> Rng:
    """Return the random generator of one item of a split. kind: what the item is, any number"""
    return np.random.default_rng([SPLITS.index(split), kind, seed])


def make_list(split: str, seed: int, count: int, *, queries: int = 1, similarity: float = 0.7) -> SceneList:
    """Draw a list: scenes that share their large things, and descriptions that each match one of them.

    Args:
        split: "train", "validation" or "test"
        seed: the same seed gives the same list
        count: how many scenes
        queries: how many descriptions
        similarity: from 0 to 1, how alike the scenes are. It sets how many kinds of small things there are,
            how often a scene has the same things as another in other places, and how often scenes share
            their background and layout.

    Returns:
        The list. Its pictures are drawn when they are first used.

    Example:
        >>> item = make_list("test", 0, 5)
        >>> item.descriptions[0].text(), item.targets
        ('an orange circle with a large yellow heart and a large blue circle', (2,))
        >>> len(item.images)
        5
    """
    rng = stream(split, 0, seed)
    while True:
        scenes, shared = draw_candidates(rng, split, count, similarity)
        descriptions: dict[str, tuple[Description, int]] = {}
        for _ in range(12 * queries):
            if len(descriptions) == queries:
                break
            target = int(rng.integers(count))
            description = draw_description(rng, scenes[target].things, shared)
            if description is None or description.text() in descriptions:
                continue
            if [s for s, scene in enumerate(scenes) if description.matches(scene.things)] == [target]:
                descriptions[description.text()] = (description, target)
        if len(descriptions) == queries:
            chosen = list(descriptions.values())
            return SceneList(tuple(scenes), tuple(d for d, _ in chosen), tuple(t for _, t in chosen))
        # The scenes are too alike to be told apart by this many descriptions: draw less similar ones.
        similarity *= 0.9


def draw_candidates(rng: Rng, split: str, count: int, similarity: float) -> tuple[list[Scene], list[Thing]]:
    """Draw scenes that share their large things.

    Returns:
        The scenes, and the large things.
    """
    side = round(6 - 2.2 * similarity + (count > 12) * 0.4)
    colours = [str(c) for c in rng.permutation(COLOURS)[: min(side, 8)]]
    shapes = [str(s) for s in rng.permutation(SHAPES)[: min(side, 8)]]
    large = _large(rng, 1 + int(rng.random() < 0.5))
    background = random_background(rng)
    scenes: list[Scene] = []
    for _ in range(count):
        if scenes and rng.random() < 0.3 * similarity:  # a twin: the same things in other places
            things = [replace(t) for t in scenes[int(rng.integers(len(scenes)))].things if t.size == "small"]
        else:
            things = _small(rng, colours, shapes, int(rng.integers(2, 4)))
        placed = place_things(rng, large, things, same_layout=rng.random() < similarity)
        scenes.append(compose_scene(rng, split, placed, background if rng.random() < similarity else None))
    return scenes, large


def _large(rng: Rng, count: int) -> list[Thing]:
    corners = [(0, 0), (2, 2), (2, 0), (0, 2)]
    order = rng.permutation(2) if count > 1 else rng.permutation(4)
    shapes, colours = rng.permutation(SHAPES), rng.permutation(COLOURS)
    return [Thing(str(shapes[i]), str(colours[i]), "large", corners[int(order[i])]) for i in range(count)]


def _small(rng: Rng, colours: Sequence[str], shapes: Sequence[str], count: int) -> list[Thing]:
    kinds = [(c, s) for c in colours for s in shapes]
    chosen = rng.permutation(len(kinds))[:count]
    return [Thing(kinds[i][1], kinds[i][0], "small", (0, 0)) for i in chosen]


def place_things(
    rng: Rng, large: Sequence[Thing], small: Sequence[Thing], *, same_layout: bool
) -> list[Thing]:
    """Give every thing a slot.

    Args:
        rng: draws the slots
        large: stay in their slots, except that a single one may move
        small: go to free slots
        same_layout: leave a single large thing in its slot, too
    """
    placed = list(large)
    if not same_layout and len(large) == 1:
        placed = [replace(large[0], slot=(int(rng.integers(3)), int(rng.integers(3))))]
    taken = frozenset().union(*(thing.slots for thing in placed))
    free = [(x, y) for x in range(GRID) for y in range(GRID) if (x, y) not in taken]
    order = rng.permutation(len(free))
    return placed + [replace(thing, slot=free[order[i]]) for i, thing in enumerate(small)]


def compose_scene(rng: Rng, split: str, things: Sequence[Thing], background: int | None = None) -> Scene:
    """Draw the rest of a scene of these things: its size, background and oddities in free slots."""
    width, height = IMAGE_SIZES[int(rng.integers(len(IMAGE_SIZES)))]
    taken = frozenset().union(*(thing.slots for thing in things))
    free = [(x, y) for x in range(GRID) for y in range(GRID) if (x, y) not in taken]
    order = rng.permutation(len(free))
    odd = [(random_oddity(rng), free[order[i]]) for i in range(min(int(rng.integers(1, 3)), len(free)))]
    return Scene(
        width,
        height,
        tuple(things),
        random_background(rng) if background is None else background,
        int(rng.integers(1 << 31)),
        split,
        tuple(odd),
    )


def draw_description(
    rng: Rng, things: Sequence[Thing], shared: Sequence[Thing], *, mention_shared: float = 0.4
) -> Description | None:
    """Draw a description of one or two small things of a scene.

    Args:
        rng: draws it
        things: of the scene
        shared: large things that all candidates show
        mention_shared: the probability that the description mentions some of them

    Returns:
        The description, or None if the scene does not match it.
    """
    small = [thing for thing in things if thing.size == "small"]
    order = rng.permutation(len(small))
    first = small[order[0]]
    two = len(small) > 1 and rng.random() < 0.75
    phrases = [_phrase(rng, first, place=0.55 if not two else 0.15)]
    relation = None
    if two:
        second = small[order[1]]
        phrases.append(_phrase(rng, second, place=0.15))
        if rng.random() < 0.2:
            true = [r for r in RELATIONS if stands(first, r, second)]
            if true:
                relation = str(rng.choice(true))
                phrases = [replace(phrase, place=None) for phrase in phrases]
    mention: tuple[Phrase, ...] = ()
    if rng.random() < mention_shared:
        some = rng.permutation(len(shared))[: int(rng.integers(1, len(shared) + 1))]
        mention = tuple(Phrase(shared[i].colour, shared[i].shape, "large") for i in some)
    description = Description(tuple(phrases), relation, mention)
    return description if description.matches(things) else None


def _phrase(rng: Rng, thing: Thing, *, place: float) -> Phrase:
    where = None
    if rng.random() < place and thing.places():
        where = str(rng.choice(sorted(thing.places(), key=PLACES.index)))
    return Phrase(thing.colour, thing.shape, "small" if rng.random() < 0.3 else None, where)


# Composed queries.


@dataclass(frozen=True)
class Change:
    """A change to a reference scene, in words.

    Args:
        text: the query
        new: the thing as it is after the change
        kept: the small things of the reference that stay as they are
        target: the place of the one candidate that shows the reference after the change, -1 if none does
    """

    text: str
    new: Phrase
    kept: tuple[Phrase, ...]
    target: int


@dataclass(frozen=True)
class Composed:
    """A reference scene, candidates, and changes that each lead from the reference to one candidate.

    Args:
        reference: the scene that is changed
        scenes: the candidates
        changes: the queries
    """

    reference: Scene
    scenes: tuple[Scene, ...]
    changes: tuple[Change, ...]

    def without(self, hidden: Collection[int]) -> Composed:
        """Return the list without the scenes at some places: no change leads to them then."""
        left = [place for place in range(len(self.scenes)) if place not in hidden]
        changes = tuple(
            replace(change, target=left.index(change.target) if change.target in left else -1)
            for change in self.changes
        )
        return replace(self, scenes=tuple(self.scenes[place] for place in left), changes=changes)

    @cached_property
    def rendered(self) -> list[tuple[Image.Image, np.ndarray]]:
        """What `render` returns for the reference, then for each candidate."""
        return [render(scene) for scene in (self.reference, *self.scenes)]

    @property
    def images(self) -> list[Image.Image]:
        """The candidates' pictures."""
        return [image for image, _ in self.rendered[1:]]


def make_composed(
    split: str, seed: int, count: int, *, queries: int = 1, things: int | None = None
) -> Composed:
    """Draw a composed list: candidates with the reference's things in other colours, each combination once.

    So some wrong candidates show the change but not the rest of the reference. Some show the rest without the
    change. One may be like the reference itself.

    Args:
        split: "train", "validation" or "test"
        seed: the same seed gives the same list
        count: how many candidates
        queries: how many changes; there are fewer if the candidates are few
        things: how many small things a scene has, 2 or 3; by default either

    Returns:
        The list. Its pictures are drawn when they are first used.

    Example:
        >>> item = make_composed("test", 0, 5)
        >>> item.changes[0].text
        'the square is blue instead of pink'
        >>> len(item.images)
        5
    """
    rng = stream(split, 1, seed)
    large = _large(rng, 1)
    shapes = [str(s) for s in rng.permutation([s for s in SHAPES if s != large[0].shape])]
    drawn = 2 if rng.random() < 0.5 else 3
    number = 3 if count >= 60 else things or drawn  # two shapes in eight colours are 64 scenes
    small = [Thing(shapes[i], "", "small", (0, 0)) for i in range(number)]
    first, wanted, others = _colourings(rng, number, count, queries)
    chosen = wanted + others
    layout = place_things(rng, large, small, same_layout=True)[len(large) :]

    def scene_of(colours: Sequence[str], things: Sequence[Thing]) -> Scene:
        shown = [replace(thing, colour=colour) for thing, colour in zip(things, colours, strict=True)]
        return compose_scene(rng, split, [*large, *shown])

    reference = scene_of(first, layout)
    order = [int(i) for i in rng.permutation(count)]
    scenes = []
    for number in order:
        moved = rng.random() < 0.5
        placed = place_things(rng, large, small, same_layout=True)[len(large) :] if moved else layout
        scenes.append(scene_of(chosen[number], placed))
    changes = [
        _change(shapes[: len(small)], first, colours, order.index(number))
        for number, colours in enumerate(wanted)
    ]
    return Composed(reference, tuple(scenes), tuple(changes))


def _colourings(
    rng: Rng, things: int, count: int, queries: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Draw a colour per thing: of the reference, of the targets (one differs) and of other candidates."""
    palettes = [[str(c) for c in rng.permutation(COLOURS)] for _ in range(things)]
    sides = [1] * things
    while math.prod(sides) < count + 1:
        sides[sides.index(min(sides))] += 1
    combinations = [
        tuple(palette[i] for palette, i in zip(palettes, place, strict=True)) for place in np.ndindex(*sides)
    ]
    first = combinations[0]
    near = [c for c in combinations if sum(a != b for a, b in zip(c, first, strict=True)) == 1]
    wanted = [near[i] for i in rng.permutation(len(near))[: min(queries, count)]]
    rest = [c for c in combinations if c not in wanted]
    return first, wanted, [rest[i] for i in rng.permutation(len(rest))[: count - len(wanted)]]


def _change(shapes: Sequence[str], old: Sequence[str], new: Sequence[str], target: int) -> Change:
    """Put the one difference between two colourings into words."""
    at = next(i for i, (a, b) in enumerate(zip(new, old, strict=True)) if a != b)
    return Change(
        f"the {shapes[at]} is {new[at]} instead of {old[at]}",
        Phrase(new[at], shapes[at]),
        tuple(Phrase(c, s) for i, (c, s) in enumerate(zip(old, shapes, strict=True)) if i != at),
        target,
    )


# Questions about one scene.


@dataclass(frozen=True)
class SceneQuestion:
    """A question about a scene.

    Args:
        scene: the scene
        text: the question
        answer: one word
        phrase: the thing that is asked about
    """

    scene: Scene
    text: str
    answer: str
    phrase: Phrase


def make_questions(split: str, seed: int, count: int = 1) -> list[SceneQuestion]:
    """Draw a scene and questions about it: "is there a red star ?" or "what colour is the star ?".

    Args:
        split: "train", "validation" or "test"
        seed: the same seed gives the same questions
        count: how many questions

    Example:
        >>> question = make_questions("test", 0)[0]
        >>> question.text, question.answer
        ('is there a yellow cross ?', 'no')
    """
    rng = stream(split, 2, seed)
    colours, shapes = [str(c) for c in rng.permutation(COLOURS)], [str(s) for s in rng.permutation(SHAPES)]
    small = [
        Thing(shapes[i], colours[int(rng.integers(8))], "small", (0, 0))
        for i in range(int(rng.integers(2, 5)))
    ]
    large = [replace(thing, shape=shapes[7]) for thing in _large(rng, 1)]
    scene = compose_scene(rng, split, place_things(rng, large, small, same_layout=True))
    questions: list[SceneQuestion] = []
    while len(questions) < count:
        question = _question(rng, scene)
        if question is not None:
            questions.append(question)
    return questions


def _question(rng: Rng, scene: Scene) -> SceneQuestion | None:
    """Draw a question; None if the change that should make the answer "no" leaves a "yes"."""
    thing = scene.things[int(rng.integers(len(scene.things)))]
    if rng.random() < 0.3:
        text = f"what colour is the {thing.shape} ?"
        return SceneQuestion(scene, text, thing.colour, Phrase(None, thing.shape))
    yes = rng.random() < 0.5
    phrase = Phrase(thing.colour, thing.shape)
    if not yes:
        if rng.random() < 0.5:
            phrase = replace(phrase, colour=str(rng.choice(COLOURS)))
        else:
            phrase = replace(phrase, shape=str(rng.choice(SHAPES)))
        if any(phrase.fits(other) for other in scene.things):
            return None
    return SceneQuestion(scene, f"is there {phrase.text()} ?", "yes" if yes else "no", phrase)
