"""The generated world's galleries and data sets."""

from __future__ import annotations

import pytest
from PIL import Image

from radical_rerank.embedded.scenes.datasets import (
    composed_gallery,
    composed_lists,
    scene_gallery,
    scene_lists,
    scene_questions,
)
from radical_rerank.embedded.scenes.gallery import make_gallery
from radical_rerank.embedded.scenes.lists import make_composed
from radical_rerank.lab.datasets import LazySequence
from radical_rerank.reranking.encoding import load_image


def test_a_gallery_knows_every_match() -> None:
    gallery = make_gallery("test", 3, size=120, queries=150)
    assert len(gallery.scenes) == 120
    assert len(gallery.descriptions) == len(gallery.relevant) == 150
    for description, source, relevant in zip(
        gallery.descriptions, gallery.sources, gallery.relevant, strict=True
    ):
        obvious = [n for n, scene in enumerate(gallery.scenes) if description.matches(scene.things)]
        assert list(relevant) == obvious
        assert source in relevant
    assert any(len(relevant) > 1 for relevant in gallery.relevant)
    assert len(set(gallery.sources[:120])) == 120  # queries are about all of it


def test_the_test_versions_are_fixed() -> None:
    """Changing the generator changes every reported figure: that must not happen unnoticed."""
    assert {
        "scenes": scene_lists(lists=100).digest(),
        "scenes, N = 5": scene_lists(lists=100, count=5).digest(),
        "scenes-composed": composed_lists(lists=100).digest(),
        "scenes-gallery": scene_gallery().digest(first=1000),
    } == {
        "scenes": "ebd626663a95441f",
        "scenes, N = 5": "5eefa7232c3a9ef6",
        "scenes-composed": "e4fce4cadde22629",
        "scenes-gallery": "0a0f43e307d8b648",
    }


@pytest.mark.parametrize("count", [5, 50])
def test_lists_have_one_match(count: int) -> None:
    data = scene_lists(lists=3, count=count)
    assert len(data.tasks) == 3
    for task in data.tasks:
        assert task.candidates is not None
        assert len(set(task.candidates)) == count
        assert len(task.relevant) == 1
        assert set(task.relevant) <= set(task.candidates)
        assert isinstance(data.picture(task.candidates[-1]), Image.Image)
    assert data.tasks[1] == scene_lists(lists=9, count=count).tasks[1]
    assert data.tasks[1].text != scene_lists(lists=3, count=count, seed=1).tasks[1].text


def test_composed_tasks_and_questions() -> None:
    data = composed_lists(lists=2, count=6)
    task = data.tasks[0]
    assert task.reference is not None
    reference, target = (
        load_image(data.picture(name)) for name in (task.reference, next(iter(task.relevant)))
    )
    assert reference.tobytes() != target.tobytes()
    questions = scene_questions(pictures=20)
    assert len(questions.questions) == 40
    for question in questions.questions:
        assert question.answer in question.choices
        assert isinstance(questions.picture(question.picture), Image.Image)


def test_lazy_sequences() -> None:
    made = []

    def make(number: int) -> int:
        made.append(number)
        return number * number

    items = LazySequence(5, make)
    assert len(items) == 5
    assert not made
    assert items[3] == items[-2] == 9
    assert made == [3]
    assert list(items[1:4]) == [1, 4, 9]
    assert list(items) == [0, 1, 4, 9, 16]
    with pytest.raises(IndexError):
        items[5]


def test_a_composed_gallery_knows_every_match() -> None:
    data = composed_gallery(groups=3, count=8, changes=2)
    assert len(data.gallery) == 24
    assert len(data.tasks) == 6
    for n in range(3):
        item = make_composed("test", n, 8, queries=2, things=2)
        for place, change in enumerate(item.changes):
            task = data.tasks[2 * n + place]
            assert task.reference == f"reference-{n}"
            assert str(8 * n + change.target) in task.relevant
            assert load_image(data.picture(f"reference-{n}")).tobytes() == item.rendered[0][0].tobytes()
            target = load_image(data.picture(str(8 * n + change.target)))
            assert target.tobytes() == item.images[change.target].tobytes()
