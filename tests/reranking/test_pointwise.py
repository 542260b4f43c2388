"""Pointwise: each image alone with the query, and one budget of visual tokens for the whole list."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from radical_rerank import METHODS, PromptTemplate, Query, RaDiCal, Reranker, build
from radical_rerank.backbones import Backbone, ImageFeatures, Pixels
from radical_rerank.errors import InputError, LayoutError
from radical_rerank.method import allot
from radical_rerank.pruning import Look, Stage
from radical_rerank.pruning.base import list_counts
from radical_rerank.reranking.prompt import Prompt, build_pair
from tests.cases import LAYERS, PROFILE, Case, draw_list, first_fast
from tests.reference import Look as SlowLook
from tests.reference import Reference, normalised, places, text_averaged
from tests.reranking.pairs import stock_inputs
from tests.tiny import TINY_FAMILIES

PRESET = "qwen3-vl-reranker"


def pictures(seed: int, count: int) -> tuple[str, list[Image.Image]]:
    """A query and images of different sizes."""
    query, images = draw_list(seed, count)
    return query, [image.resize((48 + 16 * (i % 4), 64 + 16 * (i % 3))) for i, image in enumerate(images)]


def survivors(reranker: Reranker, query: str | Query, images: Sequence[Image.Image]) -> list[list[list[int]]]:
    report = reranker.rank(query, images).report
    assert report is not None
    return [stage.survivors for stage in report.stages]


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_every_family_judges_pairs(family: str, backbones: Mapping[str, Backbone]) -> None:
    """One budget over the list, in batches of any size; with everything kept, the dense model's scores."""
    backbone = backbones[family]
    query, images = pictures(2, 4)
    layers = backbone.family.readable[-2:]
    template = replace(PromptTemplate.of(backbone), answers=("A", "B"))  # words of the tiny tokenizer
    options: dict[str, Any] = {"scorer": "pointwise", "max_image_tokens": 64, "template": template}

    def scores(pruner: Any, batch: int) -> tuple[dict[int, float], Any]:
        ranking = Reranker(backbone, pruner, pair_batch=batch, **options).rank(query, images)
        return {result.index: result.score for result in ranking}, ranking.report

    dense, _ = scores("dense", 4)
    whole, _ = scores(RaDiCal(keep=1, layers=layers, alpha=0.5), 4)
    assert whole == pytest.approx(dense, abs=1e-5)
    reports = [scores(RaDiCal(keep=0.3, layers=layers, alpha=0.5), batch) for batch in (1, 3, 4)]
    for own, report in reports:
        assert report.visual_tokens_left == math.ceil(round(0.3 * report.visual_tokens, 9))
        assert own == pytest.approx(reports[0][0], abs=1e-4)
        assert report.stages[-1].survivors == reports[0][1].stages[-1].survivors


# The budget.


@st.composite
def looks(draw: st.DrawFn) -> Look:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    vision = torch.randn(sum(sizes), 6, generator=rng)
    if draw(st.booleans()):
        vision = vision.round()  # many equal tokens
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Look(vision, owner, torch.randn(6, generator=rng))


@given(looks(), st.floats(0.01, 1), st.integers(1, 5), st.floats(0, 1))
def test_one_budget_is_spent_over_the_list(look: Look, keep: float, stages: int, least: float) -> None:
    pruner = RaDiCal(keep=keep, layers=range(stages), alpha=0.5, least=least)
    steps = pruner.stages(8)
    shares = pruner.pool(lambda: look, steps)
    assert shares is not None
    total, sizes = len(look.vision), look.candidate_of.bincount().tolist()
    before = sizes
    for number, step in enumerate(steps, start=1):
        counts = [share.counts[step] for share in shares]
        assert sum(counts) == math.ceil(round(keep ** (number / stages) * total, 9))
        assert all(0 <= now <= then for now, then in zip(counts, before, strict=True))
        before = counts
    budget = math.ceil(round(keep * total, 9))
    assert sum(before) == budget
    for count, size in zip(before, sizes, strict=True):
        assert count >= math.floor(least * budget * size / total)
    assert torch.equal(torch.cat([share.prior for share in shares]), pruner_prior(look))


