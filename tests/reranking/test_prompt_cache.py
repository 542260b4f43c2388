"""The layers before the first cut run once for the same candidates, and no ranking changes by it."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radical_rerank import Query, Ranking, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.backbones.engine import Prefix
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.method import macs
from radical_rerank.pruning import RaDiCal, Random
from tests.cases import PROFILE, Case, first_fast, make_case, model_of
from tests.tiny import READABLE, TINY_FAMILIES, on_grid, write_tiny

ITEM = make_list("test", 5, 6, queries=3)
QUERIES = [description.text() for description in ITEM.descriptions]
LINEAR_FIRST = ("qwen3_5", "qwen3_5_moe", "gemma3")
"""their first layers cannot be split: linear attention, sliding windows"""


def radical(*layers: int, **options: Any) -> RaDiCal:
    return RaDiCal(layers=layers, profile=PROFILE, **options)


@lru_cache
def scenes_once() -> Backbone:
    return Backbone.from_pretrained("scenes")


@pytest.fixture
def scenes() -> Backbone:
    return scenes_once()


def exactly(ranking: Ranking) -> tuple[Any, ...]:
    """All that a ranking says, besides costs that were saved."""
    report = ranking.report
    assert report is not None
    survivors = [stage.survivors for stage in report.stages]
    return ranking.order, [one.score for one in ranking], survivors, dict(ranking.signals)


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_a_second_query_gets_the_same_ranking_bit_by_bit(family: str, tmp_path: Path) -> None:
    backbone = Backbone.from_pretrained(write_tiny(tmp_path / family, family))
    pruner = radical(2, 5, keep=0.3)
    fresh = [exactly(Reranker(backbone, pruner).rank(query, ITEM.images)) for query in QUERIES]
    without = Reranker(backbone, pruner, prompt_cache_bytes=0)
    assert [exactly(without.rank(query, ITEM.images)) for query in QUERIES] == fresh
    reranker = Reranker(backbone, pruner)
    rankings = [reranker.rank(query, ITEM.images) for query in QUERIES]
    assert [exactly(ranking) for ranking in rankings] == fresh
    reused = [ranking.report.macs_reused for ranking in rankings if ranking.report]
    assert reused[0] == 0
    if family in LINEAR_FIRST:
        assert READABLE[family][0] == 1
        assert reused == [0, 0, 0]
    else:
        assert reused[1] == reused[2] > 0
    # A batch runs in one part.
    together = list(reranker.rank_many([(query, ITEM.images) for query in QUERIES], batch_size=3))
    for one, other in zip(rankings, together, strict=True):
        assert [a.score for a in one] == pytest.approx([b.score for b in other], abs=1e-4)


@pytest.mark.parametrize("family", first_fast([f for f in TINY_FAMILIES if f not in LINEAR_FIRST]))
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_two_parts_compute_what_one_does(family: str, depth: int) -> None:
    model = model_of(family)
    shapes = [(3, 4), (2, 2), (4, 3)] if on_grid(family) else [(1, 1), (2, 1), (1, 1)]
    case = make_case(family, shapes, seed=4)
    pruner = radical(depth, 6, keep=0.3)
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        whole, kept = model(**case.inputs).logits[0, -1], run.stages[0][-1].survivors
        counts = list(run.tokens_per_layer)
    known = Known()
    for _ in range(2):
        with torch.no_grad(), pruner.on(model, case.layout, prefix=prefix_of(case, known)) as run:
            parts = model(**{**case.inputs, "use_cache": False}, logits_to_keep=1).logits[0, -1]
            assert torch.equal(run.stages[0][-1].survivors, kept)
            assert list(run.tokens_per_layer) == counts
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=0)
    assert run.reused == (min(case.layout.query), depth)


class Known(dict[Any, Any]):
    """States without a limit."""

    def keep(self, key: Any, value: Any, size: int) -> None:
        assert size == value.nbytes
        self[key] = value


def prefix_of(case: Case, known: Known) -> Prefix:
    return Prefix(tuple(case.ids[: min(case.layout.query)]), (), known)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([(2, 5), (3, 6), (5, 7), (7,)]), min_size=2, max_size=5), st.randoms())
def test_any_order_of_schedules_gives_the_same_rankings(schedules: list[tuple[int, ...]], draw: Any) -> None:
    """A state that is known up to another layer is gone on with, or left alone."""
    backbone = scenes_once()
    reranker = Reranker(backbone, radical(2, keep=0.2))
    for layers in schedules:
        pruner, query = radical(*layers, keep=0.2), draw.choice(QUERIES)
        expected = Reranker(backbone, pruner, vision_cache=reranker.vision_cache).rank(query, ITEM.images)
        assert exactly(reranker.with_pruner(pruner).rank(query, ITEM.images)) == exactly(expected)
    assert len(reranker.prompt_cache) == 1


def test_what_was_reused_is_counted(scenes: Backbone) -> None:
    reranker = Reranker(scenes, radical(3, 6, keep=0.2))
    first, second = (reranker.rank(query, ITEM.images).report for query in QUERIES[:2])
    assert first is not None
    assert second is not None
    assert first.macs_reused == 0
    text = second.tokens - second.visual_tokens
    asked = len(scenes.tokenizer(f"{QUERIES[1]} answer:")["input_ids"])
    known = second.visual_tokens + text - asked
    assert second.macs_reused == macs([known] * 3 + [0] * (scenes.shape.num_layers - 3), scenes.shape)
    # Deeper next time: what is between is computed once.
    deeper = reranker.with_pruner(radical(5, 6, keep=0.2))
    reports = [deeper.rank(query, ITEM.images).report for query in QUERIES[:2]]
    assert [report.macs_reused for report in reports if report] == [
        macs([known] * depth + [0] * (scenes.shape.num_layers - depth), scenes.shape) for depth in (3, 5)
    ]


def test_other_candidates_share_nothing(scenes: Backbone) -> None:
    reranker, query = Reranker(scenes, radical(3, keep=0.2)), QUERIES[0]
    reranker.rank(query, ITEM.images)
    for pictures in (
        ITEM.images[::-1],
        ITEM.images[:-1],
        [*ITEM.images[:-1], make_list("test", 6, 2).images[0]],
    ):
        again = reranker.rank(query, pictures)
        assert again.report is not None
        assert again.report.macs_reused == 0
        assert exactly(again) == exactly(Reranker(scenes, radical(3, keep=0.2)).rank(query, pictures))
    assert len(reranker.prompt_cache) == 4


def test_its_memory_is_bounded(scenes: Backbone) -> None:
    pruner = radical(3, keep=0.2)
    one = Reranker(scenes, pruner)
    one.rank(QUERIES[0], ITEM.images)
    size = one.prompt_cache.bytes
    assert size > 0
    reranker = Reranker(scenes, pruner, prompt_cache_bytes=2 * size + size // 2)
    for turn in range(6):
        reranker.rank(QUERIES[0], ITEM.images[turn:] + ITEM.images[:turn])
        assert reranker.prompt_cache.bytes <= reranker.prompt_cache.max_bytes
    assert len(reranker.prompt_cache) == 2
    reranker.prompt_cache.clear()
    assert (len(reranker.prompt_cache), reranker.prompt_cache.bytes) == (0, 0)


def test_composed_queries_and_windows_reuse_too(scenes: Backbone) -> None:
    reranker = Reranker(scenes, radical(3, keep=0.3), window=4)
    fresh = Reranker(scenes, radical(3, keep=0.3), window=4)
    change = Query("the star is green instead of red", ITEM.images[0])
    for query in (change, QUERIES[0], change):
        expected = fresh.with_pruner(radical(3, keep=0.3))
        expected.prompt_cache = type(fresh.prompt_cache)(0)
        ours = reranker.rank(query, ITEM.images)
        assert exactly(ours) == exactly(expected.rank(query, ITEM.images))
    # The first window of the list from the back has the same candidates in the same order.
    assert ours.reports[0].macs_reused > 0


def test_methods_without_a_cut_inside_run_as_before(scenes: Backbone) -> None:
    for method in ("dense", "visionzip"):
        reranker = Reranker(scenes, method)
        for query in QUERIES[:2]:
            report = reranker.rank(query, ITEM.images).report
            assert report is not None
            assert report.macs_reused == 0
        assert len(reranker.prompt_cache) == 0


def test_threads_share_it(scenes: Backbone) -> None:
    pruner = Random(keep=0.2, layers=(3, 6))
    expected = {query: exactly(Reranker(scenes, pruner).rank(query, ITEM.images)) for query in QUERIES}
    reranker, wrong = Reranker(scenes, pruner), []

    def ask(query: str) -> None:
        for _ in range(4):
            if exactly(reranker.rank(query, ITEM.images)) != expected[query]:
                wrong.append(query)

    threads = [threading.Thread(target=ask, args=(query,)) for query in QUERIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_vision_cache_no_prompt_is_kept(scenes: Backbone) -> None:
    """It could not be found again."""
    reranker = Reranker(scenes, radical(3, keep=0.3), vision_cache_bytes=0)
    reranker.rank(QUERIES[0], ITEM.images)
    assert reranker.prompt_cache.bytes == 0
