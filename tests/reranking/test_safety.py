"""The promise: conformal risk control against trying every threshold, and on fresh lists."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.errors import CalibrationError
from radical_rerank.reranking.safety import Observed, Safety, promise

LISTS = st.lists(
    st.builds(Observed, st.integers(0, 40).map(float), st.booleans(), st.booleans()), min_size=5, max_size=300
)


@given(LISTS, st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99]))
def test_the_threshold_is_the_least_that_keeps_the_bound(seen: list[Observed], agreement: float) -> None:
    safety = Safety.of(seen, (0.1, 1.0), (0.1, 1.0))
    n = len(seen)

    def bound(threshold: float) -> float:
        lost = sum(not one.small_right and one.margin >= threshold for one in seen)
        return (lost + sum(not one.large_right for one in seen) + 1) / (n + 1)

    options = sorted({0.0, *(one.margin for one in seen), 1e9})
    good = [threshold for threshold in options if bound(threshold) <= 1 - agreement + 1e-9]
    found = safety.threshold(agreement)
    if not good:
        assert found is None
        assert safety.cost(agreement) == float("inf")
        return
    assert found is not None
    assert bound(found) <= 1 - agreement + 1e-9
    again = sum(one.margin < found for one in seen)
    assert again == sum(one.margin < good[0] for one in seen)
    assert safety.cost(agreement) == pytest.approx(0.1 + again / n)


def test_the_promise_holds_on_fresh_lists_drawn_alike() -> None:
    """Many calibrations of a made-up model: the mean share of lost fresh lists is below 1 - agreement."""
    draw = random.Random(0)

    def lists(count: int) -> list[Observed]:
        margins = [draw.expovariate(0.5) for _ in range(count)]
        return [Observed(m, draw.random() > 0.3 * 0.3**m, True) for m in margins]

    lost = []
    for _ in range(60):
        safety = Safety.of(lists(300), (0.1, 1.0), (0.1, 1.0))
        threshold = safety.threshold(0.98)
        assert threshold is not None
        fresh = lists(300)
        lost.append(sum(one.margin >= threshold and not one.small_right for one in fresh) / len(fresh))
    assert sum(lost) / len(lost) <= 0.02 + 0.002
    assert max(lost) > 0, "a promise that loses nothing ranks too much again"


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