def pruner_prior(look: Look) -> torch.Tensor:
    """CCU against the mean of all candidates, times the cosine to the query; alone, the cosine."""
    from radical_rerank.method import discriminative_importance, query_relevance

    if len(look.candidate_of.unique()) == 1:
        return query_relevance(look.vision, look.query_embedding, signed=True)
    return discriminative_importance(look.vision, look.query_embedding, look.candidate_of, signed=True)


def slow_allotment(
    prior: list[float], owner: list[int], counts: list[int], least: list[int]
) -> list[list[int]]:
    """Candidate by candidate and token by token."""
    by_prior = sorted(range(len(prior)), key=lambda i: -prior[i])
    reserved = [i for k in range(len(least)) for i in [j for j in by_prior if owner[j] == k][: least[k]]]
    order = reserved + [i for i in by_prior if i not in reserved]
    return [[sum(owner[i] == k for i in order[:count]) for k in range(len(least))] for count in counts]


@given(looks(), st.data())
def test_tokens_are_allotted_as_the_slow_version_does(look: Look, data: st.DataObject) -> None:
    sizes = look.candidate_of.bincount().tolist()
    prior = look.vision[:, 0]
    least = [data.draw(st.integers(0, size)) for size in sizes]
    counts = [data.draw(st.integers(sum(least), len(prior))) for _ in range(3)]
    allotted = allot(prior, look.candidate_of, counts, torch.tensor(least))
    assert allotted == slow_allotment(prior.tolist(), look.candidate_of.tolist(), counts, least)


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=5), st.integers(0, 500), st.booleans())
def test_a_list_s_counts_never_grow(keeps: list[float], tokens: int, of_all: bool) -> None:
    counts = list_counts([Stage(i, keep, of_all=of_all) for i, keep in enumerate(keeps)], tokens)
    assert counts == sorted(counts, reverse=True)
    share = keeps[-1] if of_all and len(keeps) == 1 else math.prod(keeps)
    if not of_all and tokens:
        assert counts[-1] == max(1, math.ceil(round(share * tokens, 9)))


def test_a_hopeless_candidate_gets_few_tokens_and_a_near_miss_many(judge: Backbone) -> None:
    """Two candidates: one as all others but for a token that fits the query, one that fits nowhere."""
    query = torch.tensor([1.0, 0.0, 0.0])
    common, fitting, unfit = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 0.2, 0.0]), -query
    vision = torch.stack([common] * 6 + [fitting] * 6 + [unfit] * 12 + [common] * 12)
    owner = torch.tensor([0] * 12 + [1] * 12 + [2] * 12)
    stages = [Stage(1, 0.25)]
    free = RaDiCal(keep=0.25, layers=(1,), alpha=0.5, least=0).pool(
        lambda: Look(vision, owner, query), stages
    )
    fair = RaDiCal(keep=0.25, layers=(1,), alpha=0.5, least=0.5).pool(
        lambda: Look(vision, owner, query), stages
    )
    even = RaDiCal(keep=0.25, layers=(1,), alpha=0.5, least=1).pool(
        lambda: Look(vision, owner, query), stages
    )
    assert free is not None
    assert fair is not None
    assert even is not None
    assert free[1].counts[stages[0]] == 0
    assert free[0].counts[stages[0]] > free[2].counts[stages[0]]
    assert fair[1].counts[stages[0]] == 1
    assert [share.counts[stages[0]] for share in even] == [3, 3, 3]
    with pytest.raises(InputError, match=r"least must lie in \[0, 1\]"):
        RaDiCal(least=2)


