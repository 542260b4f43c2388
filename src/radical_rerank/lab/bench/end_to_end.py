"""Images in, ranking out: with a cold and a warm vision cache, both scorers, and how time grows with N."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from radical_rerank.backbones import Backbone
from radical_rerank.errors import ScoringError
from radical_rerank.lab.bench.models import bench_model, bench_processor, bench_tokenizer
from radical_rerank.lab.bench.timing import Ratio, interleaved, phases
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking import Reranker
from radical_rerank.reranking.calibration import generated_list
from radical_rerank.reranking.results import PruningReport

VARIANTS = ("dense_cold", "dense_warm", "pruned_cold", "pruned_warm")


@dataclass(frozen=True)
class EndToEnd:
    """Median seconds per list by variant, and what they are made of.

    speedup: dense without the cache over pruned with it
    parts: of the pruned run with a warm cache; phases: of both warm runs, prefill and decode
    """

    candidates: int
    scorer: str
    seconds: dict[str, float]
    speedup: Ratio
    parts: dict[str, float]
    phases: dict[str, dict[str, float]]


def paper_backbone(width: int) -> Backbone:
    """A random model of the 4B's depth and proportions, and its name."""
    model = bench_model(width, 36)
    model.config._name_or_path = "Qwen/Qwen3-VL-4B-Instruct"  # its depth, so its trust profile fits
    return Backbone(model, bench_tokenizer(), bench_processor())


def run_end_to_end(
    backbone: Backbone,
    *,
    counts: Sequence[int] = (5, 10, 20, 50),
    scorers: Sequence[str] = ("logits",),
    method: str = "radical",
    keep: float = 0.2,
    size: tuple[int, int] | None = None,
    rounds: int = 5,
    progress: Progress = silent,
) -> list[EndToEnd]:
    """size: width and height that the pictures are brought to; None: as they are."""
    return [
        _measured(backbone, scorer, count, method, keep, size, rounds, progress)
        for scorer in scorers
        for count in counts
    ]


def _measured(
    backbone: Backbone,
    scorer: str,
    count: int,
    method: str,
    keep: float,
    size: tuple[int, int] | None,
    rounds: int,
    progress: Progress,
) -> EndToEnd:
    query, images = generated_list(0, count)
    if size:
        images = [image.resize(size) for image in images]
    options: dict[str, Any] = {"scorer": scorer, "max_new_tokens": 2 * count}
    rerankers = {
        "dense_cold": Reranker(backbone, "dense", vision_cache_bytes=0, **options),
        "dense_warm": Reranker(backbone, "dense", **options),
        "pruned_cold": Reranker(backbone, method, keep=keep, vision_cache_bytes=0, **options),
        "pruned_warm": Reranker(backbone, method, keep=keep, **options),
    }
    parts: dict[str, list[float]] = {}
    spent: dict[str, dict[str, list[float]]] = {name: {} for name in rerankers}

    def ranked(name: str) -> None:
        reports: Sequence[PruningReport] = ()
        # Random weights write no order; the time that it takes is spent all the same.
        with phases(backbone.model) as phase, suppress(ScoringError):
            reports = rerankers[name].rank(query, images).reports
        for kind, seconds in phase.items():
            spent[name].setdefault(kind, []).append(sum(seconds))
        if name == "pruned_warm" and reports:
            for part in reports[0].seconds:
                parts.setdefault(part, []).append(sum(report.seconds[part] for report in reports))

    variants = {name: partial(ranked, name) for name in rerankers}
    times = interleaved(variants, rounds, progress=progress, label=f"N = {count}, {scorer}")
    return EndToEnd(
        count,
        scorer,
        {name: times.median(name) for name in VARIANTS},
        times.ratio("dense_cold", "pruned_warm"),
        _medians(parts),
        {name: _medians(spent[name]) for name in ("dense_warm", "pruned_warm")},
    )


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    """Without the first round, which fills the cache."""
    return {name: float(np.median(found[1:])) for name, found in values.items()}


def growth(results: Sequence[EndToEnd], variant: str) -> float:
    """The exponent b of time = a · N^b, fitted in logarithms."""
    x = [math.log(result.candidates) for result in results]
    y = [math.log(result.seconds[variant]) for result in results]
    return float(np.polyfit(x, y, 1)[0])
