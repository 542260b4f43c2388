"""Budgets in the user's terms: what is asked for is what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radical_rerank import PruningReport, Ranking, Reranker, generated_list
from radical_rerank.backbones import Backbone
from radical_rerank.errors import CalibrationError, InputError
from radical_rerank.pruning import Profile, RaDiCal, TunedSchedule
from radical_rerank.reranking.budget import CHEAPEST, Pace
from radical_rerank.reranking.safety import Observed, Safety, margin


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Reranker("scenes").backbone


@pytest.fixture(scope="module")
def profile(backbone: Backbone) -> Profile:
    found = Profile.find(backbone.identity)
    assert found is not None
    return replace(found, schedules=(), safety=())


def report_of(ranking: Ranking) -> PruningReport:
    assert ranking.report is not None
    return ranking.report


@pytest.mark.parametrize("flops", [0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.9])
@pytest.mark.parametrize("candidates", [10, 20])
def test_a_list_costs_what_was_asked(
    backbone: Backbone, profile: Profile, flops: float, candidates: int
) -> None:
    query, images = generated_list(3, candidates)
    for pruner in (RaDiCal(flops=flops, profile=profile), RaDiCal(flops=flops)):
        report = report_of(Reranker(backbone, pruner).rank(query, images))
        assert 1 - report.flops_saved == pytest.approx(flops, rel=0.03)
        assert report.keep == report.visual_tokens_left / report.visual_tokens


def test_a_budget_below_reach_is_not_missed_in_silence(backbone: Backbone, profile: Profile) -> None:
    query, images = generated_list(3, 5)
    with pytest.warns(UserWarning, match="only 1 visual"):
        report = report_of(Reranker(backbone, RaDiCal(flops=0.05, profile=profile)).rank(query, images))
    assert report.visual_tokens_left == 1
    assert 1 - report.flops_saved > 0.05


def test_a_speedup_is_a_part_of_the_arithmetic(backbone: Backbone) -> None:
    query, images = generated_list(3, 10)
    half, speedup = Reranker(backbone, flops=0.5), Reranker(backbone, speedup=2.0)
    assert report_of(half.rank(query, images)).macs == report_of(speedup.rank(query, images)).macs


def test_a_latency_becomes_what_is_left_after_encoding(backbone: Backbone) -> None:
    query, images = generated_list(3, 10)
    reranker = Reranker(backbone, latency=100.0)
    assert report_of(reranker.rank(query, images)).flops_saved < 0.01  # there is time for everything
    query, images = generated_list(3, 20)
    reranker = Reranker(backbone, latency=1e-6)
    with pytest.warns(UserWarning, match="are left"):  # the text alone costs more
        report = report_of(reranker.rank(query, images))
    assert 1 - report.flops_saved < 2 * CHEAPEST
    pace = Pace(fixed=0.1, rate=1e-9)
    assert pace.flops(0.6, 1e9) == pytest.approx(0.5)
    assert pace.flops(5.0, 1e9) == 1.0
    assert pace.flops(0.0, 1e9) == CHEAPEST


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"speedup": 0.5}, "speedup"),
        ({"flops": 0.0}, "flops"),
        ({"flops": 1.5}, "flops"),
        ({"latency": -1.0}, "latency"),
        ({"latency": float("nan")}, "latency"),
        ({"agreement": 1.0}, "agreement"),
        ({"keep": 0.2, "flops": 0.2}, "keep and flops"),
        ({"method": "fastv", "flops": 0.2}, "radical"),
    ],
)
def test_a_wrong_budget_is_an_error_before_a_model_is_loaded(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Reranker("no-such-model", **options)


def test_batches_of_lists_with_a_budget_are_the_same_as_single_lists(backbone: Backbone) -> None:
    lists = [generated_list(seed, count) for seed, count in ((0, 4), (1, 9), (2, 6))]
    reranker = Reranker(backbone, flops=0.3)
    together = list(reranker.rank_many(lists, batch_size=3))
    for one, (query, images) in zip(together, lists, strict=True):
        alone = reranker.rank(query, images)
        assert one.order == alone.order
        assert [r.score for r in one] == pytest.approx([r.score for r in alone], abs=1e-4)
        assert report_of(one).macs == report_of(alone).macs


def test_a_tuned_schedule_is_used(backbone: Backbone, profile: Profile) -> None:
    query, images = generated_list(3, 10)
    tuned = TunedSchedule(0.2, (0, 2), (0.4, 1.0))
    pruner = RaDiCal(flops=0.25, profile=replace(profile, schedules=(tuned,)))
    report = report_of(Reranker(backbone, pruner).rank(query, images))
    assert [stage.layer for stage in report.stages] == [0, 2]
    assert 1 - report.flops_saved == pytest.approx(0.25, rel=0.03)


def test_a_nucleus_costs_less_where_few_tokens_hold_the_score(backbone: Backbone, profile: Profile) -> None:
    query, images = generated_list(3, 10)
    costs = [
        report_of(
            Reranker(backbone, RaDiCal(flops=0.2, nucleus=share, profile=profile)).rank(query, images)
        ).macs
        for share in (0.5, 0.9, 0.99, 1.0)
    ]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
    with pytest.raises(InputError, match="flops"):
        RaDiCal(nucleus="auto")
    with pytest.raises(CalibrationError, match="radical tune"):
        Reranker(backbone, RaDiCal(flops=0.2, nucleus="auto", profile=profile)).rank(query, images)


def promised(threshold_at: float) -> dict[str, Any]:
    """Two schedules, and lists of which those with a smaller margin went wrong."""
    seen = [Observed(i / 100, i / 100 >= threshold_at, True) for i in range(1000)]
    return Safety.of(seen, (0.15, 0.5), (0.15, 0.5)).to_dict()


def test_a_list_below_the_margin_is_ranked_again(backbone: Backbone, profile: Profile) -> None:
    query, images = generated_list(3, 10)
    for at, again in ((0.1, False), (9.9, True)):
        reranker = Reranker(backbone, agreement=0.99)
        reranker.pruner = RaDiCal(flops=0.15, profile=replace(profile, safety=(promised(at),)))
        first = Reranker(backbone, RaDiCal(flops=0.15, profile=profile)).rank(query, images)
        far = margin([r.score for r in first])
        assert 0.1 < far < 9.5, "choose another list"
        ranking = reranker.rank(query, images)
        assert len(ranking.reports) == 1 + again
        assert ranking.agreement == 0.99
        assert ranking.to_dict()["agreement"] == 0.99
        large = Reranker(backbone, RaDiCal(flops=0.5, profile=profile)).rank(query, images)
        expected = large if again else first
        assert [r.score for r in ranking] == [r.score for r in expected]


def test_an_agreement_needs_a_tuned_profile(backbone: Backbone, profile: Profile) -> None:
    query, images = generated_list(3, 4)
    reranker = Reranker(backbone, agreement=0.99)
    reranker.pruner = RaDiCal(profile=profile)
    with pytest.raises(CalibrationError, match="radical tune"):
        reranker.rank(query, images)