@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_a_list_keeps_exactly_its_budget_at_every_stage(judge: Backbone, keep: float) -> None:
    query, images = pictures(1, 7)
    reranker = Reranker(judge, "radical", keep=keep, profile=PROFILE, preset=PRESET)
    ranking = reranker.rank(query, images)
    report = ranking.report
    assert report is not None
    assert (report.prompts, ranking.totals.prompts, len(ranking.reports)) == (7, 7, 1)
    assert report.indices == list(range(7))
    sizes = [judge.count_tokens(image, 1800) for image in images]
    assert report.visual_tokens == sum(sizes)
    alive = report.visual_tokens
    for number, stage in enumerate(report.stages, start=1):
        assert stage.before == alive
        alive = math.ceil(round(keep ** (number / 4) * sum(sizes), 9))
        assert (stage.after, sum(map(len, stage.survivors))) == (alive, alive)
        assert stage.alpha == PROFILE.alpha_at(stage.layer)
    assert report.visual_tokens_left == math.ceil(round(keep * sum(sizes), 9))
    assert len({len(own) for own in report.stages[-1].survivors}) > 1  # not an even split
    text = report.tokens - report.visual_tokens
    assert report.tokens_per_layer[-1] == text + report.visual_tokens_left
    assert 0 < report.kv_saved < report.flops_saved < 1
    assert [sum(b.rows * b.columns for b in own) for own in report.blocks] == sizes


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_any_split_into_batches_gives_the_same_survivors_and_scores(judge: Backbone, least: float) -> None:
    query, images = pictures(2, 7)
    pruner = RaDiCal(keep=0.15, profile=PROFILE, least=least)
    outcomes = {}
    for together in (1, 3, 7):
        ranking = Reranker(judge, pruner, preset=PRESET, pair_batch=together).rank(query, images)
        assert ranking.report is not None
        outcomes[together] = (
            [stage.survivors for stage in ranking.report.stages],
            {result.index: result.score for result in ranking},
        )
    for other in (3, 7):
        assert outcomes[other][0] == outcomes[1][0]
        assert outcomes[other][1] == pytest.approx(outcomes[1][1], abs=1e-4)
    # Nor does it matter which other lists run at the same time.
    reranker = Reranker(judge, pruner, preset=PRESET, pair_batch=4)
    lists = [(query, images), ("a blue star", images[:3]), ("red", []), (query, images[:1])]
    for (words, own), ranking in zip(lists, reranker.rank_many(lists, batch_size=4), strict=True):
        alone = reranker.rank(words, own)
        assert alone.order == ranking.order
        assert [s.survivors for r in alone.reports for s in r.stages] == [
            s.survivors for r in ranking.reports for s in r.stages
        ]


def test_with_the_prior_alone_the_list_s_best_tokens_survive(judge: Backbone) -> None:
    """Whatever prompt they are in: the same tokens as in one prompt of the whole list."""
    query, images = pictures(3, 5)
    pruner = RaDiCal(keep=0.2, layers=(1, 4), alpha=1, least=0)
    kept = survivors(Reranker(judge, pruner, preset=PRESET), query, images)
    prior = list_prior(judge, PRESET, query, images)
    owners = [(k, i) for k, own in enumerate(prior) for i in range(len(own))]
    flat = [value for own in prior for value in own]
    best = sorted(range(len(flat)), key=lambda i: -flat[i])[: math.ceil(0.2 * len(flat))]
    assert sorted((k, i) for k, own in enumerate(kept[-1]) for i in own) == sorted(owners[i] for i in best)


def list_prior(
    backbone: Backbone, preset: str, query: str, images: Sequence[Image.Image]
) -> list[list[float]]:
    """CCU · cos of every token, against all candidates of the list, written out; per candidate."""
    features = backbone.encode([backbone.preprocess(image, 1800) for image in images])
    reranker = Reranker(backbone, "dense", preset=preset)
    prompt = build_pair(backbone, reranker.template, query, len(features[0].tokens))
    with torch.no_grad():
        words = backbone.model.get_input_embeddings()(torch.tensor(prompt.ids)[list(prompt.layout.query)])
    q = words.mean(0)
    mean = torch.cat([feature.tokens for feature in features]).mean(0)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    return [[(1 - cosine(t, mean)) * cosine(t, q) for t in feature.tokens] for feature in features]


# Against the slow reference.


def pool_rule(raw: list[float], alpha: dict[int, float]) -> Any:
    """The paper's fusion within one prompt, with a prior that was compared with the whole list."""

    def rule(look: SlowLook) -> list[tuple[float, ...]]:
        a, p = alpha[look.layer], text_averaged(look)
        if a == 0:
            return [(x,) for x in p]
        d = normalised([max(x, 0) for x in raw])
        info = [max(x * math.log(len(p) * x), 0) if x > 0 else 0.0 for x in p]
        s = normalised(info) if max(info) > 0 else [1 / len(p)] * len(p)
        fused = [max(d[t], 1e-6) ** a * max(s[i], 1e-6) ** (1 - a) for i, t in enumerate(look.alive)]
        ties = zip(places([raw[t] for t in look.alive]), places(p), strict=True)
        return [(float(f"{f:.6g}"), a * x + (1 - a) * y) for f, (x, y) in zip(fused, ties, strict=True)]

    return rule


