"""Lists per second, one at a time and in batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from radical_rerank.backbones import Backbone
from radical_rerank.reranking import Reranker
from radical_rerank.scenes.lists import make_list


@dataclass(frozen=True)
class Throughput:
    method: str
    batch_size: int
    lists_per_second: float


def run_throughput(
    backbone: Backbone,
    *,
    lists: int = 24,
    candidates: int = 20,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    methods: Sequence[tuple[str, float]] = (("dense", 1.0), ("radical", 0.2)),
    rounds: int = 3,
) -> list[Throughput]:
    """Images are new to the cache in every round; rounds of all settings are interleaved, the best counts."""
    items = [make_list("test", seed, candidates) for seed in range(lists)]
    work = [(item.descriptions[0].text(), item.images) for item in items]
    best: dict[tuple[str, float, int], float] = {}
    for _ in range(rounds):
        for method, keep in methods:
            for size in batch_sizes:
                reranker = Reranker(backbone, method, keep=keep, vision_cache_bytes=0)
                start = time.perf_counter()
                for _ranking in reranker.rank_many(work, batch_size=size):
                    pass
                speed = lists / (time.perf_counter() - start)
                key = (method, keep, size)
                best[key] = max(best.get(key, 0.0), speed)
    return [
        Throughput(method if keep == 1 else f"{method} {keep:.0%}", size, speed)
        for (method, keep, size), speed in best.items()
    ]
