"""Lists of photographs: random candidates, and what the first stage finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.photos.datasets import photo_gallery, photo_lists, photo_pools
from radical_rerank.embedded.photos.datasets import testbed as photo_testbed
from radical_rerank.embedded.photos.embedder import PhotoEmbedder
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.errors import InputError
from radical_rerank.lab.experiments.run import command_of
from radical_rerank.lab.paper import KEEPS, SEEDS
from radical_rerank.lab.runner import Runner


def test_random_lists_have_one_match(corpus_folder: Path) -> None:
    data = photo_lists(corpus_folder, count=5)
    assert len(data.tasks) == len(photo_gallery(corpus_folder).tasks) == 8
    for task in data.tasks:
        assert task.candidates is not None
        assert len(set(task.candidates)) == 5
        assert len(set(task.relevant) & set(task.candidates)) == 1
    other = photo_lists(corpus_folder, count=5, seed=1)
    assert [t.candidates for t in other.tasks] != [t.candidates for t in data.tasks]


def test_pools_are_what_the_first_stage_finds(corpus_folder: Path) -> None:
    gallery, data = photo_gallery(corpus_folder), photo_pools(corpus_folder, count=3)
    first = PhotoEmbedder(Backbone.from_pretrained("photos"))
    pictures = first.embed_images([gallery.picture(name) for name in gallery.gallery])
    expected = []
    for task in gallery.tasks:
        score = pictures @ first.embed_queries([task.text])[0]
        found = [gallery.gallery[int(n)] for n in score.argsort(descending=True)[:3]]
        if set(found) & set(task.relevant):
            expected.append((task.text, tuple(found)))
    assert 0 < len(expected) <= 8
    assert [(task.text, task.candidates) for task in data.tasks] == expected
    assert [task.id for task in data.tasks] == [str(n) for n in range(len(expected))]
    assert len(photo_pools(corpus_folder, count=3, lists=1).tasks) == 1


def test_an_experiment_names_the_pools_in_its_command(corpus_folder: Path) -> None:
    runner = Runner(Backbone.from_pretrained("photos"), {"commit": "test"})
    bed = photo_testbed(corpus_folder)
    names = {
        pooled: command_of(
            "main", runner, bed.with_pools() if pooled else bed, keeps=KEEPS, seeds=SEEDS, limit=5
        )
        for pooled in (False, True)
    }
    assert names == {
        False: "radical experiment main --limit 5 --testbed photos --data DIR",
        True: "radical experiment main --limit 5 --testbed photos --data DIR --pools",
    }
    with pytest.raises(InputError, match="scenes has no lists of its first stage"):
        TESTBED.with_pools()
