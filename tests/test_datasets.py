"""Galleries and data sets of the embedded world, and the first stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from radical_rerank import Dense, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import scenes, scenes_composed, scenes_gallery, scenes_questions
from radical_rerank.embedded.scenes.gallery import make_gallery
from radical_rerank.lab.datasets import Lazy
from radical_rerank.lab.page import Row, Section, write_page
from radical_rerank.retrieval import nearest
from tests.cases import draw_list


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
        "scenes": scenes(lists=100).digest(),
        "scenes, N = 5": scenes(lists=100, count=5).digest(),
        "scenes-composed": scenes_composed(lists=100).digest(),
        "scenes-gallery": scenes_gallery().digest(first=1000),
    } == {
        "scenes": "ebd626663a95441f",
        "scenes, N = 5": "5eefa7232c3a9ef6",
        "scenes-composed": "e4fce4cadde22629",
        "scenes-gallery": "0a0f43e307d8b648",
    }


@pytest.mark.parametrize("count", [5, 50])
def test_lists_have_one_match(count: int) -> None:
    data = scenes(lists=3, count=count)
    assert len(data.tasks) == 3
    for task in data.tasks:
        assert task.candidates is not None
        assert len(set(task.candidates)) == count
        assert len(task.relevant) == 1
        assert set(task.relevant) <= set(task.candidates)
        assert isinstance(data.picture(task.candidates[-1]), Image.Image)
    assert data.tasks[1] == scenes(lists=9, count=count).tasks[1]
    assert data.tasks[1].text != scenes(lists=3, count=count, seed=1).tasks[1].text


def test_composed_tasks_and_questions() -> None:
    data = scenes_composed(lists=2, count=6)
    task = data.tasks[0]
    assert task.reference is not None
    assert data.picture(task.reference).tobytes() != data.picture(next(iter(task.relevant))).tobytes()
    questions = scenes_questions(scenes=20)
    assert len(questions.questions) == 40
    for question in questions.questions:
        assert question.answer in question.choices
        assert isinstance(questions.picture(question.picture), Image.Image)


def test_lazy_sequences() -> None:
    made = []

    def make(number: int) -> int:
        made.append(number)
        return number * number

    items = Lazy(5, make)
    assert len(items) == 5
    assert not made
    assert items[3] == items[-2] == 9
    assert made == [3]
    assert list(items[1:4]) == [1, 4, 9]
    assert list(items) == [0, 1, 4, 9, 16]
    with pytest.raises(IndexError):
        items[5]


def test_exact_search() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, gallery = torch.randn(7, 6, generator=draw), torch.randn(30, 6, generator=draw)
    gallery[11] = gallery[4]  # a tie
    scores, numbers = nearest(queries, gallery, 5, chunk=3)
    for query, row, best in zip(queries, scores, numbers.tolist(), strict=True):
        obvious = sorted(range(30), key=lambda n: (-float(gallery[n] @ query), n))[:5]
        assert best == obvious
        torch.testing.assert_close(row, gallery[best] @ query)
    assert nearest(queries, gallery[:3], 5)[1].shape == (7, 3)


def test_a_page_holds_everything_it_shows(backbone: Backbone, tmp_path: Path) -> None:
    query, images = draw_list(1, 3)
    ranking = Reranker(backbone, Dense()).rank(query, images)
    hostile = "</script><script>alert(1)</script>"
    row = Row("Dense", "facts", ranking)
    path = write_page(tmp_path / "page.html", "a & b", hostile, [Section(hostile, images, [1], [row])])
    text = path.read_text(encoding="utf-8")
    assert "a &amp; b" in text
    assert "<script>alert" not in text
    assert "{{" not in text
    start = text.index('id="data">') + len('id="data">')
    (section,) = json.loads(text[start : text.index("</script>", start)])
    assert section["query"] == hostile
    assert len(section["images"]) == 3
    assert section["rows"][0]["order"] == ranking.order
    assert "http" not in text.replace("http-equiv", "")  # nothing is fetched


def test_a_composed_gallery_knows_every_match() -> None:
    from radical_rerank.embedded.scenes.datasets import scenes_composed_gallery
    from radical_rerank.embedded.scenes.lists import make_composed

    data = scenes_composed_gallery(groups=3, count=8, changes=2)
    assert len(data.gallery) == 24
    assert len(data.tasks) == 6
    for n in range(3):
        item = make_composed("test", n, 8, queries=2, things=2)
        for place, change in enumerate(item.changes):
            task = data.tasks[2 * n + place]
            assert task.reference == f"reference-{n}"
            assert str(8 * n + change.target) in task.relevant
            assert data.picture(f"reference-{n}").tobytes() == item.rendered[0][0].tobytes()
            target = data.picture(str(8 * n + change.target))
            assert target.tobytes() == item.images[change.target].tobytes()
