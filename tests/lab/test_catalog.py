"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.errors import InputError
from radical_rerank.lab.caption_sets import flickr8k, karpathy
from radical_rerank.lab.catalog import open_dataset
from radical_rerank.lab.datasets import Dataset
from tests.lab.data import (
    captioned,
)


def test_data_sets_by_name(tmp_path: Path) -> None:
    assert open_dataset("scenes", testbed=TESTBED, lists=3).name == "scenes"
    with pytest.raises(InputError, match="unknown data set"):
        open_dataset("imagenet", testbed=TESTBED)
    with pytest.raises(InputError, match="needs --annotations"):
        open_dataset("flickr30k", testbed=TESTBED)
    with pytest.raises(InputError, match="belong to flickr8k"):
        open_dataset("scenes", testbed=TESTBED, expert="x.txt")


def test_one_caption_per_picture(tmp_path: Path) -> None:
    annotations, tokens = captioned(tmp_path)
    loaders: list[Callable[..., Dataset]] = [
        lambda **options: karpathy(annotations, tmp_path, name="flickr30k", **options),
        lambda **options: flickr8k(tokens, tmp_path, **options),
    ]
    for load in loaders:
        assert [task.text for task in load(captions="first").tasks] == ["a 0", "b 0", "c 0"]
        assert len(load(captions="all").tasks) == 15
        drawn = [[task.text for task in load(captions="random", caption_seed=s).tasks] for s in range(20)]
        assert all([text[0] for text in texts] == ["a", "b", "c"] for texts in drawn)
        assert {texts[0] for texts in drawn} == {f"a {k}" for k in range(5)}
        assert len({tuple(texts) for texts in drawn}) > 10  # pictures draw apart from each other
        assert drawn[3] == [task.text for task in load(captions="random", caption_seed=3).tasks]
        assert list(load(captions="random").gallery) == ["a.jpg", "b.jpg", "c.jpg"]
        with pytest.raises(InputError, match="captions must be one of first, all, random, not 'last'"):
            load(captions="last")
    for name, file in (("flickr30k", annotations), ("mscoco", annotations), ("flickr8k", tokens)):
        opened = partial(open_dataset, name, testbed=TESTBED, annotations=str(file), images=str(tmp_path))
        data = opened()
        assert len(data.tasks) == 3, "the paper's protocol is the default"
        data = open_dataset(
            name, testbed=TESTBED, annotations=str(file), images=str(tmp_path), captions="all"
        )
        assert len(data.tasks) == 15
    with pytest.raises(InputError, match="scenes has no captions to choose from"):
        open_dataset("scenes", testbed=TESTBED, captions="all")
