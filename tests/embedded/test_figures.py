"""The figures of the card."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.figures import Figures, ranking_quality
from radical_rerank.embedded.scenes.datasets import composed_lists, scene_lists
from radical_rerank.embedded.scenes.figures import (
    SceneEvaluation,
    question_accuracy,
    roc_auc,
    signals,
)
from radical_rerank.lab.records import Cell, Records, RunFolder
from radical_rerank.lab.runner import Runner

T = TypeVar("T")


def test_roc_auc() -> None:
    score = torch.tensor([0.1, 0.4, 0.4, 0.9, 0.2])
    positive = torch.tensor([False, True, False, True, False])
    pairs = [(1.0 if a > b else 0.5 if a == b else 0.0) for a in score[positive] for b in score[~positive]]
    assert roc_auc(score, positive) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.slow
def test_it_ranks_held_out_lists_dense_and_pruned(embedded: Backbone, tmp_path: Path) -> None:
    """A small sample of what the card reports; generous margins for its size."""
    runner = Runner(embedded, {})
    records = Records(tmp_path / "records.jsonl")
    cells = [Cell(name, name, 0.2) for name in ("dense", "radical", "random")]
    quality = ranking_quality(runner, scene_lists(lists=16), cells, records)
    dense, pruned, random = (values["MRR@10"] for values in quality.values())
    assert dense > 0.75
    assert pruned > 0.93 * dense
    assert random < 0.9 * pruned
    records = Records(tmp_path / "composed.jsonl")
    composed = ranking_quality(runner, composed_lists(lists=16), [Cell("dense", "dense")], records)
    assert composed["dense"]["MRR@10"] > 0.55
    assert question_accuracy(embedded, 30)["yes/no"] > 0.75


@pytest.mark.slow
def test_its_signals_are_those_that_pruning_relies_on(embedded: Backbone) -> None:
    seen = signals(embedded, 20)
    assert seen["AUC"] > 0.8
    assert seen["least positive share"] > 0.2
    single = max(seen["evidence kept by relevance"], seen["evidence kept by uniqueness"])
    assert seen["evidence kept by DTI"] > single
    assert min(seen["evidence kept by relevance"], seen["evidence kept by uniqueness"]) > 0.3
    assert seen["evidence kept by random"] == pytest.approx(0.2, abs=0.08)


def test_the_evaluation_goes_on_where_it_was_killed(
    embedded: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def groups(self: SceneEvaluation, folder: RunFolder) -> dict[tuple[str, ...], Callable[[], Figures]]:
        def measure(name: str) -> Figures:
            calls.append(name)
            if name == "b" and calls.count("b") == 1:
                raise KeyboardInterrupt
            return {name: {"value": 1.0}}

        return {(name,): lambda name=name: measure(name) for name in "abc"}  # type: ignore[misc]

    monkeypatch.setattr(SceneEvaluation, "groups", groups)
    evaluation = SceneEvaluation(embedded, 5, tmp_path / "figures.json")
    with pytest.raises(KeyboardInterrupt):
        evaluation.run()
    assert evaluation.run() == {name: {"value": 1.0} for name in "abc"}
    assert calls == ["a", "b", "b", "c"]
    with pytest.raises(ValueError, match="another model or number of lists"):
        SceneEvaluation(embedded, 6, tmp_path / "figures.json").run()


def test_a_killed_comparison_keeps_its_rankings(
    embedded: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cells = scene_lists(lists=3, count=3), [Cell("Dense", "dense"), Cell("Random", "random", 0.5)]
    made: list[str] = []
    add = Records.add

    def counted(self: Records, record: dict[str, Any]) -> None:
        made.append(record["task"])
        add(self, record)

    monkeypatch.setattr(Records, "add", counted)

    def killed(items: Iterable[T], label: str, *, total: int | None = None) -> Iterable[T]:
        yield from islice(items, 2)
        raise KeyboardInterrupt

    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ranking_quality(Runner(embedded, {}), data, cells, Records(path), progress=killed)
    assert made == ["0", "0", "1", "1"]
    quality = ranking_quality(Runner(embedded, {}), data, cells, Records(path))
    assert made == ["0", "0", "1", "1", "2", "2"]
    whole = ranking_quality(Runner(embedded, {}), data, cells, Records(tmp_path / "whole.jsonl"))
    assert quality == whole
    assert all(values["lists"] == 3 for values in whole.values())
