"""Lists, galleries, composed queries and questions, each drawn from a seed.

The same seed gives the same data, byte for byte; splits never share a seed's stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Candidates and descriptions, each of which exactly one candidate matches (`targets`)."""

    scenes: tuple[Scene, ...]
    descriptions: tuple[Description, ...]
    targets: tuple[int, ...]

    @cached_property
    def rendered(self) -> list[tuple[Image.Image, np.ndarray]]:
        return [render(scene) for scene in self.scenes]

    @property
    def images(self) -> list[Image.Image]:
        return [image for image, _ in self.rendered]


def stream(split: str, kind: int, seed: int) -> Rng:
    """The random stream of one item of one split."""
    return np.random.default_rng([SPLITS.index(split), kind, seed])


def make_list(split: str, seed: int, count: int, *, queries: int = 1, similarity: float = 0.7) -> SceneList:
    """`count` scenes that share their large things, and descriptions that one scene each matches.

    similarity (0 … 1): how small the pool of small things is, how often a scene is another one's twin
    (the same things elsewhere), how often background and layout are shared.
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
        # Too alike for so many descriptions: draw the scenes again, a little less alike.
        similarity *= 0.9


def draw_candidates(rng: Rng, split: str, count: int, similarity: float) -> tuple[list[Scene], list[Thing]]:
    side = round(6 - 2.2 * similarity + (count > 12) * 0.4)
    colours = [str(c) for c in rng.permutation(COLOURS)[: min(side, 8)]]
    shapes = [str(s) for s in rng.permutation(SHAPES)[: min(side, 8)]]
    large = _large(rng, 1 + int(rng.random() < 0.5))
    background = random_background(rng)
    scenes: list[Scene] = []
    for _ in range(count):
        if scenes and rng.random() < 0.3 * similarity:  # a twin: the same things elsewhere
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
    """Put the large things where they are (or move the first elsewhere), the small ones into free slots."""
    placed = list(large)
    if not same_layout and len(large) == 1:
        placed = [replace(large[0], slot=(int(rng.integers(3)), int(rng.integers(3))))]
    taken = frozenset().union(*(thing.slots for thing in placed))
    free = [(x, y) for x in range(GRID) for y in range(GRID) if (x, y) not in taken]
    order = rng.permutation(len(free))
    return placed + [replace(thing, slot=free[order[i]]) for i, thing in enumerate(small)]


def compose_scene(rng: Rng, split: str, things: Sequence[Thing], background: int | None = None) -> Scene:
    """A picture of these things: some size, a background, clutter, and one or two oddities in free slots."""
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
    """A true description of one or two small things, perhaps with a mention of what all candidates show."""
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
    """A change in words, what it leads to, and the one candidate that shows the reference after it."""

    text: str
    new: Phrase
    kept: tuple[Phrase, ...]
    """the small things of the reference that stay as they are"""
    target: int


@dataclass(frozen=True)
class Composed:
    """A reference scene, changes to it, and candidates of which one each shows the reference after it."""

    reference: Scene
    scenes: tuple[Scene, ...]
    changes: tuple[Change, ...]

    @cached_property
    def rendered(self) -> list[tuple[Image.Image, np.ndarray]]:
        """The reference first."""
        return [render(scene) for scene in (self.reference, *self.scenes)]

    @property
    def images(self) -> list[Image.Image]:
        return [image for image, _ in self.rendered[1:]]


def make_composed(
    split: str, seed: int, count: int, *, queries: int = 1, things: int | None = None
) -> Composed:
    """The reference's small things in other colours, each combination once.

    So some negatives show the change but not the rest of the reference, some the rest without the change,
    and one may be the reference itself. There are at most `queries` changes, fewer for few candidates.

    things: how many small ones a scene has, two or three; None for either
    """
    rng = stream(split, 1, seed)
    large = _large(rng, 1)
    shapes = [str(s) for s in rng.permutation([s for s in SHAPES if s != large[0].shape])]
    drawn = 2 if rng.random() < 0.5 else 3
    number = 3 if count >= 60 else things or drawn  # two shapes in eight colours are 64 scenes
    small = [Thing(shapes[i], "", "small", (0, 0)) for i in range(number)]
    palettes = [[str(c) for c in rng.permutation(COLOURS)] for _ in small]
    sides = [1] * len(small)
    while math.prod(sides) < count + 1:
        sides[sides.index(min(sides))] += 1
    combinations = [
        tuple(palette[i] for palette, i in zip(palettes, place, strict=True)) for place in np.ndindex(*sides)
    ]
    first = combinations[0]
    near = [c for c in combinations if sum(a != b for a, b in zip(c, first, strict=True)) == 1]
    wanted = [near[i] for i in rng.permutation(len(near))[: min(queries, count)]]
    others = [c for c in combinations if c not in wanted]
    chosen = wanted + [others[i] for i in rng.permutation(len(others))[: count - len(wanted)]]
    layout = place_things(rng, large, small, same_layout=True)[len(large) :]

    def scene_of(colours: tuple[str, ...], things: Sequence[Thing]) -> Scene:
        shown = [replace(thing, colour=colour) for thing, colour in zip(things, colours, strict=True)]
        return compose_scene(rng, split, [*large, *shown])

    reference = scene_of(first, layout)
    order = [int(i) for i in rng.permutation(count)]
    scenes = []
    for number in order:
        moved = rng.random() < 0.5
        placed = place_things(rng, large, small, same_layout=True)[len(large) :] if moved else layout
        scenes.append(scene_of(chosen[number], placed))
    changes = []
    for number, colours in enumerate(wanted):
        at = next(i for i, (a, b) in enumerate(zip(colours, first, strict=True)) if a != b)
        changes.append(
            Change(
                f"the {shapes[at]} is {colours[at]} instead of {first[at]}",
                Phrase(colours[at], shapes[at]),
                tuple(
                    Phrase(c, t.shape) for i, (c, t) in enumerate(zip(first, small, strict=True)) if i != at
                ),
                order.index(number),
            )
        )
    return Composed(reference, tuple(scenes), tuple(changes))


# Questions about one scene.


@dataclass(frozen=True)
class SceneQuestion:
    scene: Scene
    text: str
    answer: str
    phrase: Phrase


def make_questions(split: str, seed: int, count: int = 1) -> list[SceneQuestion]:
    """Questions about one scene: "is there a red star ?" and "what colour is the star ?"."""
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
        thing = scene.things[int(rng.integers(len(scene.things)))]
        if rng.random() < 0.3:
            phrase = Phrase(None, thing.shape)
            questions.append(
                SceneQuestion(scene, f"what colour is the {thing.shape} ?", thing.colour, phrase)
            )
            continue
        yes = rng.random() < 0.5
        phrase = Phrase(thing.colour, thing.shape)
        if not yes:
            change = rng.random() < 0.5
            phrase = replace(
                phrase,
                **({"colour": str(rng.choice(COLOURS))} if change else {"shape": str(rng.choice(SHAPES))}),
            )
            if any(phrase.fits(t) for t in scene.things):
                continue
        questions.append(SceneQuestion(scene, f"is there {phrase.text()} ?", "yes" if yes else "no", phrase))
    return questions
