"""Fitting calibrations with a Reranker: lists with and without a match, halves, the weight of a prior."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from radical_rerank import Reranker
from radical_rerank.errors import CalibrationError
from radical_rerank.reranking import fitting
from radical_rerank.reranking.fitting import JudgedList, fit_and_measure, labelled, measure, without_match
from radical_rerank.reranking.orders import log_softmax, standardised
from radical_rerank.reranking.scores import LabelledList, ScoreCalibration, auroc, expected_calibration_error


def scene_lists(count: int, candidates: int = 4) -> list[JudgedList]:
    from radical_rerank.embedded.scenes.lists import make_list

    items = [make_list("validation", 900 + seed, candidates) for seed in range(count)]
    return [
        JudgedList(
            item.descriptions[0].text(),
            item.images,
            [place == item.targets[0] for place in range(candidates)],
            [float(place == item.targets[0]) + 0.1 * place for place in range(candidates)],
        )
        for item in items
    ]


def test_the_match_is_taken_out_and_the_list_keeps_its_length() -> None:
    own = JudgedList("q", ["a", "b", "c"], [False, True, False], [1.0, 2.0, 3.0])
    other = JudgedList("p", ["d", "e", "f"], [False, False, True])
    assert without_match(own, other) == JudgedList("q", ["a", "e", "c"], [False, False, False])
    nothing = replace(own, relevant=[False] * 3)
    assert without_match(nothing, other).documents == own.documents
    with pytest.raises(CalibrationError, match="only 0 documents"):
        without_match(own, JudgedList("p", ["d"], [True]))


def test_scores_are_in_the_order_of_the_documents() -> None:
    reranker = Reranker("scenes", keep=0.5)
    lists = scene_lists(2)
    (first, without), _ = labelled(reranker, lists)
    ranking = reranker.rank(lists[0].query, lists[0].documents)
    for result in ranking:
        assert first.scores[result.index] == result.score
    assert list(first.relevant) == list(lists[0].relevant)
    assert first.signals == ranking.signals
    assert not without.matched
    changed = without_match(lists[0], lists[1])
    differs = [a is not b for a, b in zip(lists[0].documents, changed.documents, strict=True)]
    assert differs == list(lists[0].relevant)


def test_measures_are_those_of_a_slow_version() -> None:
    rng = np.random.default_rng(0)
    lists = []
    for number in range(60):
        scores = log_softmax((rng.normal(size=5) * 3).tolist())
        match = int(rng.integers(5))
        lists.append(LabelledList(scores, [number % 2 == 0 and place == match for place in range(5)]))
    calibration = ScoreCalibration(temperature=2.0, slope=0.7, intercept=-0.4)
    got = measure(calibration, lists)
    top, right, raw, held = [], [], [], []
    for one in lists:
        best = max(range(5), key=one.scores.__getitem__)
        top.append(calibration.probabilities(one.scores)[best])
        raw.append(math.exp(one.scores[best]))
        right.append(one.relevant[best])
        held.append(any(one.relevant))
    assert got.lists == 60
    assert got.ece_best == pytest.approx(expected_calibration_error(top, right))
    assert got.ece_best_raw == pytest.approx(expected_calibration_error(raw, right))
    assert got.auroc == pytest.approx(auroc(top, held))
    assert got.auroc_raw == pytest.approx(auroc(raw, held))
    assert sum(part.count for part in got.bins) == 60
    every = [p for one in lists for p in calibration.probabilities(one.scores)]
    assert got.ece_all == pytest.approx(
        expected_calibration_error(every, [y for o in lists for y in o.relevant])
    )


def test_a_calibration_of_a_reranker_is_found_again() -> None:
    reranker = Reranker("scenes", keep=0.5)
    calibration, measured = fit_and_measure(reranker, scene_lists(8))
    assert calibration.settings == reranker.score_settings
    assert calibration.lists == 16
    assert calibration.signals == fitting.WITH_NONE  # the model can answer that nothing fits
    assert measured.lists == 8
    assert calibration.weight is not None
    assert 0 <= measured.ece_best <= 1


def test_only_the_scorer_logits_is_calibrated() -> None:
    with pytest.raises(CalibrationError, match="not 'generate'"):
        fit_and_measure(Reranker("scenes", scorer="generate"), scene_lists(2))
    with pytest.raises(CalibrationError, match="at least two lists"):
        labelled(Reranker("scenes"), scene_lists(1))


def test_the_weight_of_a_useful_first_stage_is_large_and_of_noise_small() -> None:
    rng = np.random.default_rng(3)
    lists, useful, noise = [], [], []
    for _ in range(300):
        match = int(rng.integers(6))
        relevant = [place == match for place in range(6)]
        lists.append(LabelledList(log_softmax(rng.normal(size=6).tolist()), relevant))
        useful.append((rng.normal(size=6) + 2.0 * np.array(relevant)).tolist())
        noise.append(rng.normal(size=6).tolist())
    assert (fitting._fit_weight(lists, noise) or 0.0) < 0.3
    weight = fitting._fit_weight(lists, useful)
    assert weight is not None
    assert weight > 0.8

    # The best of a finer grid is near.
    def loss(value: float) -> float:
        total = 0.0
        for one, prior in zip(lists, useful, strict=True):
            mixed = np.array(one.scores) + value * np.array(standardised(prior))
            total -= mixed[list(one.relevant).index(True)] - np.log(np.exp(mixed).sum())
        return total

    finer = min((step / 200 for step in range(600)), key=loss)
    assert weight == pytest.approx(finer, abs=0.03)
    assert fitting._fit_weight(lists, [None] * len(lists)) is None


def test_documents_may_be_anything_that_a_reranker_takes() -> None:
    picture = Image.new("RGB", (96, 96), "red")
    own = JudgedList("q", [picture, "a text of words"], [True, False])
    assert without_match(own, JudgedList("p", ["x y", "z"], [False, True])).documents[1] == "a text of words"
