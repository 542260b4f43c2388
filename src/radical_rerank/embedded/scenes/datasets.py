"""Data sets of scenes, drawn from a seed when they are used.

Reported figures are of the test split with seed 0.
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
from radical_rerank.lab.datasets import Dataset, LazySequence, Question, QuestionSet, Task
from radical_rerank.lab.testbed import Testbed

STRIDE = 1_000_000
"""list `number` of data set `seed` has the generator's seed `seed * STRIDE + number`"""


def scene_lists(
    *,
    lists: int = 1000,
    count: int = 20,
    similarity: float | None = 0.7,
    seed: int = 0,
    split: str = "test",
) -> Dataset:
    """Return lists of similar candidates, one of which matches the query.

    The pictures of list 3 are named "3-0", "3-1" and so on.

    Args:
        lists: how many lists
        count: candidates per list
        similarity: how alike they are, from 0 to 1; None for lists of every degree, from 0.05 to 0.95
        seed: the same seed gives the same data
        split: "train", "validation" or "test"

    Example:
        >>> data = scene_lists(lists=2, count=5)
        >>> task = data.tasks[0]
        >>> task.text, task.relevant
        ('an orange circle with a large yellow heart and a large blue circle', {'0-2': 1})
        >>> task.candidates
        ('0-0', '0-1', '0-2', '0-3', '0-4')
    """

    def items(number: int) -> SceneList:
        degree = (number % 10 + 0.5) / 10 if similarity is None else similarity
        return make_list(split, seed * STRIDE + number, count, similarity=degree)

    drawn = LazySequence(lists, items)

    def task(number: int) -> Task:
        item = drawn[number]
        ids = tuple(f"{number}-{place}" for place in range(count))
        text = item.descriptions[0].text()
        return Task(str(number), text, {ids[item.targets[0]]: 1}, candidates=ids)

    def picture(name: str) -> Image.Image:
        number, place = map(int, name.split("-"))
        return drawn[number].images[place]

    return Dataset("scenes", LazySequence(lists, task), picture)


def composed_lists(
    *, lists: int = 1000, count: int = 20, things: int | None = 2, seed: int = 0, split: str = "test"
) -> Dataset:
    """Return lists whose query is a reference picture and a change in words.

    The pictures of list 3 are named "3-reference", "3-0", "3-1" and so on.

    Args:
        lists: how many lists
        count: candidates per list
        things: how many small things a scene has, 2 or 3; None for either
        seed: the same seed gives the same data
        split: "train", "validation" or "test"

    Example:
        >>> task = composed_lists(lists=2, count=5).tasks[0]
        >>> task.reference, task.text
        ('0-reference', 'the heart is green instead of red')
    """
    drawn = LazySequence(
        lists, lambda number: make_composed(split, seed * STRIDE + number, count, things=things)
    )

    def task(number: int) -> Task:
        change = drawn[number].changes[0]
        ids = tuple(f"{number}-{place}" for place in range(count))
        return Task(str(number), change.text, {ids[change.target]: 1}, f"{number}-reference", ids)

    def picture(name: str) -> Image.Image:
        number, place = name.split("-")
        item = drawn[int(number)]
        return item.rendered[0][0] if place == "reference" else item.images[int(place)]

    return Dataset("scenes-composed", LazySequence(lists, task), picture)


def scene_gallery(*, size: int = 1000, queries: int = 1000, seed: int = 0, split: str = "test") -> Dataset:
    """Return a gallery to search. Every match of every query is known.

    Args:
        size: scenes in the gallery; they are named "0", "1" and so on
        queries: how many queries
        seed: the same seed gives the same data
        split: "train", "validation" or "test"

    Example:
        >>> data = scene_gallery(size=40, queries=3)
        >>> len(data.gallery), len(data.tasks), data.tasks[0].candidates is None
        (40, 3, True)
    """
    drawn = make_gallery(split, seed, size=size, queries=queries)
    tasks = [
        Task(str(number), description.text(), {str(scene): 1 for scene in relevant})
        for number, (description, relevant) in enumerate(zip(drawn.descriptions, drawn.relevant, strict=True))
    ]
    picture = lru_cache(maxsize=2048)(lambda name: render(drawn.scenes[int(name)])[0])
    return Dataset("scenes-gallery", tasks, picture, [str(number) for number in range(size)])


def composed_gallery(
    *, groups: int = 50, count: int = 20, changes: int = 6, seed: int = 0, split: str = "test"
) -> Dataset:
    """Return a gallery to search with composed queries: all candidates of several composed lists.

    The scenes are named "0", "1" and so on, the references "reference-0", "reference-1" and so on.

    Args:
        groups: how many composed lists, each with one reference
        count: candidates per list
        changes: queries per list; there are fewer if the candidates are few
        seed: the same seed gives the same data
        split: "train", "validation" or "test"

    Example:
        >>> data = composed_gallery(groups=2, count=5, changes=2)
        >>> len(data.gallery), [task.reference for task in data.tasks]
        (10, ['reference-0', 'reference-0', 'reference-1', 'reference-1'])
    """
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


def scene_questions(*, pictures: int = 1000, seed: int = 0, split: str = "test") -> QuestionSet:
    """Return two questions about each scene: "is there …" or "what colour is …".

    Args:
        pictures: how many scenes; they are named "0", "1" and so on
        seed: the same seed gives the same data
        split: "train", "validation" or "test"

    Example:
        >>> data = scene_questions(pictures=3)
        >>> question = data.questions[0]
        >>> len(data.questions), question.text, question.answer
        (6, 'is there a yellow cross ?', 'no')
    """

    def question(number: int) -> Question:
        item = make_questions(split, seed * STRIDE + number // 2, 2)[number % 2]
        choices = ("yes", "no") if item.answer in ("yes", "no") else COLOURS
        return Question(str(number), item.text, str(number // 2), item.answer, choices)

    def picture(name: str) -> Image.Image:
        return render(make_questions(split, seed * STRIDE + int(name), 1)[0].scene)[0]

    return QuestionSet("scenes-questions", LazySequence(2 * pictures, question), picture)


TESTBED = Testbed(
    name="scenes",
    lists=scene_lists,
    gallery=scene_gallery,
    embedder=SceneEmbedder,
    composed_lists=composed_lists,
    composed_searches=composed_gallery,
    question_set=scene_questions,
    about={
        "scenes": "generated lists of 20 with one match; needs no files",
        "scenes-composed": "generated references with a change in words; needs no files",
        "scenes-gallery": "a generated gallery of 1,000; a first stage finds the candidates",
        "scenes-composed-gallery": "references and changes over a generated gallery; with a first stage",
    },
)
"""the data sets of scenes and their first stage, for experiments"""
