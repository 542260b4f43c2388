"""A gallery to search in: many scenes, many queries, and every scene that each query matches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from radical_rerank.embedded.scenes.drawing import Scene
from radical_rerank.embedded.scenes.lists import draw_candidates, draw_description, stream
from radical_rerank.embedded.scenes.world import Description, Thing

GROUP = 20
"""So many scenes share their large things: what a first stage finds is alike, as in a real gallery"""


@dataclass(frozen=True)
class Gallery:
    """`relevant[q]` are the numbers of all scenes that description q matches, `sources[q]` the one it
    was made for."""

    scenes: tuple[Scene, ...]
    descriptions: tuple[Description, ...]
    sources: tuple[int, ...]
    relevant: tuple[tuple[int, ...], ...]


def make_gallery(split: str, seed: int, *, size: int = 1000, queries: int = 1000) -> Gallery:
    """`size` scenes in groups of look-alikes; the queries describe scenes all over the gallery."""
    rng = stream(split, 3, seed)
    scenes: list[Scene] = []
    shared: list[list[Thing]] = []
    while len(scenes) < size:
        group, large = draw_candidates(rng, split, min(GROUP, size - len(scenes)), 0.7)
        scenes += group
        shared += [large] * len(group)
    having: dict[tuple[str | None, str | None], set[int]] = defaultdict(set)
    for number, scene in enumerate(scenes):
        for thing in scene.things:
            having[thing.colour, thing.shape].add(number)
    descriptions: list[Description] = []
    sources: list[int] = []
    relevant: list[tuple[int, ...]] = []
    order = rng.permutation(size)
    while len(descriptions) < queries:
        source = int(order[len(descriptions) % size])
        # A mention tells lists of look-alikes nothing, and was learned as such; here it would tell something.
        description = draw_description(rng, scenes[source].things, shared[source], mention_shared=0)
        if description is None:
            continue
        # Only scenes with things of all the named kinds need a closer look.
        kinds = [(p.colour, p.shape) for p in (*description.phrases, *description.shared)]
        likely = set.intersection(*(having[kind] for kind in kinds))
        descriptions.append(description)
        sources.append(source)
        relevant.append(tuple(n for n in sorted(likely) if description.matches(scenes[n].things)))
    return Gallery(tuple(scenes), tuple(descriptions), tuple(sources), tuple(relevant))
