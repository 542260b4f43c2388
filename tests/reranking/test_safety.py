"""The promise: risk control against trying every threshold, and on fresh lists."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.errors import CalibrationError
from radical_rerank.reranking.safety import Observed, Safety, cheapest, promise

LISTS = st.lists(
    st.builds(Observed, st.integers(0, 40).map(float), st.booleans(), st.booleans()), min_size=5, max_size=300
)


@given(LISTS, st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99]), st.sampled_from([1, 5]))
def test_the_threshold_is_the_least_that_keeps_the_bound(
    seen: list[Observed], agreement: float, compared: int
) -> None:
    safety = Safety.of(seen, (0.1, 1.0), (0.1, 1.0), compared)
    n = len(seen)

    def doubt(threshold: float) -> float:
        """P(so few lost lists are seen, if the promise did not hold)."""
        lost = sum(not one.small_right and one.margin >= threshold for one in seen)
        lost += sum(not one.large_right for one in seen)
        risk = 1 - agreement
        return math.fsum(math.comb(n, k) * risk**k * agreement ** (n - k) for k in range(min(lost, n) + 1))

    options = sorted({0.0, *(one.margin for one in seen), 1e9})
    good = [threshold for threshold in options if doubt(threshold) <= 0.05 / compared + 1e-9]
    found = safety.threshold(agreement)
    if not good:
        assert found is None
        assert safety.cost(agreement) == float("inf")
        return
    assert found is not None
    assert doubt(found) <= 0.05 / compared + 1e-9
    again = sum(one.margin < found for one in seen)
    assert again == sum(one.margin < good[0] for one in seen)
    assert safety.cost(agreement) == pytest.approx(0.1 + again / n)


def test_the_promise_holds_on_fresh_lists_though_the_cheapest_pair_is_chosen() -> None:
    """Many calibrations of twenty made-up models: in 95% of them the lost share is at most as promised.

    The models are equally good, so the one that looks cheapest was lucky.
    """
    draw = random.Random(0)

    def lists(count: int) -> list[Observed]:
        margins = [draw.expovariate(0.5) for _ in range(count)]
        return [Observed(m, draw.random() > 0.3 * 0.3**m, True) for m in margins]

    lost = []
    for _ in range(120):
        pairs = [Safety.of(lists(600), (0.1, 1.0), (0.1, 1.0), 20).to_dict() for _ in range(20)]
        threshold = promise(pairs, 0.98, "model").threshold
        # In truth: E[0.3 · 0.3^m; m ≥ t] for an exponential m of rate 0.5.
        rate = 0.5 - math.log(0.3)
        lost.append(0.3 * 0.5 / rate * math.exp(-rate * threshold))
    broken = sum(one > 0.02 for one in lost)
    assert broken <= 12, "5% of 120 are 6; more than 12 would be a chance of one in a hundred"
    assert max(lost) > 0.015, "a promise that loses nothing ranks too much again"


def test_the_cheapest_pair_is_taken_and_too_few_lists_are_an_error() -> None:
    right = [Observed(1.0 + i, True, True) for i in range(300)]
    half = [Observed(1.0 + i, i > 150, True) for i in range(300)]
    pairs = [
        Safety.of(half, (0.1, 1.0), (0.1, 1.0)).to_dict(),
        Safety.of(right, (0.2, 1.0), (0.2, 1.0)).to_dict(),
    ]
    chosen = promise(pairs, 0.99, "model")
    assert (chosen.pair.small, chosen.threshold) == (0.2, 0.0)
    with pytest.raises(CalibrationError, match="more lists"):
        promise(pairs, 0.999, "model")
    with pytest.raises(CalibrationError, match="radical tune model"):
        promise([], 0.9, "model")
    old = {"small": 0.1, "large": 1.0, "small_cost": 0.1, "large_cost": 1.0, "margins": [1.0], "wrong": []}
    with pytest.raises(CalibrationError, match=r"another version.*radical tune"):
        promise([old], 0.9, "model")


def test_only_pairs_that_are_the_cheapest_for_something_are_kept() -> None:
    draw = random.Random(3)

    def pair(small: float, wrong: float) -> Safety:
        seen = [Observed(draw.expovariate(1), draw.random() > wrong, True) for _ in range(500)]
        return Safety.of(seen, (small, 1.0), (small, 1.0))

    pairs = [pair(0.1, 0.2), pair(0.2, 0.02), pair(0.9, 0.02)]
    kept = cheapest(pairs)
    assert pairs[2] not in kept
    for agreement in (0.6, 0.9, 0.95, 0.98, 0.99):
        assert min(one.cost(agreement) for one in kept) == min(one.cost(agreement) for one in pairs)
    assert cheapest([]) == []
