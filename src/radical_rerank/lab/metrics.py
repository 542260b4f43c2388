"""Ranking measures (by ir-measures), confidence intervals and significance tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from radical_rerank.errors import needs_extra
from radical_rerank.lab.paper import CANDIDATES

with needs_extra("lab"):
    import ir_measures
    from ir_measures import RR, Success, nDCG

MEASURES = {
    "R@1": Success @ 1,
    "R@5": Success @ 5,
    "R@10": Success @ 10,
    "MRR@10": RR @ 10,
    "nDCG@10": nDCG @ 10,
}
"""the measures of every record, by name"""


def measure(
    rankings: Mapping[str, Sequence[str]], relevant: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """Compute every measure of every query.

    Args:
        rankings: per query the ids of the documents, best first
        relevant: per query the grades of the relevant ids

    Returns:
        Per query the value of each of `MEASURES`, from 0 to 1. A ranking without a relevant id gets 0.

    Example:
        >>> measure({"q": ["b", "a"]}, {"q": {"a": 1}})["q"]["MRR@10"]
        0.5
    """
    qrels = [
        ir_measures.Qrel(query, name, grade)
        for query, grades in relevant.items()
        if query in rankings
        for name, grade in grades.items()
    ]
    run = [
        ir_measures.ScoredDoc(query, name, float(-place))
        for query, names in rankings.items()
        for place, name in enumerate(names)
    ]
    values: dict[str, dict[str, float]] = {query: dict.fromkeys(MEASURES, 0.0) for query in rankings}
    names = {value: name for name, value in MEASURES.items()}
    for metric in ir_measures.iter_calc(list(MEASURES.values()), qrels, run):
        values[metric.query_id][names[metric.measure]] = float(metric.value)
    return values


def relative(value: float, dense: float) -> float:
    """Return Rel_D: a value in percent of Dense.

    Example:
        >>> relative(42.0, 84.0)
        50.0
    """
    return 100 * value / dense if dense else float("nan")


def bootstrap(
    values: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return a confidence interval of the mean over queries (percentile bootstrap).

    Args:
        values: one value per query
        level: the confidence level
        draws: how often the queries are resampled
        seed: seeds the resampling

    Returns:
        The lower and the upper end.

    Example:
        >>> low, high = bootstrap([0.0, 0.5, 1.0, 1.0])
        >>> 0 <= low < 0.625 < high <= 1
        True
    """
    data = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = [data[rng.integers(len(data), size=len(data))].mean() for _ in range(draws)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_test(a: ArrayLike, b: ArrayLike, *, draws: int = 5000, seed: int = 0) -> float:
    """Return the two-sided p-value of the mean difference over queries (paired randomisation test).

    Args:
        a, b: one value per query of two settings, in the same order
        draws: how many random sign patterns are tried
        seed: seeds the signs

    Returns:
        The share of sign patterns whose difference is as large as the observed one.

    Example:
        >>> paired_test([0.5, 1.0], [0.5, 1.0])
        1.0
    """
    difference = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    difference = difference[difference != 0]
    if not len(difference):
        return 1.0
    rng = np.random.default_rng(seed)
    observed = abs(difference.sum())
    as_large = 0
    for start in range(0, draws, 500):
        signs = rng.choice([-1.0, 1.0], size=(min(500, draws - start), len(difference)))
        as_large += int((np.abs(signs @ difference) >= observed - 1e-12).sum())
    return (as_large + 1) / (draws + 1)


def jaccard(a: Sequence[str], b: Sequence[str], depth: int = CANDIDATES) -> float:
    """Return the overlap of the first `depth` ids of two lists: shared ids over all ids.

    Example:
        >>> jaccard("abc", "bcd")
        0.5
    """
    first, second = set(a[:depth]), set(b[:depth])
    return len(first & second) / len(first | second) if first | second else 1.0


def rbo(a: Sequence[str], b: Sequence[str], p: float = 0.9) -> float:
    """Return the rank-biased overlap of two lists (Webber et al., eq. 32 for lists of equal length).

    It is extrapolated from the depth that both lists reach.

    Example:
        >>> round(rbo("abc", "abc"), 3), rbo("abc", "xyz")
        (1.0, 0.0)
    """
    depth = min(len(a), len(b))
    if not depth:
        return 1.0 if len(a) == len(b) else 0.0
    total, shared = 0.0, 0
    seen_a: set[str] = set()
    seen_b: set[str] = set()
    for d in range(1, depth + 1):
        seen_a.add(a[d - 1])
        seen_b.add(b[d - 1])
        shared = len(seen_a & seen_b)
        total += p**d * shared / d
    return shared / depth * p**depth + (1 - p) / p * total
