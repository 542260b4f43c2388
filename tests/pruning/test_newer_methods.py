"""The methods of 2025 and 2026: each rule against an obvious slow version."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from radical_rerank.errors import InputError
from radical_rerank.method import keep_count
from radical_rerank.pruning import (
    QIEI,
    SCOPE,
    CDPruner,
    DivPrune,
    StageView,
    TrimTokenatorLC,
    V2Drop,
    VisionSignals,
)
from radical_rerank.pruning.images import apportion
from radical_rerank.pruning.trimtokenator import fronts

sizes_and_keep = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.floats(0.05, 1.0), st.integers(0, 10_000)
)


def drawn(sizes: list[int], seed: int) -> StageView:
    """What a method sees of a list at the first layer."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    words = torch.randn(3, 6, generator=draw)
    return cast(
        StageView,
        SimpleNamespace(
            alive=torch.arange(total),
            image_of=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            vision=torch.randn(total, 6, generator=draw),
            query_words=words,
            query_embedding=words.mean(dim=0),
            signals=VisionSignals(torch.rand(total, generator=draw), torch.zeros(total, 1)),
        ),
    )


def rows_of(view: Any) -> list[list[int]]:
    """The tokens of each picture."""
    owners = view.image_of.tolist()
    return [[t for t, owner in enumerate(owners) if owner == k] for k in range(owners[-1] + 1)]


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def best_of(value: dict[int, float]) -> int:
    """The token with the largest value. Where two are equal but for rounding, the rule says nothing."""
    first, *rest = sorted(value.values(), reverse=True)
    assume(not rest or first - rest[0] > 1e-5)
    return max(value, key=value.__getitem__)


def budgets_of(sizes: list[int], count: int) -> list[int]:
    """By largest remainders, slowly."""
    exact = [count * size / sum(sizes) for size in sizes]
    shares = [math.floor(value) for value in exact]
    while sum(shares) < count:
        best = max(range(len(sizes)), key=lambda i: (exact[i] - shares[i], -i))
        shares[best] += 1
    return shares


@given(sizes_and_keep)
def test_qi_ei_keeps_the_tokens_most_like_a_word(drawing: tuple[list[int], float, int]) -> None:
    sizes, keep, seed = drawing
    view: Any = drawn(sizes, seed)
    count = keep_count(keep, sum(sizes))
    score = [max(cosine(word, token) for word in view.query_words) for token in view.vision]
    expected = []
    for own, budget in zip(rows_of(view), budgets_of(sizes, count), strict=True):
        expected += sorted(own, key=lambda t: -score[t])[:budget]
    assert QIEI(keep=keep).select(view, count).tolist() == sorted(expected)


@given(sizes_and_keep)
def test_cdpruner_adds_what_increases_the_determinant_most(drawing: tuple[list[int], float, int]) -> None:
    sizes, keep, seed = drawing
    view: Any = drawn(sizes, seed)
    count = keep_count(keep, sum(sizes))
    kept = CDPruner(keep=keep).select(view, count).tolist()
    assert len(set(kept)) == count
    relevance = [cosine(token, view.query_embedding) for token in view.vision]
    for own, budget in zip(rows_of(view), budgets_of(sizes, count), strict=True):
        low, high = min(relevance[t] for t in own), max(relevance[t] for t in own)
        r = {t: (relevance[t] - low) / max(high - low, 1e-6) for t in own}
        kernel = {(i, j): r[i] * cosine(view.vision[i], view.vision[j]) * r[j] for i in own for j in own}
        chosen: list[int] = []
        for _ in range(budget):
            rest = [t for t in own if t not in chosen]
            gain = {
                t: np.linalg.det([[kernel[i, j] for j in [*chosen, t]] for i in [*chosen, t]]) for t in rest
            }
            if max(gain.values()) < 1e-4:  # no token adds anything: the order of the rest is noise
                break
            chosen.append(best_of(gain))
        assert set(chosen) <= set(kept)


@given(sizes_and_keep)
def test_divprune_adds_the_farthest_token(drawing: tuple[list[int], float, int]) -> None:
    sizes, keep, seed = drawing
    view: Any = drawn(sizes, seed)
    total, count = sum(sizes), keep_count(keep, sum(sizes))
    apart = [[1 - cosine(a, b) for b in view.vision] for a in view.vision]
    nearest = {i: min((apart[i][j] for j in range(total) if j != i), default=1.0) for i in range(total)}
    chosen = [best_of(nearest)]
    while len(chosen) < count:
        rest = [t for t in range(total) if t not in chosen]
        chosen.append(best_of({t: min(apart[t][c] for c in chosen) for t in rest}))
    assert DivPrune(keep=keep).select(view, count).tolist() == sorted(chosen)


