"""Images in, ranking out: with a cold and a warm vision cache, both scorers, and how time grows with N."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radical_rerank.backbones import Backbone
from radical_rerank.bench.timing import Ratio, interleaved
from radical_rerank.reranking import Reranker
from radical_rerank.scenes.lists import make_list


@dataclass(frozen=True)
class EndToEnd:
    """Median seconds per list, and what they are made of."""

    candidates: int
    scorer: str
    dense_cold: float
    dense_warm: float
    pruned_cold: float
    pruned_warm: float
    warm_speedup: Ratio
    """dense without the cache over pruned with it"""
    parts: dict[str, float]
    """of the pruned run with a warm cache"""


def run_end_to_end(
    backbone: Backbone,
    *,
    counts: Sequence[int] = (5, 10, 20, 50),
    scorers: Sequence[str] = ("logits",),
    method: str = "radical",
    keep: float = 0.2,
    rounds: int = 5,
    tell: Callable[[], None] = lambda: None,
) -> list[EndToEnd]:
    results = []
    for scorer in scorers:
        for count in counts:
            item = make_list("test", 0, count)
            query, images = item.descriptions[0].text(), item.images
            options: dict[str, Any] = {"scorer": scorer, "max_new_tokens": 2 * count}
            rerankers = {
                "dense cold": Reranker(backbone, "dense", vision_cache_bytes=0, **options),
                "dense warm": Reranker(backbone, "dense", **options),
                "pruned cold": Reranker(backbone, method, keep=keep, vision_cache_bytes=0, **options),
                "pruned warm": Reranker(backbone, method, keep=keep, **options),
            }
            parts: dict[str, list[float]] = {}

            def ranked(
                name: str, reranker: Reranker, q: str = query, i: Any = images, p: Any = parts
            ) -> None:
                for report in reranker.rank(q, i).reports:
                    if name == "pruned warm":
                        for part, seconds in report.seconds.items():
                            p.setdefault(part, []).append(seconds)

            variants = {
                name: (lambda n=name, r=reranker: ranked(n, r)) for name, reranker in rerankers.items()
            }
            times = interleaved(variants, rounds, tell=tell)
            results.append(
                EndToEnd(
                    count,
                    scorer,
                    times.median("dense cold"),
                    times.median("dense warm"),
                    times.median("pruned cold"),
                    times.median("pruned warm"),
                    times.ratio("dense cold", "pruned warm"),
                    {part: float(np.median(values)) for part, values in parts.items()},
                )
            )
    return results


def growth(results: Sequence[EndToEnd], field: str) -> float:
    """The exponent b of time = a · N^b, fitted in logarithms."""
    x = [math.log(result.candidates) for result in results]
    y = [math.log(getattr(result, field)) for result in results]
    return float(np.polyfit(x, y, 1)[0])
