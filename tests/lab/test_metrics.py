"""Measures against their definitions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.lab.metrics import bootstrap, jaccard, measure, paired_test, rbo


@given(st.integers(0, 10_000))
def test_measures_by_their_definitions(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"d{i}" for i in range(15)]
    ranking = rng.sample(names, rng.randint(1, 15))
    grades = {name: rng.randint(1, 3) for name in rng.sample(names, rng.randint(1, 4))}
    measured = measure({"q": ranking}, {"q": grades})["q"]
    ranks = [i for i, name in enumerate(ranking, start=1) if name in grades]
    for k in (1, 5, 10):
        assert measured[f"R@{k}"] == float(any(rank <= k for rank in ranks))
    assert measured["MRR@10"] == pytest.approx(1 / ranks[0] if ranks and ranks[0] <= 10 else 0)
    gain = sum(grades.get(name, 0) / math.log2(i + 1) for i, name in enumerate(ranking[:10], start=1))
    ideal = sum(g / math.log2(i + 1) for i, g in enumerate(sorted(grades.values(), reverse=True), start=1))
    assert measured["nDCG@10"] == pytest.approx(gain / ideal)


def test_intervals_and_tests_know_chance_from_difference() -> None:
    rng = np.random.default_rng(0)
    values = rng.random(300)
    low, high = bootstrap(values)
    assert low < values.mean() < high
    assert (high - low) == pytest.approx(2 * 1.96 * values.std() / 300**0.5, rel=0.15)
    assert paired_test(values, values) == 1.0
    assert paired_test(values, values + rng.normal(0, 0.1, 300)) > 0.01
    assert paired_test(values, values - 0.1) < 0.001
    # A small case, exactly: of the 8 sign patterns of (1, 1, 1), two are as large.
    assert paired_test([1, 1, 1], [0, 0, 0], draws=20_000) == pytest.approx(0.25, abs=0.02)


def test_overlap_of_pools() -> None:
    assert jaccard("abcd", "cdef", 4) == pytest.approx(2 / 6)
    assert rbo("abc", "abc") == pytest.approx(1)
    assert rbo("abc", "xyz") == 0
    p, agreement = 0.9, [0.0, 1.0, 2 / 3]  # prefixes of "abc" and "bad": 0, 2, 2 shared
    expected = 2 / 3 * p**3 + (1 - p) / p * sum(a * p**d for d, a in enumerate(agreement, start=1))
    assert rbo("abc", "bad", p) == pytest.approx(expected)