@pytest.mark.parametrize("power", [0.0, 1.0, 0.5])
@given(sizes_and_keep)
def test_scope_adds_what_covers_most(power: float, drawing: tuple[list[int], float, int]) -> None:
    sizes, keep, seed = drawing
    view: Any = drawn(sizes, seed)
    count = keep_count(keep, sum(sizes))
    kept = SCOPE(keep=keep, power=power).select(view, count).tolist()
    assert len(set(kept)) == count
    saliency = view.signals.attention.tolist()
    for own, budget in zip(rows_of(view), budgets_of(sizes, count), strict=True):
        covered = dict.fromkeys(own, 0.0)
        chosen: list[int] = []
        for _ in range(budget):
            gain = {
                i: sum(max(0.0, cosine(view.vision[i], view.vision[j]) - covered[j]) for j in own)
                * saliency[i] ** power
                for i in own
                if i not in chosen
            }
            if max(gain.values()) < 1e-5:  # everything is covered: the order of the rest is noise
                break
            best = best_of(gain)
            chosen.append(best)
            for j in own:
                covered[j] = max(covered[j], cosine(view.vision[best], view.vision[j]))
        assert set(chosen) <= set(kept)


def test_v2drop_scores_by_what_a_layer_changed() -> None:
    draw = torch.Generator().manual_seed(1)
    entering, hidden = torch.randn(5, 4, generator=draw), torch.randn(5, 4, generator=draw)
    view: Any = SimpleNamespace(entering=entering, hidden=hidden)
    slow = [math.dist(a, b) for a, b in zip(hidden.tolist(), entering.tolist(), strict=True)]
    assert V2Drop().score(view).tolist() == pytest.approx(slow)
    stages = V2Drop(keep=0.2).stages(36)
    assert [(stage.layer, stage.when) for stage in stages] == [(8, "after"), (16, "after"), (24, "after")]
    assert [stage.keep for stage in stages] == pytest.approx([0.2 ** (1 / 3), 0.2 ** (2 / 3), 0.2])
    assert V2Drop(keep=0.2).stages(2)[-1].keep == pytest.approx(0.2)


@given(sizes_and_keep)
def test_trimtokenator_s_shares_and_fronts(drawing: tuple[list[int], float, int]) -> None:
    sizes, keep, seed = drawing
    view: Any = drawn(sizes, seed)
    count = keep_count(keep, sum(sizes))
    kept = TrimTokenatorLC(keep=keep).select(view, count).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) == count
    unit = [token / token.norm() for token in view.vision]
    weights = []
    means = [torch.stack([unit[t] for t in own]).mean(dim=0) for own in rows_of(view)]
    for k, own in enumerate(rows_of(view)):
        inside = sum(float(unit[i] @ unit[j]) for i in own for j in own) / len(own) ** 2
        others = [cosine(means[k], mean) for i, mean in enumerate(means) if i != k]
        outside = sum(others) / max(1, len(others))
        weights.append(len(own) * max(0.0, 1 - inside) * max(0.0, 1 - outside))
    counts = [sum(t in kept for t in own) for own in rows_of(view)]
    assert counts == apportion(sizes, count, weights)


def test_a_picture_of_equals_gets_a_smaller_share() -> None:
    view: Any = drawn([8, 8], 3)
    view.vision[:8] = view.vision[0]
    kept = TrimTokenatorLC(keep=0.5).select(view, 8)
    assert (kept < 8).sum() == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_fronts_come_one_after_the_other(points: list[tuple[int, int]]) -> None:
    first, second = (torch.tensor([point[i] for point in points], dtype=torch.float) for i in (0, 1))

    def dominated(i: int, among: set[int]) -> bool:
        a, b = points[i]
        return any(points[j] != (a, b) and points[j][0] >= a and points[j][1] >= b for j in among)

    number: dict[int, int] = {}
    left, level = set(range(len(points))), 0
    while left:
        front = {i for i in left if not dominated(i, left)}
        number |= dict.fromkeys(front, level)
        left, level = left - front, level + 1
    order = fronts(first, second).tolist()
    assert sorted(order) == list(range(len(points)))
    assert [number[i] for i in order] == sorted(number.values())


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(0, 10_000),
    st.booleans(),
    st.integers(0, 100),
)
def test_shares_sum_to_the_budget(sizes: list[int], seed: int, weighted: bool, percent: int) -> None:
    count = sum(sizes) * percent // 100
    weights = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()
    shares = apportion(sizes, count, weights if weighted else None)
    assert sum(shares) == count
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
    if not weighted:
        assert shares == budgets_of(sizes, count)
    assert apportion(sizes, count, [0.0] * len(sizes)) == apportion(sizes, count)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="power must be at least 0"):
        SCOPE(power=-1)
    with pytest.raises(InputError, match="wider must be at least 1"):
        TrimTokenatorLC(wider=0.5)
