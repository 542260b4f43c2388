"""Ranking measures by ir_measures, and whether differences mean anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ir_measures
import numpy as np
from ir_measures import RR, Success, nDCG

SEEDS = (42, 123, 456, 789, 1024)
"""The paper's five"""

MEASURES = {
    "R@1": Success @ 1,
    "R@5": Success @ 5,
    "R@10": Success @ 10,
    "MRR@10": RR @ 10,
    "nDCG@10": nDCG @ 10,
}


def measure(
    rankings: Mapping[str, Sequence[str]], relevant: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """Per query every measure. rankings: ids, best first; one without a relevant id counts 0."""
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
    found: dict[str, dict[str, float]] = {query: dict.fromkeys(MEASURES, 0.0) for query in rankings}
    names = {value: name for name, value in MEASURES.items()}
    for value in ir_measures.iter_calc(list(MEASURES.values()), qrels, run):
        found[value.query_id][names[value.measure]] = float(value.value)
    return found


def relative(value: float, dense: float) -> float:
    """Rel_D: percent of Dense."""
    return 100 * value / dense if dense else float("nan")


def bootstrap(
    values: Sequence[float], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """A percentile interval of the mean over queries."""
    data = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = [data[rng.integers(len(data), size=len(data))].mean() for _ in range(draws)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_test(a: Sequence[float], b: Sequence[float], *, draws: int = 5000, seed: int = 0) -> float:
    """Two-sided p-value of the mean difference over queries: how often random signs give as large a one."""
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


def jaccard(a: Sequence[str], b: Sequence[str], depth: int = 20) -> float:
    """Shared ids of the first `depth`, over all of them."""
    first, second = set(a[:depth]), set(b[:depth])
    return len(first & second) / len(first | second) if first | second else 1.0


def rbo(a: Sequence[str], b: Sequence[str], p: float = 0.9) -> float:
    """Rank-biased overlap, extrapolated from the lists' common depth (Webber et al., eq. 32, even lists)."""
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
