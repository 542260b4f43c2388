"""Lists per second: one at a time and in batches, in Python and over HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from radical_rerank.backbones import Backbone
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking import Reranker
from radical_rerank.reranking.calibration import generated_list


@dataclass(frozen=True)
class Throughput:
    """The throughput of one setting.

    Args:
        through: "rank_many" or "service"
        method: the method and its budget
        at_once: lists per batch, or clients at the same time
        lists_per_second: the median over rounds
    """

    through: str
    method: str
    at_once: int
    lists_per_second: float


Measure = Callable[[str, float, int, range], float]
"""(method, keep, at_once, seeds of the lists) → lists per second"""


def run_throughput(
    model: str,
    *,
    lists: int = 24,
    candidates: int = CANDIDATES,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    clients: Sequence[int] = (1, 4),
    methods: Sequence[tuple[str, float]] = (("dense", 1.0), ("radical", 0.2)),
    rounds: int = 3,
    progress: Progress = silent,
) -> list[Throughput]:
    """Measure lists per second. Rounds are interleaved; every list has new images.

    Args:
        model: a model id or a folder
        lists: lists per measurement
        candidates: candidates per list
        batch_sizes: the batch sizes of `rank_many`
        clients: numbers of clients of the service; () leaves the service out, which needs an extra
        methods: (name, keep) pairs
        rounds: how many rounds; medians are reported
        progress: shows the progress
    """
    kinds = [("rank_many", *method, size) for method in methods for size in batch_sizes]
    kinds += [("service", *method, count) for method in methods for count in clients]
    speeds: dict[tuple[str, str, float, int], list[float]] = {}
    with _measures(model, candidates, over_http=bool(clients)) as measures:
        for turn, kind in enumerate(progress(kinds * rounds, "throughput")):
            seeds = range(turn * lists, (turn + 1) * lists)
            through, method, keep, count = kind
            speeds.setdefault(kind, []).append(measures[through](method, keep, count, seeds))
    return [
        Throughput(through, method if keep == 1 else f"{method} {keep:.0%}", count, statistics.median(values))
        for (through, method, keep, count), values in speeds.items()
    ]


@contextmanager
def _measures(model: str, candidates: int, over_http: bool) -> Iterator[dict[str, Measure]]:
    """Yield the functions that measure, by what they measure: "rank_many" and "service"."""
    backbone = Backbone.from_pretrained(model)

    def directly(method: str, keep: float, size: int, seeds: range) -> float:
        work = [generated_list(seed, candidates) for seed in seeds]
        reranker = Reranker(backbone, method, keep=keep, vision_cache_bytes=0)
        start = time.perf_counter()
        for _ranking in reranker.rank_many(work, batch_size=size):
            pass
        return len(work) / (time.perf_counter() - start)

    if not over_http:
        yield {"rank_many": directly}
        return
    import httpx

    from radical_rerank.lab.bench.service import closed_loop, request_of, serving

    with serving(model, patience=100.0) as (url, _), httpx.Client(base_url=url, timeout=600) as http:

        def by_request(method: str, keep: float, clients: int, seeds: range) -> float:
            asked = {"method": method, "keep": keep}
            return closed_loop(http, [request_of(seed, candidates)[1] | asked for seed in seeds], clients)

        yield {"rank_many": directly, "service": by_request}
