"""What the card of the photos model reports, on a small corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radical_rerank.embedded.photos.datasets import photo_gallery
from radical_rerank.embedded.photos.figures import PhotoEvaluation
from tests.embedded.photos.conftest import write_corpus


def evaluation(folder: Path, found: dict[str, list[str]], **options: Any) -> PhotoEvaluation:
    """An evaluation of a first stage that found this; it needs no model."""
    made = PhotoEvaluation(None, data=folder, **options)  # type: ignore[arg-type]
    vars(made)["found"] = found
    return made


def found_at(folder: Path, ranks: list[int | None]) -> dict[str, list[str]]:
    """What a first stage finds that puts each query's photograph at such a rank, or does not find it."""
    found = {}
    for task, rank in zip(photo_gallery(folder).tasks, ranks, strict=True):
        names = [f"other {number}.jpg" for number in range(20)]
        if rank is not None:
            names[rank] = next(iter(task.relevant))
        found[task.id] = names
    return found


def test_the_first_stage_against_a_count_by_hand(corpus_folder: Path) -> None:
    found = found_at(corpus_folder, [0, 1, None, 3, 0, 12, None, 1])
    figures = evaluation(corpus_folder, found, lists=4).first_stage()
    assert figures == {
        "R@1": 2 / 8,
        "R@20": 6 / 8,
        # Of the first four queries whose photograph is found: ranks 1, 2, 4 and 1.
        "MRR@10, match inside": pytest.approx((1 + 1 / 2 + 1 / 4 + 1) / 4),
        "queries": 8,
    }
    late = evaluation(corpus_folder, found_at(corpus_folder, [None] * 7 + [12]), lists=4).first_stage()
    assert late["MRR@10, match inside"] == 0  # found, but behind the tenth


def test_the_pools_are_those_with_the_match_inside(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "data", train=4, dev=24)
    found = found_at(folder, [None, 2, 0, None, 5, *[1] * 19])
    drawn, pools = evaluation(folder, found, lists=3).comparisons()
    assert [len(task.candidates or ()) for task in drawn.data.tasks] == [20, 20, 20]
    assert [next(iter(task.relevant)) for task in pools.data.tasks] == ["5.jpg", "6.jpg", "8.jpg"]
    assert pools.pools == found


def test_without_the_stamps_their_figure_is_left_out(corpus_folder: Path, tmp_path: Path) -> None:
    made = evaluation(corpus_folder, {}, lists=1, stamps=tmp_path / "missing")
    assert "class names" not in made.others()
    assert "class names" in evaluation(corpus_folder, {}, lists=1, stamps=tmp_path).others()
