"""Tuning without labels: schedules are compared by KL to Dense, at the cost that was asked for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from radical_rerank import Reranker, generated_list
from radical_rerank.cli import main
from radical_rerank.errors import InputError
from radical_rerank.method import Schedule
from radical_rerank.pruning import Look, Profile, RaDiCal, TunedSchedule
from radical_rerank.reranking import tuning
from radical_rerank.reranking.tuning import Ranked, Tuner, divergence


@pytest.fixture(scope="module")
def tuner() -> Tuner:
    reranker = Reranker("scenes")
    found = Profile.find(reranker.backbone.identity)
    assert found is not None
    profile = replace(found, schedules=(), safety=())
    return Tuner(reranker, [generated_list(seed, 5, split="validation") for seed in range(3)], profile)


def test_kl_is_zero_for_dense_and_positive_otherwise(tuner: Tuner) -> None:
    dense = tuner.dense()
    assert [divergence(one, one) for one in dense] == [0.0] * len(dense)
    p, q = [math.log(0.7), math.log(0.3)], [math.log(0.5), math.log(0.5)]
    expected = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    assert divergence(Ranked(p, 1), Ranked(q, 1)) == pytest.approx(expected)
    everything = tuner.measure(TunedSchedule(1.0, (3,), (1.0,)))
    assert everything.kl == pytest.approx(0, abs=1e-6)
    assert everything.agreement == 1


@pytest.mark.slow
def test_a_search_is_no_worse_than_the_plan(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FIRST_LOOK", 3)
    monkeypatch.setattr(tuning, "BEAM", 1)
    known = TunedSchedule(0.2, (1, 5, 9), (0.5, 0.8, 1.0))
    found = tuner.search(0.3, known=[known])
    planned = tuner.profile.schedule(0.3, tuner.shape.num_layers)
    plan = tuner.measure(TunedSchedule(0.3, planned.layers, planned.exponents))
    assert found.kl <= plan.kl + 1e-9
    assert found.kl <= tuner.measure(replace(known, flops=0.3)).kl + 1e-9
    dense = sum(one.cost for one in tuner.dense())
    cost = sum(one.cost for one in tuner.rank(tuner.pruner(found)))
    assert cost / dense == pytest.approx(0.3, rel=0.03)
    with_nucleus = tuner.nucleus(found)
    pruner = RaDiCal(flops=0.3, nucleus="auto", profile=replace(tuner.profile, schedules=(with_nucleus,)))
    cost = sum(one.cost for one in tuner.rank(pruner))
    assert cost / dense == pytest.approx(0.3, rel=0.05)
    (pair,) = tuner.safety([found])
    assert (pair.small, pair.large, pair.large_wrong) == (0.3, 1.0, 0)
    assert len(pair.margins) == 3


def test_longer_schedules_keep_their_order() -> None:
    for one in tuning._longer(Schedule((2, 6), (0.5, 1.0)), range(12)):
        assert len(one.layers) == 3
        assert list(one.layers) == sorted(one.layers)
        assert list(one.exponents) == sorted(one.exponents)
        assert one.exponents[-1] == 1.0


def test_one_list_is_not_enough(tuner: Tuner) -> None:
    with pytest.raises(InputError, match="two lists"):
        Tuner(tuner.reranker, tuner.lists[:1], tuner.profile)


def test_a_profile_keeps_its_schedules(tuner: Tuner, tmp_path: Path) -> None:
    schedules = (TunedSchedule(0.2, (0, 2), (0.4, 1.0), 0.9, 0.01, 0.98, 32),)
    profile = replace(tuner.profile, schedules=schedules, safety=({"small": 0.1},))
    loaded = Profile.load(profile.save(tmp_path / "profile.json"))
    tuned = loaded.tuned(0.3)
    assert tuned is not None
    assert tuned.schedule == schedules[0].schedule
    assert loaded.safety == profile.safety


@pytest.mark.slow
def test_the_promise_can_be_made_again_alone(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    with pytest.raises(SystemExit) as done:
        main(["tune", "scenes", "--promise-only", "--promise", "3", "--out", str(out)])
    assert done.value.code == 0
    shipped, profile = Profile.find(Reranker("scenes").backbone.identity), Profile.load(out)
    assert shipped is not None
    assert profile.schedules == shipped.schedules
    assert {len(one["margins"]) for one in profile.safety} == {3}
    for wrong in (["--flops", "0.3"], ["--promise", "0"]):
        with pytest.raises(SystemExit) as done:
            main(["tune", "scenes", "--promise-only", *wrong, "--out", str(out)])
        assert done.value.code != 0


@pytest.mark.slow
def test_the_command_tunes_and_the_profile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "MOST_LAYERS", 1)
    monkeypatch.setattr(tuning, "BEAM", 1)
    out = tmp_path / "profile.json"
    options = ["--limit", "2", "--promise", "3", "--flops", "0.3", "--out", str(out), "--json"]
    with pytest.raises(SystemExit) as done:
        main(["tune", "scenes", *options])
    assert done.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    profile = Profile.load(out)
    tuned = profile.tuned(0.3)
    assert tuned is not None
    assert tuned.lists == 2
    assert [one["layers"] for one in printed["schedules"] if one["flops"] == 0.3] == [list(tuned.layers)]
    assert {one["small"] for one in profile.safety} == {one.flops for one in profile.schedules}
    shipped = Profile.find(Reranker("scenes").backbone.identity)
    assert shipped is not None
    others = [one for one in shipped.schedules if one.flops != 0.3]
    assert others
    assert [one for one in profile.schedules if one.flops != 0.3] == others
    query, images = generated_list(1, 6)
    report = Reranker("scenes", RaDiCal(flops=0.3, profile=profile)).rank(query, images).report
    assert report is not None
    assert [stage.layer for stage in report.stages] == list(tuned.layers)


def test_the_model_of_photographs_is_not_tuned_on_scenes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["tune", "photos"])
    assert done.value.code != 0
    assert "--data" in capsys.readouterr().err


@pytest.mark.slow
def test_a_kill_loses_no_schedule_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "MOST_LAYERS", 1)
    monkeypatch.setattr(tuning, "BEAM", 1)
    monkeypatch.setattr(Tuner, "safety", killed)
    out = tmp_path / "profile.json"
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        main(["tune", "scenes", "--limit", "2", "--promise", "3", "--flops", "0.3", "--out", str(out)])
    shipped, profile = Profile.find(Reranker("scenes").backbone.identity), Profile.load(out)
    assert shipped is not None
    tuned = profile.tuned(0.3)
    assert tuned is not None
    assert tuned.lists == 2
    assert [one.flops for one in profile.schedules] == [one.flops for one in shipped.schedules]
    # What was seen of the others still holds; of the new schedule nothing is known.
    assert profile.safety == tuple(one for one in shipped.safety if 0.3 not in (one["small"], one["large"]))


def test_a_budget_uses_the_relevance_that_was_tuned(tuner: Tuner) -> None:
    def survivors(pruner: RaDiCal) -> list[list[int]]:
        query, images = tuner.lists[0]
        report = tuner.reranker.with_pruner(pruner).rank(query, images).report
        assert report is not None
        return report.stages[-1].survivors

    by_relevance = {}
    for relevance in ("mean", "words"):
        one = TunedSchedule(0.25, (0,), (1.0,), relevance=relevance)
        by_relevance[relevance] = survivors(tuner.pruner(one, alpha=1.0))
        given = RaDiCal(flops=0.25, layers=(0,), alpha=1.0, relevance=relevance, profile=tuner.profile)
        assert survivors(given) == by_relevance[relevance]
        assert survivors(replace(tuner.pruner(one, alpha=1.0), relevance="mean")) == by_relevance["mean"]
    assert by_relevance["mean"] != by_relevance["words"]
    with pytest.raises(InputError, match="mean, words"):
        RaDiCal(relevance="letters")


def test_pairs_share_a_budget_by_words_too(tuner: Tuner) -> None:
    vision = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.7, 0.7], [0.7, -0.7]])
    words = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    look = Look(vision, torch.tensor([0, 0, 1, 1]), words.mean(dim=0), 2, words)
    pruner = RaDiCal(keep=0.5, layers=(1,), alpha=1.0, least=0.0, prior="relevance")
    stages = pruner.stages(4)
    by_mean, by_words = (
        replace(pruner, relevance=relevance).pool(lambda: look, stages) for relevance in ("mean", "words")
    )
    assert by_mean is not None
    assert by_words is not None
    assert [list(share.counts.values()) for share in by_mean] == [[1], [1]]
    assert [list(share.counts.values()) for share in by_words] == [[2], [0]]