@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "qwen2_5_vl"]))
@pytest.mark.parametrize("preset", first_fast([PRESET, "monoqwen2-vl"]))
def test_pruned_scores_equal_the_slow_reference(family: str, preset: str, pairs: dict[str, Backbone]) -> None:
    """Allotted, fused and run again by slow code: the survivors and the score of every pair."""
    backbone, layers, keep, least = pairs[family], (1, 3, 5), 0.2, 0.5
    query, images = pictures(4, 4)
    pruner = RaDiCal(keep=keep, layers=layers, profile=PROFILE, least=least)
    reranker = Reranker(backbone, pruner, preset=preset)
    ranking = reranker.rank(query, images)
    assert ranking.report is not None
    kept = [stage.survivors for stage in ranking.report.stages]
    scores = {result.index: result.score for result in ranking}

    prior = list_prior(backbone, preset, query, images)
    flat = [value for own in prior for value in own]
    owner = [k for k, own in enumerate(prior) for _ in own]
    counts = [math.ceil(round(keep ** ((h + 1) / 3) * len(flat), 9)) for h in range(3)]
    floors = [math.floor(least * counts[-1] * len(own) / len(flat)) for own in prior]
    allotted = slow_allotment(flat, owner, counts, floors)
    alpha = {layer: PROFILE.alpha_at(layer) for layer in layers}
    for k, image in enumerate(images):
        prompt = build_pair(backbone, reranker.template, query, len(prior[k]))
        case = Case(stock_inputs(backbone, prompt, [image], 1800), prompt.layout, [len(prior[k])])
        alive = [len(prior[k]), *(own[k] for own in allotted)]
        stages = [(layer, "before", alive[h + 1] / alive[h]) for h, layer in enumerate(layers)]
        slow = Reference(backbone.model, case, stages, pool_rule(prior[k], alpha))
        logits = slow.run(0)[0]
        assert [stage[k] for stage in kept] == slow.survivors
        answers = [backbone.tokenizer.convert_tokens_to_ids(word) for word in reranker.template.answers]
        expected = float(logits[answers].log_softmax(-1)[0])
        assert scores[k] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("preset", [PRESET, "jina-reranker-m0"])
def test_a_candidate_without_any_token_left_still_has_a_score(judge: Backbone, preset: str) -> None:
    query, images = pictures(5, 6)
    pruner = RaDiCal(keep=0.01, layers=(0, 2), profile=PROFILE, least=0)
    reranker = Reranker(judge, pruner, preset=preset, pair_batch=4)
    ranking = reranker.rank(query, images)
    assert ranking.report is not None
    assert [] in ranking.report.stages[-1].survivors
    assert sorted(ranking.order) == list(range(6))
    assert all(math.isfinite(result.score) and result.score <= 0 for result in ranking)


# Every other method, per pair.


@pytest.mark.parametrize(
    "name", first_fast(["random", *(n for n in METHODS if n not in ("random", "radical"))])
)
def test_other_methods_keep_their_fraction_of_every_pair(name: str, judge: Backbone) -> None:
    query, images = pictures(6, 5)
    options: dict[str, Any] = {"profile": PROFILE} if name == "random" else {}
    pruner = build(name, keep=0.3, **options)
    ranking = Reranker(judge, pruner, preset=PRESET, pair_batch=2, max_image_tokens=64).rank(query, images)
    again = Reranker(judge, pruner, preset=PRESET, pair_batch=5, max_image_tokens=64).rank(query, images)
    report = ranking.report
    assert report is not None
    assert again.report is not None
    assert sorted(ranking.order) == list(range(5))
    assert {r.index: r.score for r in again} == pytest.approx({r.index: r.score for r in ranking}, abs=1e-4)
    assert [s.survivors for s in again.report.stages] == [s.survivors for s in report.stages]
    sizes = [judge.count_tokens(image, 64) for image in images]
    assert report.visual_tokens == sum(sizes)
    if report.stages:
        budgets = sizes
        for step, stage in zip(pruner.stages(LAYERS), report.stages, strict=True):
            whole = sizes if step.of_all else budgets
            budgets = [math.ceil(round(step.keep * size, 9)) for size in whole]
            assert [len(own) for own in stage.survivors] == budgets
    elif name == "dense":
        assert report.visual_tokens_left == sum(sizes)
    else:
        assert report.visual_tokens_left <= math.ceil(0.3 * sum(sizes)) + len(sizes)


