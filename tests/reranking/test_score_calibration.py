"""Calibrated scores: against slow and obvious versions, and what must hold for any numbers."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.errors import CalibrationError
from radical_rerank.reranking.scores import (
    LabelledList,
    ScoreCalibration,
    auroc,
    calibration_for,
    expected_calibration_error,
    isotonic_points,
    logistic_regression,
    negative_log_likelihood,
    reliability,
)

numbers = st.floats(-30, 30, allow_nan=False)
probabilities = st.floats(0, 1)


def drawn_lists(count: int, *, sharp: float, seed: int = 0, missing: bool = True) -> list[LabelledList]:
    """Lists of ten from a model whose logits are `sharp` times too large; half have no match."""
    rng = np.random.default_rng(seed)
    lists = []
    for number in range(count):
        has = not (missing and number % 2)
        logits = rng.normal(size=10)
        match = int(rng.integers(10))
        logits[match] += 3.0 * has
        scaled = sharp * logits
        scores = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
        relevant = [has and place == match for place in range(10)]
        lists.append(LabelledList(scores.tolist(), relevant, {"logit": float(logits.max())}))
    return lists


# Measures, against slow versions.


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=40))
def test_auroc_counts_the_pairs(pairs: list[tuple[int, bool]]) -> None:
    positive = [s for s, y in pairs if y]
    negative = [s for s, y in pairs if not y]
    if not positive or not negative:
        with pytest.raises(CalibrationError, match="both kinds"):
            auroc([s for s, _ in pairs], [y for _, y in pairs])
        return
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in positive for b in negative)
    expected = won / (len(positive) * len(negative))
    assert auroc([s for s, _ in pairs], [y for _, y in pairs]) == pytest.approx(expected)


@given(st.lists(st.tuples(probabilities, st.booleans()), min_size=1, max_size=60), st.integers(1, 20))
def test_the_calibration_error_is_that_of_a_loop_over_bins(
    pairs: list[tuple[float, bool]], bins: int
) -> None:
    expected, seen = 0.0, 0
    for place in range(bins):
        own = [(p, y) for p, y in pairs if min(int(p * bins), bins - 1) == place]
        seen += len(own)
        if own:
            gap = abs(sum(p for p, _ in own) - sum(y for _, y in own)) / len(own)
            expected += gap * len(own) / len(pairs)
    assert seen == len(pairs)
    p, y = [p for p, _ in pairs], [y for _, y in pairs]
    assert expected_calibration_error(p, y, bins) == pytest.approx(expected, abs=1e-12)
    assert sum(part.count for part in reliability(p, y, bins)) == len(pairs)


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=12))
def test_isotonic_regression_is_the_best_of_all_monotone_functions(pairs: list[tuple[int, bool]]) -> None:
    x = np.array([float(a) for a, _ in pairs])
    y = np.array([float(b) for _, b in pairs])
    points = isotonic_points(x, y)
    assert all(b[0] > a[0] and b[1] > a[1] for a, b in pairwise(points))
    # The max-min formula: the fit at x is the largest over lower ends of the least mean over upper ends.
    values = sorted(set(x))
    best = {
        at: max(
            min(float(y[(x >= low) & (x <= high)].mean()) for high in values if high >= at)
            for low in values
            if low <= at
        )
        for at in values
    }
    levels = sorted({round(level, 9) for level in best.values()})
    assert [round(level, 9) for _, level in points] == pytest.approx(levels)
    for place, level in points:
        own = [at for at in values if best[at] == pytest.approx(level)]
        assert min(own) <= place + 1e-9
        assert place <= max(own) + 1e-9


def test_logistic_regression_finds_the_least_loss() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 2)) * [1.0, 20.0] + [3.0, -50.0]
    chance = 1 / (1 + np.exp(-(1.5 * (rows[:, 0] - 3) - 0.05 * (rows[:, 1] + 50))))
    labels = (rng.random(400) < chance).astype(np.float64)
    weights, bias = logistic_regression(rows, labels, ridge=0.0)

    def loss(w: np.ndarray, b: float) -> float:
        z = rows @ w + b
        return float(np.logaddexp(0, z).sum() - labels @ z)

    least = loss(weights, bias)
    for _ in range(200):
        other = weights + rng.normal(size=2) * [0.05, 0.003]
        assert loss(other, bias + float(rng.normal()) * 0.05) >= least - 1e-6
    assert weights[0] == pytest.approx(1.5, abs=0.4)


def test_logistic_regression_survives_classes_that_a_line_separates() -> None:
    weights, bias = logistic_regression(np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([0.0, 0, 1, 1]))
    assert math.isfinite(weights[0])
    assert weights[0] > 0
    assert -bias / weights[0] == pytest.approx(1.5)


# What fitting gives.


def test_a_model_that_is_three_times_too_sure_gets_a_temperature_of_three() -> None:
    # Labels are drawn from the softmax at temperature 3: the best temperature is 3.
    rng = np.random.default_rng(1)
    lists = []
    for _ in range(3000):
        logits = rng.normal(size=6) * 6
        p = np.exp(logits / 3 - (logits / 3).max())
        match = int(rng.choice(6, p=p / p.sum()))
        lists.append(LabelledList(logits.tolist(), [place == match for place in range(6)]))
    assert ScoreCalibration.fit(lists).temperature == pytest.approx(3.0, rel=0.08)


@pytest.mark.parametrize("sharp", [1.0, 4.0])
def test_held_out_probabilities_are_better_than_the_softmax(sharp: float) -> None:
    fitted = ScoreCalibration.fit(drawn_lists(600, sharp=sharp), signals=["logit", "top"])
    held_out = drawn_lists(600, sharp=sharp, seed=1)
    labels = [y for one in held_out for y in one.relevant]
    raw = [math.exp(s) for one in held_out for s in one.scores]
    better = [p for one in held_out for p in fitted.probabilities(one.scores, one.signals)]
    assert expected_calibration_error(better, labels) < 0.5 * expected_calibration_error(raw, labels)
    assert negative_log_likelihood(fitted, held_out) < negative_log_likelihood(ScoreCalibration(), held_out)


def test_the_kind_with_the_smaller_held_out_loss_is_taken() -> None:
    # A step from 0.02 to 0.5: a sigmoid cannot follow it, an isotonic map can.
    rng = np.random.default_rng(2)
    lists = []
    for _ in range(800):
        odds = float(rng.uniform(-6, 6))
        scores = [-math.log1p(math.exp(-odds)), -math.log1p(math.exp(odds))]
        relevant = [bool(rng.random() < (0.5 if x > -1 else 0.02)) for x in (odds, -odds)]
        lists.append(LabelledList(scores, relevant))
    fitted = {kind: ScoreCalibration._fit(lists[::2], (), kind) for kind in ("platt", "isotonic")}
    losses = {kind: negative_log_likelihood(one, lists[1::2]) for kind, one in fitted.items()}
    assert losses["isotonic"] < losses["platt"]
    assert ScoreCalibration.fit(lists).kind == "isotonic"


def test_lists_without_any_relevant_document_cannot_be_fitted() -> None:
    with pytest.raises(CalibrationError, match="nothing to fit"):
        ScoreCalibration.fit([LabelledList([-0.1, -2.3], [False, False])])


def test_nothing_fits_lowers_every_probability() -> None:
    fitted = ScoreCalibration.fit(drawn_lists(400, sharp=2.0), signals=["logit"])
    scores = [-0.05, -3.5, -5.0]
    sure, unsure = fitted.probabilities(scores, {"logit": 4.0}), fitted.probabilities(scores, {"logit": 0.5})
    assert fitted.matched(scores, {"logit": 4.0}) > 0.5 > fitted.matched(scores, {"logit": 0.5})
    assert all(a >= b for a, b in zip(sure, unsure, strict=True))
    assert sure[0] > unsure[0]


def test_a_missing_signal_is_an_error_and_can_be_asked_for() -> None:
    fitted = ScoreCalibration(signals=("logit", "top"), weights=(1.0, 1.0))
    assert fitted.usable({"logit": 1.0})
    assert not fitted.usable(None)
    with pytest.raises(CalibrationError, match="no signal 'logit'"):
        fitted.probabilities([-0.1, -2.3])


# What must hold for any calibration and any scores.


@st.composite
def calibrations(draw: st.DrawFn) -> ScoreCalibration:
    kind = draw(st.sampled_from(["platt", "isotonic"]))
    xs = draw(st.lists(numbers, min_size=1, max_size=6, unique=True))
    ys = draw(st.lists(probabilities, min_size=len(xs), max_size=len(xs)))
    return ScoreCalibration(
        temperature=draw(st.floats(0.05, 50)),
        signals=("top", "logit"),
        weights=(draw(st.floats(-3, 3)), draw(st.floats(-3, 3))),
        bias=draw(numbers),
        kind=kind,
        slope=draw(st.floats(0, 5)),
        intercept=draw(numbers),
        points=tuple(zip(sorted(xs), sorted(ys), strict=True)),
    )


@given(calibrations(), st.lists(numbers, min_size=1, max_size=12), numbers, st.integers(1, 12))
def test_probabilities_lie_in_the_unit_interval_and_keep_the_order(
    calibration: ScoreCalibration, scores: list[float], logit: float, front: int
) -> None:
    for some in (None, front):
        p = calibration.probabilities(scores, {"logit": logit}, front=some)
        assert all(0 <= value <= 1 for value in p)
        for (a, pa), (b, pb) in pairwise(sorted(zip(scores, p, strict=True))):
            assert pa <= pb or a == b
            # Whoever sorts by probability gets the order of the scores, also with 32-bit numbers.
            assert a == b or np.float32(pa) < np.float32(pb) or pb < 1e-30
    assert calibration.probabilities([], {"logit": logit}) == []


@given(calibrations(), st.lists(numbers, min_size=2, max_size=8), numbers, st.randoms())
def test_probabilities_do_not_depend_on_the_order_of_the_list(
    calibration: ScoreCalibration, scores: list[float], logit: float, rng: random.Random
) -> None:
    order = list(range(len(scores)))
    rng.shuffle(order)
    before = calibration.probabilities(scores, {"logit": logit})
    after = calibration.probabilities([scores[i] for i in order], {"logit": logit})
    assert after == pytest.approx([before[i] for i in order], abs=1e-9)


@given(calibrations())
def test_a_calibration_survives_json(calibration: ScoreCalibration) -> None:
    text = json.dumps(calibration.to_dict())
    assert ScoreCalibration.from_dict(json.loads(text)) == calibration


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"slope": -1.0},
        {"kind": "beta"},
        {"kind": "isotonic"},
        {"signals": ["top"]},
        {"points": [(0.0, 0.9), (1.0, 0.1)]},
        {"points": 3},
        {"warmth": 1.0},
    ],
)
def test_a_broken_calibration_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(CalibrationError, match="calibration of scores"):
        ScoreCalibration.from_dict(values)


# Which one is used.

SETTINGS = {"method": "radical", "scorer": "logits", "template": "abc"}


def known(*keeps: float, **other: str) -> list[dict[str, object]]:
    return [
        ScoreCalibration(temperature=1 + keep, settings={**SETTINGS, **other, "keep": keep}).to_dict()
        for keep in keeps
    ]


@pytest.mark.parametrize(
    ("keep", "used"), [(0.2, 0.2), (0.1, 0.1), (1.0, 1.0), (0.15, 0.2), (0.13, 0.1), (0.5, 1.0), (0.3, 0.2)]
)
def test_the_nearest_budget_that_was_fitted_is_used(keep: float, used: float) -> None:
    found = calibration_for(known(1.0, 0.2, 0.1), {**SETTINGS, "keep": keep})
    assert found is not None
    assert found.temperature == pytest.approx(1 + used)


def test_other_settings_have_no_calibration() -> None:
    fitted = known(1.0, 0.2)
    assert calibration_for(fitted, {**SETTINGS, "keep": 0.1}) is None
    assert calibration_for(fitted, {**SETTINGS, "keep": 0.2, "template": "other"}) is None
    assert calibration_for(fitted, {**SETTINGS, "keep": 0.2, "method": "fastv"}) is None
    assert calibration_for([], {**SETTINGS, "keep": 0.2}) is None
    assert calibration_for([ScoreCalibration().to_dict()], {**SETTINGS, "keep": 0.2}) is None
