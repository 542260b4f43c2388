"""Thin adapters to what people already use; each needs only its own library."""

from __future__ import annotations

import math

from radical_rerank.reranking import RankedDocument


def probability(result: RankedDocument) -> float:
    """A result's score as a probability among its list's candidates, in [0, 1]."""
    return math.exp(min(0.0, result.score))
