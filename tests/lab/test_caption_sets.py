"""Loaders, on small files of the true formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radical_rerank.errors import InputError
from radical_rerank.lab.caption_sets import fashioniq, flickr8k, karpathy
from tests.lab.data import (
    blank_pictures,
    captioned,
)


def karpathy_file(path: Path, **change: Any) -> Path:
    def image(name: str, split: str, first: int) -> dict[str, Any]:
        sentences = [
            {"raw": f"caption {first + i} .", "tokens": ["caption"], "sentid": first + i, "imgid": 0}
            for i in range(2)
        ]
        return {"filename": name, "filepath": "val", "split": split, "sentids": [], "sentences": sentences}

    images = [image("a.jpg", "test", 0), image("b.jpg", "restval", 2), image("c.jpg", "test", 4)]
    for key, value in change.items():
        images[0][key] = value
    path.write_text(json.dumps({"images": images, "dataset": "x"}))
    return path


def test_karpathy_splits(tmp_path: Path) -> None:
    blank_pictures(tmp_path / "images", "val/a.jpg", "val/b.jpg", "val/c.jpg")
    file = karpathy_file(tmp_path / "d.json")
    data = karpathy(file, tmp_path / "images", name="mscoco")
    assert [task.relevant for task in data.tasks] == [{"a.jpg": 1}] * 2 + [{"c.jpg": 1}] * 2
    assert list(data.gallery) == ["a.jpg", "c.jpg"]
    assert data.picture("c.jpg") == tmp_path / "images/val/c.jpg"
    assert len(karpathy(file, tmp_path / "images", name="mscoco", split="train").tasks) == 2
    bad: list[tuple[dict[str, Any], str]] = [
        ({"filename": None}, "image 0 has no filename"),
        ({"sentences": []}, r"a\.jpg\) has no sentences"),
        ({"sentences": [{"raw": " "}]}, "has no raw"),
        ({"filename": "c.jpg"}, "occurs twice"),
        ({"sentences": [{"raw": "x", "sentid": 4}]}, "sentence 4 occurs twice"),
        ({"filename": "z.jpg"}, r"z\.jpg is missing"),
    ]
    for change, message in bad:
        with pytest.raises(InputError, match=message):
            karpathy(karpathy_file(file, **change), tmp_path / "images", name="mscoco")
    with pytest.raises(InputError, match="no image of the split 'val'"):
        karpathy(karpathy_file(file), tmp_path / "images", name="mscoco", split="val")
    file.write_text("{")
    with pytest.raises(InputError, match="cannot read"):
        karpathy(file, tmp_path, name="mscoco")
    file.write_text("[]")
    with pytest.raises(InputError, match="no list of images"):
        karpathy(file, tmp_path, name="mscoco")


def test_flickr8k_with_judgements(tmp_path: Path) -> None:
    blank_pictures(tmp_path, "a.jpg", "b.jpg")
    tokens = tmp_path / "token.txt"
    tokens.write_text("a.jpg#0\tA dog .\na.jpg#1\tA cat .\nb.jpg#0\tA car .\n")
    expert = tmp_path / "expert.txt"
    expert.write_text("b.jpg\ta.jpg#0\t3\t3\t2\na.jpg\tb.jpg#0\t1\t1\t1\n")
    crowd = tmp_path / "crowd.txt"
    crowd.write_text("b.jpg\ta.jpg#1\t0.34\t1\t2\n")
    plain = flickr8k(tokens, tmp_path)
    assert [task.relevant for task in plain.tasks] == [{"a.jpg": 1}, {"a.jpg": 1}, {"b.jpg": 1}]
    judged = flickr8k(tokens, tmp_path, expert=expert, crowd=crowd)
    assert [task.relevant for task in judged.tasks] == [
        {"a.jpg": 3, "b.jpg": 2},
        {"a.jpg": 3, "b.jpg": 1},
        {"b.jpg": 3},
    ]
    split = tmp_path / "test.txt"
    split.write_text("b.jpg\n")
    assert len(flickr8k(tokens, tmp_path, split_file=split, expert=expert).tasks) == 1
    for file, text, message in (
        (tokens, "a.jpg A dog\n", "line 1: not `name"),
        (tokens, "a.jpg#0\tA\na.jpg#0\tB\n", "line 2: a.jpg#0 occurs twice"),
        (expert, "b.jpg\ta.jpg#0\t3\t9\t2\n", "line 1: not a judgement"),
        (expert, "b.jpg\tz.jpg#0\t3\t3\t2\n", "z.jpg#0 or b.jpg is not in"),
        (split, "z.jpg\n", "z.jpg has no caption"),
    ):
        old = file.read_text()
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            flickr8k(
                tokens, tmp_path, expert=expert, crowd=crowd, split_file=split if file == split else None
            )
        file.write_text(old)


def test_fashioniq(tmp_path: Path) -> None:
    blank_pictures(tmp_path, "B1.png", "B2.png")
    captions, split = tmp_path / "cap.dress.val.json", tmp_path / "split.dress.val.json"
    entry = {"target": "B2", "candidate": "B1", "captions": ["is red.", "has long sleeves"]}
    captions.write_text(json.dumps([entry]))
    split.write_text(json.dumps(["B1", "B2"]))
    (task,) = fashioniq(captions, split, tmp_path, category="dress").tasks
    assert task.text == "is red and has long sleeves"
    assert task.reference == "B1"
    assert task.relevant == {"B2": 1}
    no_target = {k: v for k, v in entry.items() if k != "target"}
    for bad, message in (
        ([no_target], "the test files have none"),
        ([{**entry, "captions": []}], "has no captions"),
        ([{**entry, "target": "B9"}], "B9 is not in"),
        ({}, "not a list of queries"),
    ):
        captions.write_text(json.dumps(bad))
        with pytest.raises(InputError, match=message):
            fashioniq(captions, split, tmp_path, category="dress")
    captions.write_text(json.dumps([entry]))
    for gallery, message in (
        (["B1", "B2", "B1"], "B1 occurs twice"),
        ({}, "flat list"),
        (["B1", "B2", "B3"], "missing"),
    ):
        split.write_text(json.dumps(gallery))
        with pytest.raises(InputError, match=message):
            fashioniq(captions, split, tmp_path, category="dress")


def test_captions_and_judgements_go_together(tmp_path: Path) -> None:
    """A judgement of a caption that is not asked is no error; that of one that is asked counts."""
    _, tokens = captioned(tmp_path)
    expert = tmp_path / "expert.txt"
    expert.write_text("b.jpg\ta.jpg#0\t3\t3\t2\nc.jpg\ta.jpg#4\t4\t4\t4\n")
    data = flickr8k(tokens, tmp_path, expert=expert, captions="first")
    assert [task.relevant for task in data.tasks] == [{"a.jpg": 3, "b.jpg": 2}, {"b.jpg": 3}, {"c.jpg": 3}]
