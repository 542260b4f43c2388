"""Several orders of the candidates, the scores of a first stage, and results that are left out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radical_rerank import Backbone, Profile, PromptTemplate, Reranker, generated_list
from radical_rerank.embedded.scenes.datasets import scene_lists
from radical_rerank.errors import CalibrationError, InputError
from radical_rerank.pruning import RaDiCal
from radical_rerank.reranking import orders
from radical_rerank.reranking.safety import Observed, Safety, SecondOrder
from radical_rerank.reranking.scores import ScoreCalibration

numbers = st.floats(-1e6, 1e6, allow_nan=False)
log_probabilities = st.lists(st.floats(-40, 40), min_size=2, max_size=12).map(orders.log_softmax)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.from_pretrained("scenes")


# Orders.


@given(st.lists(st.text("abc", max_size=3), min_size=1, max_size=20), st.integers(1, 8), st.randoms())
def test_the_orders_depend_on_the_contents_alone(contents: list[str], count: int, rng: random.Random) -> None:
    drawn = orders.shuffles(contents, count)
    assert len(drawn) == min(count, len(contents))
    for order in drawn:
        assert sorted(order) == list(range(len(contents)))
    other = list(contents)
    rng.shuffle(other)
    again = orders.shuffles(other, count)
    assert [[other[i] for i in own] for own in again] == [[contents[i] for i in own] for own in drawn]


@given(st.integers(1, 30), st.integers(1, 10))
def test_every_candidate_stands_in_different_places_that_are_spread_evenly(size: int, count: int) -> None:
    drawn = orders.shuffles([str(i) for i in range(size)], count)
    for candidate in range(size):
        places = sorted(order.index(candidate) for order in drawn)
        gaps = [b - a for a, b in pairwise([*places, places[0] + size])]
        assert max(gaps) - min(gaps) <= 1


def test_averaged_scores_are_those_of_a_slow_version() -> None:
    drawn = [[2, 0, 1], [1, 2, 0]]
    scores = [[-0.1, -3.0, -4.0], [-2.0, -0.5, -1.5]]
    mean = {0: (-3.0 - 1.5) / 2, 1: (-4.0 - 2.0) / 2, 2: (-0.1 - 0.5) / 2}
    total = sum(math.exp(value) for value in mean.values())
    expected = [math.log(math.exp(mean[i]) / total) for i in range(3)]
    assert orders.averaged(drawn, scores) == pytest.approx(expected)


def test_with_several_orders_the_order_of_the_documents_does_not_matter(backbone: Backbone) -> None:
    query, images = generated_list(3, candidates=7)
    reranker = Reranker(backbone, keep=0.2, permutations=3)
    first = reranker.rank(query, images)
    encoded = reranker.vision_cache.misses
    for seed in range(3):
        order = list(range(len(images)))
        random.Random(seed).shuffle(order)
        again = reranker.rank(query, [images[i] for i in order])
        assert [order[i] for i in again.order] == first.order
        assert [r.score for r in again] == [r.score for r in first]
    assert encoded == len(images), "every picture is encoded once"
    assert reranker.vision_cache.misses == encoded
    assert first.totals.prompts == len(first.reports) == 3
    single = Reranker(backbone, keep=0.2).rank(query, images)
    assert first.totals.tokens == 3 * single.totals.tokens
    assert sum(math.exp(r.score) for r in first) == pytest.approx(1)


def test_one_order_is_what_it_was(backbone: Backbone) -> None:
    query, images = generated_list(4, candidates=6)
    plain = Reranker(backbone, keep=0.2)
    expected = [(r.index, r.score) for r in plain.rank(query, images)]
    several = Reranker(backbone, keep=0.2, permutations=4)
    assert [(r.index, r.score) for r in several.rank(query, images, permutations=1)] == expected
    assert plain.settings == Reranker(backbone, keep=0.2, permutations=1).settings
    assert plain.settings != several.settings


def test_several_orders_in_windows_and_in_batches(backbone: Backbone) -> None:
    lists = [generated_list(seed, candidates=n) for seed, n in ((1, 7), (2, 3), (3, 2))]
    reranker = Reranker(backbone, keep=0.5, window=4, stride=2, permutations=3)
    single = [reranker.rank(query, images) for query, images in lists]
    together = list(reranker.rank_many(lists, batch_size=3))
    assert [r.order for r in together] == [r.order for r in single]
    assert sorted(single[0].order) == list(range(7))
    assert len(single[0].reports) == 3 * 3  # three windows of four, each in three orders
    assert len(single[2].reports) == 2  # two candidates have two orders


def test_pointwise_the_order_never_matters(backbone: Backbone) -> None:
    template = {"pair": "{image}query: {query} answer:", "answers": [" yes", " no"]}
    query, images = generated_list(0, candidates=3)
    reranker = Reranker(backbone, keep=0.5, scorer="pointwise", template=template, permutations=4)
    assert reranker.rank(query, images).totals.prompts == 3


# A second order where the first is not sure.


def tuned(backbone: Backbone, threshold: float) -> Profile:
    """The profile of scenes, tuned so that a budget of 22.5% has this threshold: 15% and a third of 22.5%."""
    found = Profile.find(backbone.identity)
    assert found is not None
    seen = [Observed(threshold + place - 33, True, True) for place in range(100)]
    pair = Safety.of(seen, (0.15, 1.0), (0.15, 1.0))
    return replace(found, safety=(pair.to_dict(),))


@pytest.mark.parametrize("sure", [True, False])
def test_a_second_order_is_ranked_where_the_first_is_not_sure(backbone: Backbone, sure: bool) -> None:
    query, images = generated_list(3, candidates=8)
    profile = tuned(backbone, -10.0 if sure else 1000.0)
    auto = Reranker(backbone, RaDiCal(flops=0.225, profile=profile), permutations="auto")
    both = Reranker(backbone, keep=0.2, permutations=2).rank(query, images)
    first, second = (report.indices for report in both.reports)
    by_hand = []
    for flops, order in ((0.15, first), (0.225, second)):
        plain = Reranker(backbone, RaDiCal(flops=flops, profile=profile))
        ranking = plain.rank(query, [images[i] for i in order])
        by_hand.append([{r.index: r.score for r in ranking}[place] for place in range(len(images))])
    expected = orders.averaged([first], by_hand[:1]) if sure else orders.averaged([first, second], by_hand)
    ranking = auto.rank(query, images)
    assert {r.index: r.score for r in ranking} == pytest.approx(dict(enumerate(expected)), abs=1e-5)
    assert ranking.totals.prompts == (1 if sure else 2)
    other = auto.rank(query, images[::-1])
    assert [len(images) - 1 - i for i in other.order] == ranking.order
    together = list(auto.rank_many([(query, images), (query, images[:5])], batch_size=2))
    assert together[0].order == ranking.order
    assert [r.score for r in together[0]] == pytest.approx([r.score for r in ranking], abs=1e-4)
    assert len(together[0].reports) == len(ranking.reports)


def test_a_budget_is_divided_between_two_orders() -> None:
    margins = [Observed(float(place), True, True) for place in range(1000)]
    known = [Safety.of(margins, (c, 1.0), (c, 1.0)).to_dict() for c in (0.1, 0.15, 0.2)]
    for budget, first in ((0.2, 0.15), (0.15, 0.1), (0.3, 0.2), (0.9, 0.2)):
        found = SecondOrder.of(known, budget, "model")
        assert found.first == first
        again = sum(one.margin < found.threshold for one in margins) / len(margins)
        assert first + again * budget == pytest.approx(budget, abs=0.001)
    assert SecondOrder.of(known, 0.1, "model") == SecondOrder(0.1, 0.0)
    with pytest.raises(CalibrationError, match="radical tune model"):
        SecondOrder.of([], 0.2, "model")


def test_ranking_twice_does_not_look_cheaper_than_it_is(backbone: Backbone) -> None:
    query, images = generated_list(3, candidates=6)
    once = Reranker(backbone, keep=0.2).rank(query, images).totals
    twice = Reranker(backbone, keep=0.2, permutations=2).rank(query, images).totals
    assert 1 - twice.flops_saved == pytest.approx(2 * (1 - once.flops_saved))
    dense = Reranker(backbone, "dense", permutations=2).rank(query, images).totals
    assert dense.flops_saved == pytest.approx(-1)
    windows = Reranker(backbone, "dense", window=4, stride=2).rank(query, images).totals
    assert windows.prompts == 2
    assert windows.flops_saved == 0


@pytest.mark.slow
def test_two_orders_cost_the_budget_on_average(backbone: Backbone) -> None:
    auto = Reranker(backbone, flops=0.2, permutations="auto")
    data = scene_lists(lists=80, split="validation", seed=7)  # drawn like those of the tuning
    costs = [1 - ranking.totals.flops_saved for ranking in auto.rank_many(data.pairs())]
    assert sum(costs) / len(costs) == pytest.approx(0.2, rel=0.15)
    assert len({round(10 * cost) for cost in costs}) > 1, "some lists have one order, some two"


# The scores of a first stage.


@given(st.lists(numbers, min_size=1, max_size=20))
def test_standardised_scores_have_mean_0_and_deviation_1(values: list[float]) -> None:
    z = orders.standardised(values)
    if len(set(values)) < 2:
        assert z == [0.0] * len(values)
        return
    assert sum(z) == pytest.approx(0, abs=1e-6)
    assert sum(v * v for v in z) / len(z) == pytest.approx(1, abs=1e-6) or not any(z)
    for (a, za), (b, zb) in pairwise(sorted(zip(values, z, strict=True))):
        assert za <= zb or a == b


@given(log_probabilities, st.data(), st.booleans())
def test_no_weight_or_equal_scores_change_nothing(
    scores: list[float], data: st.DataObject, pointwise: bool
) -> None:
    prior = data.draw(st.lists(st.floats(-3, 3), min_size=len(scores), max_size=len(scores)))
    assert orders.mixed(scores, prior, 0.0, pointwise=pointwise) == scores
    assert orders.mixed(scores, [0.0] * len(scores), 0.7, pointwise=pointwise) == scores


@given(log_probabilities, st.data(), st.floats(0.01, 3))
def test_mixed_scores_are_those_of_the_formula(
    scores: list[float], data: st.DataObject, weight: float
) -> None:
    prior = data.draw(st.lists(st.floats(-3, 3), min_size=len(scores), max_size=len(scores)))
    got = orders.mixed(scores, prior, weight, pointwise=False)
    raw = [math.exp(s + weight * z) for s, z in zip(scores, prior, strict=True)]
    assert [math.exp(s) for s in got] == pytest.approx([value / sum(raw) for value in raw], abs=1e-9)
    pairs = orders.mixed(scores, prior, weight, pointwise=True)
    for s, z, new in zip(scores, prior, pairs, strict=True):
        p = math.exp(s)
        odds = math.inf if p == 1 else p / (1 - p) * math.exp(weight * z)
        assert math.exp(new) == pytest.approx(1.0 if odds == math.inf else odds / (1 + odds), abs=1e-6)


def test_a_first_stage_that_is_sure_wins_by_its_weight(backbone: Backbone) -> None:
    query, images = generated_list(5, candidates=6)
    reranker = Reranker(backbone, keep=0.2)
    plain = reranker.rank(query, images)
    last = plain.order[-1]
    scores = [1.0 if i == last else 0.0 for i in range(6)]
    assert reranker.rank(query, images, scores=scores, weight=50.0).order[0] == last
    same = reranker.rank(query, images, scores=scores, weight=0.0)
    assert [(r.index, r.score) for r in same] == [(r.index, r.score) for r in plain]
    equal = reranker.rank(query, images, scores=[3.0] * 6)
    assert [(r.index, r.score) for r in equal] == [(r.index, r.score) for r in plain]
    (many,) = reranker.rank_many([(query, images, scores)], weight=50.0)
    assert many.order[0] == last


def test_scores_follow_their_documents_when_one_is_skipped(backbone: Backbone) -> None:
    query, images = generated_list(6, candidates=4)
    reranker = Reranker(backbone, keep=0.2)
    expected = reranker.rank(query, images, scores=[0.0, 1.0, 2.0, 3.0], weight=1.0)
    documents: list[Any] = [images[0], b"broken", *images[1:]]
    got = reranker.rank(query, documents, scores=[0.0, 9.0, 1.0, 2.0, 3.0], weight=1.0, on_error="skip")
    assert [r.score for r in got] == [r.score for r in expected]
    assert [i - (i > 1) for i in got.order] == expected.order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": [1.0]}, "1 scores for 3 documents"),
        ({"scores": [1.0, math.nan, 2.0]}, "the score of document 1 is not finite"),
        ({"scores": [1.0, 2.0, 3.0], "weight": -1.0}, "weight must be at least 0"),
        ({"permutations": 0}, "permutations must be a whole number of at least 1"),
        ({"permutations": "many"}, "permutations must be a whole number of at least 1"),
        ({"permutations": "auto"}, "needs the method"),
        ({"min_probability": 1.5}, "min_probability must lie between 0 and 1"),
    ],
)
def test_wrong_arguments_are_named(backbone: Backbone, options: dict[str, object], message: str) -> None:
    query, images = generated_list(0, candidates=3)
    with pytest.raises(InputError, match=message):
        Reranker(backbone, keep=0.5).rank(query, images, **options)  # type: ignore[arg-type]


# Probabilities.


def fitted(reranker: Reranker, **values: object) -> Reranker:
    """Return the reranker with a calibration of its own."""
    one = ScoreCalibration(settings=reranker.score_settings, **values)  # type: ignore[arg-type]
    profile = reranker.profile
    assert profile is not None
    pruner = reranker.pruner.with_profile(Profile(**{**vars(profile), "scores": (one.to_dict(),)}))
    return Reranker(reranker.backbone, pruner)


@pytest.fixture(scope="module")
def calibrated(backbone: Backbone) -> Reranker:
    reranker = Reranker(backbone, keep=0.3)
    reranker.prepare()
    return fitted(reranker, temperature=4.0, signals=("logit",), weights=(0.5,), bias=-5.0, weight=40.0)


def test_a_fitted_calibration_gives_the_probabilities_and_never_the_order(calibrated: Reranker) -> None:
    query, images = generated_list(7, candidates=6)
    raw = Reranker(calibrated.backbone, keep=0.3).rank(query, images)
    ranking = calibrated.rank(query, images)
    calibration = calibrated.calibration
    assert calibration is not None
    assert ranking.calibrated
    expected = calibration.probabilities([r.score for r in ranking], ranking.signals)
    assert [r.probability for r in ranking] == expected
    assert ranking.order == raw.order
    assert ranking.confidence == ranking[0].probability == max(r.probability for r in ranking)
    assert ranking.to_dict()["confidence"] == ranking.confidence
    assert ranking.to_dict()["calibrated"] is True
    assert ranking.to_dict()["results"][0]["probability"] == ranking[0].probability


def test_another_setting_has_no_calibration(calibrated: Reranker) -> None:
    query, images = generated_list(7, candidates=6)
    other = Reranker(calibrated.backbone, type(calibrated.pruner)(keep=0.05))
    ranking = other.rank(query, images)
    assert other.calibration is None
    assert not ranking.calibrated
    matched = 1 / (1 + math.exp(-ranking.signals["match"]))  # the model can answer that nothing fits
    assert ranking[0].probability == pytest.approx(matched * math.exp(ranking[0].score))
    assert ranking.confidence == ranking[0].probability


def test_results_below_the_least_probability_are_left_out(calibrated: Reranker) -> None:
    query, images = generated_list(8, candidates=6)
    ranking = calibrated.rank(query, images)
    least = ranking[2].probability
    some = calibrated.rank(query, images, min_probability=least)
    assert some.order == [r.index for r in ranking if r.probability >= least]
    assert calibrated.rank(query, images, min_probability=least, top_k=1).order == ranking.order[:1]
    nothing = calibrated.rank(query, images, min_probability=1.0)
    assert len(nothing) == 0
    assert nothing.confidence == ranking.confidence


def test_the_fitted_weight_is_the_default(calibrated: Reranker) -> None:
    query, images = generated_list(9, candidates=6)
    last = calibrated.rank(query, images).order[-1]
    scores = [float(i == last) for i in range(6)]
    assert calibrated.rank(query, images, scores=scores).order[0] == last
    plain = Reranker(calibrated.backbone, keep=0.05).rank(query, images, scores=scores)
    same = Reranker(calibrated.backbone, keep=0.05).rank(query, images, scores=scores, weight=0.2)
    assert [r.score for r in plain] == [r.score for r in same]


def test_an_empty_list_has_no_confidence(calibrated: Reranker) -> None:
    assert calibrated.rank("a red star", []).confidence == 0.0


def test_a_template_may_offer_the_answer_none_of_them(backbone: Backbone) -> None:
    query, images = generated_list(10, candidates=5)
    words = {
        name: value
        for name, value in vars(PromptTemplate.of(backbone)).items()
        if value is not None and name not in ("window", "none")
    }
    plain = Reranker(backbone, "dense", template={**words, "window": 19})
    asked = Reranker(backbone, "dense", template={**words, "window": 19, "none": " no"})
    without, ranking = plain.rank(query, images), asked.rank(query, images)
    assert [r.score for r in ranking] == [r.score for r in without]
    assert not ranking.calibrated
    assert "match" not in without.signals
    # By hand: the softmax over the identifiers and "no".
    some = 1 / (1 + math.exp(-ranking.signals["match"]))
    assert ranking.confidence == pytest.approx(some * math.exp(ranking[0].score))
    assert sum(r.probability for r in ranking) == pytest.approx(some)


def test_a_single_document_is_judged_if_the_model_may_say_that_nothing_fits(backbone: Backbone) -> None:
    reranker = Reranker(backbone, keep=0.2)
    data = scene_lists(lists=4, split="validation", seed=3)
    fits, other = [], []
    for task in data.tasks:
        names = task.candidates or ()
        match = next(name for name in names if name in task.relevant)
        wrong = next(name for name in names if name not in task.relevant)
        found = [reranker.rank(task.text, [data.document(name)]) for name in (match, wrong)]
        assert all(one.order == [0] and one[0].score == 0.0 for one in found)
        assert all(one.calibrated and one.totals.prompts == 1 for one in found)
        fits.append(found[0].confidence)
        other.append(found[1].confidence)
        assert not reranker.rank(task.text, [data.document(wrong)], min_probability=0.3)
    assert sum(fits) / len(fits) > 0.3
    assert max(other) < 0.1


@pytest.mark.filterwarnings("ignore:a list of")  # one picture: the text alone costs more
@pytest.mark.parametrize("options", [{"flops": 0.3, "permutations": "auto"}, {"agreement": 0.95}])
def test_a_single_document_has_no_rival(backbone: Backbone, options: dict[str, Any]) -> None:
    query, images = generated_list(0, candidates=2)
    ranking = Reranker(backbone, **options).rank(query, images[:1])
    assert (ranking.order, ranking.totals.prompts) == ([0], 1)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_the_signals_are_those_of_the_logits(seed: int) -> None:
    reranker = Reranker("scenes", "dense")
    query, images = generated_list(seed, candidates=3)
    signals = reranker.rank(query, images).signals
    assert signals["mass"] <= 1e-6
    assert math.isfinite(signals["logit"])
