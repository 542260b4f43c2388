"""The embedded world's data sets, drawn from a seed on the fly.

Seed 0 of the test split is the version that figures are reported on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from PIL import Image

from radical_rerank.embedded.scenes.drawing import render
from radical_rerank.embedded.scenes.embedder import SceneEmbedder
from radical_rerank.embedded.scenes.gallery import make_gallery
from radical_rerank.embedded.scenes.lists import SceneList, make_composed, make_list, make_questions
from radical_rerank.embedded.scenes.world import COLOURS, Thing
from radical_rerank.lab.datasets import Dataset, Lazy, Question, QuestionSet, Task
from radical_rerank.lab.testbed import Testbed

STRIDE = 1_000_000
"""List `number` of data set `seed` is list `seed * STRIDE + number` of the generator"""


def scene_lists(
    *,
    lists: int = 1000,
    count: int = 20,
    similarity: float | None = 0.7,
    seed: int = 0,
    split: str = "test",
) -> Dataset:
    """Controlled lists: one match among `count` candidates that are alike. Pictures are "list-place".

    similarity: None for lists of every degree, from 0.05 to 0.95
    """

    def items(number: int) -> SceneList:
        degree = (number % 10 + 0.5) / 10 if similarity is None else similarity
        return make_list(split, seed * STRIDE + number, count, similarity=degree)

    drawn = Lazy(lists, items)

    def task(number: int) -> Task:
        item = drawn[number]
        ids = tuple(f"{number}-{place}" for place in range(count))
        text = item.descriptions[0].text()
        return Task(str(number), text, {ids[item.targets[0]]: 1}, candidates=ids)

    def picture(name: str) -> Image.Image:
        number, place = map(int, name.split("-"))
        return drawn[number].images[place]

    return Dataset("scenes", Lazy(lists, task), picture)


def composed_lists(
    *, lists: int = 1000, count: int = 20, things: int | None = 2, seed: int = 0, split: str = "test"
) -> Dataset:
    """Composed queries: a reference ("list-reference"), a change in words, `count` candidates.

    things: the small things of a scene, 2 or 3; None for either
    """
    drawn = Lazy(lists, lambda number: make_composed(split, seed * STRIDE + number, count, things=things))

    def task(number: int) -> Task:
        change = drawn[number].changes[0]
        ids = tuple(f"{number}-{place}" for place in range(count))
        return Task(str(number), change.text, {ids[change.target]: 1}, f"{number}-reference", ids)

    def picture(name: str) -> Image.Image:
        number, place = name.split("-")
        item = drawn[int(number)]
        return item.rendered[0][0] if place == "reference" else item.images[int(place)]

    return Dataset("scenes-composed", Lazy(lists, task), picture)


def composed_gallery(
    *, groups: int = 50, count: int = 20, changes: int = 6, seed: int = 0, split: str = "test"
) -> Dataset:
    """References and changes over one gallery of all their candidates: a pool may miss the target."""
    items = [make_composed(split, seed * STRIDE + n, count, queries=changes, things=2) for n in range(groups)]
    gallery = [scene for item in items for scene in item.scenes]
    alike: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for number, scene in enumerate(gallery):
        alike.setdefault(_kinds(scene.things), []).append(str(number))
    tasks = []
    for n, item in enumerate(items):
        for place, change in enumerate(item.changes):
            wanted = _kinds(item.scenes[change.target].things)
            relevant = dict.fromkeys(alike[wanted], 1)
            tasks.append(Task(f"{n}-{place}", change.text, relevant, f"reference-{n}"))

    @lru_cache(maxsize=2048)
    def picture(name: str) -> Image.Image:
        kind, _, number = name.rpartition("-")
        return render(items[int(number)].reference if kind else gallery[int(number)])[0]

    return Dataset("scenes-composed-gallery", tasks, picture, [str(n) for n in range(len(gallery))])


def _kinds(things: Sequence[Thing]) -> tuple[tuple[str, str, str], ...]:
    return tuple(sorted((thing.colour, thing.shape, thing.size) for thing in things))


def scene_gallery(*, size: int = 1000, queries: int = 1000, seed: int = 0, split: str = "test") -> Dataset:
    """A gallery with every relevant scene known: for a first stage, whose pool may miss them all."""
    drawn = make_gallery(split, seed, size=size, queries=queries)
    tasks = [
        Task(str(number), description.text(), {str(scene): 1 for scene in relevant})
        for number, (description, relevant) in enumerate(zip(drawn.descriptions, drawn.relevant, strict=True))
    ]
    picture = lru_cache(maxsize=2048)(lambda name: render(drawn.scenes[int(name)])[0])
    return Dataset("scenes-gallery", tasks, picture, [str(number) for number in range(size)])


def scene_questions(*, pictures: int = 1000, seed: int = 0, split: str = "test") -> QuestionSet:
    """Two questions about each of so many scenes: is there …, what colour is …"""

    def question(number: int) -> Question:
        item = make_questions(split, seed * STRIDE + number // 2, 2)[number % 2]
        choices = ("yes", "no") if item.answer in ("yes", "no") else COLOURS
        return Question(str(number), item.text, str(number // 2), item.answer, choices)

    def picture(name: str) -> Image.Image:
        return render(make_questions(split, seed * STRIDE + int(name), 1)[0].scene)[0]

    return QuestionSet("scenes-questions", Lazy(2 * pictures, question), picture)


TESTBED = Testbed(
    name="scenes",
    lists=scene_lists,
    composed=composed_lists,
    gallery=scene_gallery,
    composed_gallery=composed_gallery,
    questions=scene_questions,
    embedder=SceneEmbedder,
    about={
        "scenes": "generated lists of 20 with one match; needs no files",
        "scenes-composed": "generated references with a change in words; needs no files",
        "scenes-gallery": "a generated gallery of 1,000; a first stage finds the candidates",
        "scenes-composed-gallery": "references and changes over a generated gallery; with a first stage",
    },
)
"""the data of the generated world, for experiments"""