def test_seeded_methods_draw_differently_for_every_candidate(judge: Backbone) -> None:
    query, images = draw_list(7, 4)
    kept = survivors(Reranker(judge, "random", keep=0.3, profile=PROFILE, preset=PRESET), query, images)
    assert len({str(own) for own in kept[0]}) == 4


# The parts.


def test_each_image_is_encoded_once(judge: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = judge.encode

    def counted(pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        encoded.append(len(pixels))
        return encode(pixels, signals)

    monkeypatch.setattr(judge, "encode", counted)
    query, images = pictures(8, 5)
    reranker = Reranker(judge, "radical", keep=0.3, profile=PROFILE, preset=PRESET, pair_batch=2)
    reranker.rank(Query(query, images[0]), [*images[1:], images[1]])
    assert encoded == [5]  # four candidates, one of them twice, and the reference of all five prompts
    reranker.rank("another query", images)
    assert encoded == [5]


def test_the_reference_of_a_composed_query_is_protected(judge: Backbone) -> None:
    query, images = pictures(9, 4)
    reranker = Reranker(judge, "radical", keep=0.1, profile=PROFILE, preset=PRESET)
    composed = reranker.rank(Query(query, images[0]), images[1:]).report
    plain = reranker.rank(query, images[1:]).report
    assert composed is not None
    assert plain is not None
    assert composed.visual_tokens == plain.visual_tokens
    assert composed.visual_tokens_left == plain.visual_tokens_left
    reference = judge.count_tokens(images[0], 1800)
    assert composed.tokens_per_layer[-1] - plain.tokens_per_layer[-1] == 3 * (
        reference + 2
    )  # with its markup


def test_a_query_before_the_image_is_read_from_its_own_tokens(judge: Backbone) -> None:
    reranker = Reranker(judge, "dense", preset=PRESET)
    query, images = pictures(10, 1)
    (features,) = judge.encode([judge.preprocess(images[0], 64)])
    prompt = build_pair(judge, reranker.template, query, len(features.tokens))
    seen: list[torch.Tensor] = []

    class Spy(RaDiCal):
        def select(self, view: Any, count: int) -> Any:
            seen.extend([view.query_embedding, view.attention()])
            return super().select(view, count)

    with Spy(keep=0.5, layers=(2,), alpha=0.5).on(judge.model, prompt.layout):
        judge.next_token_logits(judge.inputs([prompt.ids], [features]))
    words = judge.tokenizer(query, add_special_tokens=False)["input_ids"]
    expected = judge.model.get_input_embeddings()(torch.tensor(words)).mean(0)
    torch.testing.assert_close(seen[0], expected.detach())
    # Four rows judge the image: its end mark, the end of the turn, and the generation prompt.
    assert seen[1].shape == (4, len(features.tokens))
    assert bool((seen[1].sum(-1) > 0).all())


def test_shares_must_fit_the_prompts(judge: Backbone) -> None:
    look = Look(torch.randn(6, 3), torch.tensor([0] * 6), torch.randn(3))
    pruner = RaDiCal(keep=0.5, layers=(1,), alpha=1)
    shares = pruner.pool(lambda: look, pruner.stages(LAYERS))
    prompt: Prompt = build_pair(judge, Reranker(judge, "dense", preset=PRESET).template, "red", 4)
    with pytest.raises(LayoutError, match="shares of the list's budget"):
        pruner.on(judge.model, prompt.layout, None, shares)
    with pytest.raises(InputError, match="pair_batch must be a whole number"):
        Reranker(judge, "dense", pair_batch=0)
