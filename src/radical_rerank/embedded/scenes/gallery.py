"""A gallery to search: many scenes, and queries for which every match is known."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from radical_rerank.embedded.scenes.drawing import Scene
from radical_rerank.embedded.scenes.lists import draw_candidates, draw_description, stream
from radical_rerank.embedded.scenes.world import Description, Thing

GROUP = 20
"""how many scenes share their large things, so that the results of a first stage look alike"""


@dataclass(frozen=True)
class Gallery:
    """Scenes and queries over all of them.

    Args:
        scenes: the gallery
        descriptions: the queries
        sources: per query, the number of the scene that it was drawn from
        relevant: per query, the numbers of all scenes that match it
    """

    scenes: tuple[Scene, ...]
    descriptions: tuple[Description, ...]
    sources: tuple[int, ...]
    relevant: tuple[tuple[int, ...], ...]


def make_gallery(split: str, seed: int, *, size: int = 1000, queries: int = 1000) -> Gallery:
    """Draw a gallery: groups of similar scenes, and descriptions of scenes all over it.

    Args:
        split: "train", "validation" or "test"
        seed: the same seed gives the same gallery
        size: how many scenes
        queries: how many descriptions

    Example:
        >>> gallery = make_gallery("test", 0, size=40, queries=3)
        >>> len(gallery.scenes), [scene in gallery.relevant[q] for q, scene in enumerate(gallery.sources)]
        (40, [True, True, True])
    """
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
        # In a list, a mention of shared things says nothing, and the model was trained so. Here it would.
        description = draw_description(rng, scenes[source].things, shared[source], mention_shared=0)
        if description is None:
            continue
        # Only scenes with things of all the mentioned kinds can match.
        kinds = [(p.colour, p.shape) for p in (*description.phrases, *description.shared)]
        likely = set.intersection(*(having[kind] for kind in kinds))
        descriptions.append(description)
        sources.append(source)
        relevant.append(tuple(n for n in sorted(likely) if description.matches(scenes[n].things)))
    return Gallery(tuple(scenes), tuple(descriptions), tuple(sources), tuple(relevant))
