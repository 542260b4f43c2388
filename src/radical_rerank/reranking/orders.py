"""Several orders of the same candidates, and the scores of a first stage as a prior."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from radical_rerank.errors import InputError

DEFAULT_WEIGHT = 0.2
"""of a first stage's scores, if none was fitted for the model"""


def shuffles(contents: Sequence[str], count: int) -> list[list[int]]:
    """Return several orders of a list's candidates.

    They depend on what the candidates are, not on how the list is ordered: the candidates are sorted by
    content, shuffled once by a seed made of all contents, and turned on, so that every candidate stands in
    places that are spread evenly over the prompt.

    Args:
        contents: a digest of each candidate
        count: how many orders; there are never more than candidates

    Returns:
        Per order, the candidates' places in the list that was passed.

    Example:
        >>> [[names[place] for place in order] for names in ("abcd", "dcba") for order in shuffles(names, 2)]
        [['c', 'a', 'b', 'd'], ['b', 'd', 'c', 'a'], ['c', 'a', 'b', 'd'], ['b', 'd', 'c', 'a']]
    """
    first = sorted(range(len(contents)), key=contents.__getitem__)
    random.Random(" ".join(contents[place] for place in first)).shuffle(first)
    count = min(count, len(first))
    starts = [turn * len(first) // count for turn in range(count)]
    return [first[start:] + first[:start] for start in starts]


def averaged(orders: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[float]:
    """Return each candidate's mean log-probability, as a distribution over the list again.

    Args:
        orders: per prompt, which candidate stands where
        scores: per prompt, the scores in its order
    """
    sums = [0.0] * len(orders[0])
    for order, own in zip(orders, scores, strict=True):
        for place, score in zip(order, own, strict=True):
            sums[place] += score
    return log_softmax([total / len(orders) for total in sums])


def checked_scores(scores: Iterable[float], count: int) -> list[float]:
    """Return a first stage's scores of `count` documents, or raise an InputError."""
    values = [float(score) for score in scores]
    if len(values) != count:
        raise InputError(f"{len(values)} scores for {count} documents")
    bad = next((place for place, value in enumerate(values) if not math.isfinite(value)), None)
    if bad is not None:
        raise InputError(f"the score of document {bad} is not finite: {values[bad]}")
    return values


def standardised(values: Sequence[float]) -> list[float]:
    """Return finite scores with mean 0 and deviation 1 over the list; all 0 if they are equal.

    Example:
        >>> standardised([3.0, 1.0]), standardised([5.0, 5.0])
        ([1.0, -1.0], [0.0, 0.0])
    """
    if len(set(values)) < 2:
        return [0.0] * len(values)
    largest = max(map(abs, values))
    values = [value / largest for value in values]  # squares of huge scores would overflow
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / deviation if deviation > 0 else 0.0 for value in values]


def mixed(scores: Sequence[float], prior: Sequence[float], weight: float, *, pointwise: bool) -> list[float]:
    """Add a first stage's scores to the model's.

    Args:
        scores: log-probabilities; among the candidates, or, pointwise, that each is relevant
        prior: the first stage's scores, standardised
        weight: of the prior
        pointwise: each score is a probability of its own: the prior is added to its log-odds

    Returns:
        Log-probabilities of the same kind. They are the very same if the prior or the weight is 0.

    Example:
        >>> mixed([-0.5, -0.9], [0.0, 0.0], 0.2, pointwise=False)
        [-0.5, -0.9]
    """
    added = [weight * value for value in prior]
    if not any(added):
        return list(scores)
    if pointwise:
        return [_log_sigmoid(_log_odds(score) + more) for score, more in zip(scores, added, strict=True)]
    return log_softmax([score + more for score, more in zip(scores, added, strict=True)])


def log_softmax(values: Sequence[float]) -> list[float]:
    """Return log-probabilities whose probabilities add up to 1."""
    top = max(values)
    # An exact sum: it does not depend on the order of the candidates.
    total = top + math.log(math.fsum(math.exp(value - top) for value in values))
    return [min(0.0, value - total) for value in values]


def _log_odds(score: float) -> float:
    if score == 0:
        return math.inf
    return score - math.log(-math.expm1(score))


def _log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value)) if value > 0 else value - math.log1p(math.exp(value))
