"""Whole rankings: with a cold and a warm vision cache, both scorers, and how time grows with N."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from radical_rerank.backbones import Backbone
from radical_rerank.errors import ScoringError
from radical_rerank.lab.bench.models import bench_model, bench_processor, bench_tokenizer
from radical_rerank.lab.bench.timing import Ratio, Times, interleaved, phases
from radical_rerank.lab.paper import COUNTS, MODEL
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Profile, Pruner, build
from radical_rerank.reranking import Reranker
from radical_rerank.reranking.calibration import generated_list
from radical_rerank.reranking.results import PruningReport

VARIANTS = ("dense_cold", "dense_warm", "pruned_cold", "pruned_warm", "pruned_again")
"""with and without pruning, with a cold and a warm vision cache; and another query about the same pictures"""
PAPER_SIZE = (480, 384)
"""pictures of 180 visual tokens, as in the paper"""


@dataclass(frozen=True)
class EndToEnd:
    """Median seconds per list, and their parts.

    Args:
        candidates: candidates per list
        scorer: "logits" or "generate"
        seconds: by variant, see `VARIANTS`
        speedup: dense with a cold cache over pruned with a warm cache
        parts: seconds by part, of pruned with a warm cache
        phases: seconds of "prefill" and "decode", of the variants with a warm cache
        again: the prefill of another query about the same pictures, over that of a first one
    """

    candidates: int
    scorer: str
    seconds: dict[str, float]
    speedup: Ratio
    parts: dict[str, float]
    phases: dict[str, dict[str, float]]
    again: Ratio


def paper_backbone(width: int) -> Backbone:
    """Make a random model with the depth and the proportions of the paper's, at another width."""
    model = bench_model(width, 36)
    model.config._name_or_path = MODEL
    return Backbone(model, bench_tokenizer(), bench_processor())


def run_end_to_end(
    backbone: Backbone,
    *,
    counts: Sequence[int] = COUNTS,
    scorers: Sequence[str] = ("logits",),
    method: str = "radical",
    keep: float = 0.2,
    profile: Profile | None = None,
    size: tuple[int, int] | None = None,
    rounds: int = 5,
    progress: Progress = silent,
) -> list[EndToEnd]:
    """Time whole rankings, for every scorer and number of candidates.

    Args:
        backbone: the model
        counts: numbers of candidates
        scorers: "logits", "generate"
        method, keep: the pruning method and its budget
        profile: the trust profile, if it is not the model's own
        size: width and height to which the pictures are resized; by default they stay as they are
        rounds: how many interleaved rounds; medians are reported
        progress: shows the progress
    """
    options: dict[str, Any] = {} if profile is None else {"profile": profile}
    pruner = build(method, keep=keep, **options)
    return [
        _measured(backbone, scorer, count, pruner, size, rounds, progress)
        for scorer in scorers
        for count in counts
    ]


def _measured(
    backbone: Backbone,
    scorer: str,
    count: int,
    pruner: Pruner,
    size: tuple[int, int] | None,
    rounds: int,
    progress: Progress,
) -> EndToEnd:
    query, images = generated_list(0, count)
    other = generated_list(1, count)[0]
    if size:
        images = [image.resize(size) for image in images]
    writing: dict[str, Any] = {"scorer": scorer, "max_new_tokens": 2 * count}
    options = {**writing, "prompt_cache_bytes": 0}
    rerankers = {
        "dense_cold": Reranker(backbone, "dense", vision_cache_bytes=0, **options),
        "dense_warm": Reranker(backbone, "dense", **options),
        "pruned_cold": Reranker(backbone, pruner, vision_cache_bytes=0, **options),
        "pruned_warm": Reranker(backbone, pruner, **options),
        "pruned_again": Reranker(backbone, pruner, **writing),
    }
    queries = cycle([query, other])
    parts: dict[str, list[float]] = {}
    spent: dict[str, dict[str, list[float]]] = {name: {} for name in rerankers}

    def ranked(name: str) -> None:
        reports: Sequence[PruningReport] = ()
        # Random weights do not generate an order, but they take the same time.
        with phases(backbone.model) as phase, suppress(ScoringError):
            asked = next(queries) if name == "pruned_again" else query
            reports = rerankers[name].rank(asked, images).reports
        for kind, seconds in phase.items():
            spent[name].setdefault(kind, []).append(sum(seconds))
        if name == "pruned_warm" and reports:
            for part in reports[0].seconds:
                parts.setdefault(part, []).append(sum(report.seconds[part] for report in reports))

    variants = {name: partial(ranked, name) for name in rerankers}
    warm = ("dense_warm", "pruned_warm", "pruned_again")
    times = interleaved(variants, rounds, progress=progress, label=f"N = {count}, {scorer}")
    return EndToEnd(
        count,
        scorer,
        {name: times.median(name) for name in VARIANTS},
        times.ratio("dense_cold", "pruned_warm"),
        _medians(parts),
        {name: _medians(spent[name]) for name in warm},
        Times({name: spent[name]["prefill"][1:] for name in warm}).ratio("pruned_again", "pruned_warm"),
    )


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians without the first round, which fills the cache."""
    return {name: float(np.median(seconds[1:])) for name, seconds in values.items()}


def growth(results: Sequence[EndToEnd], variant: str) -> float:
    """Return the exponent b of seconds = a · N^b, fitted in logarithms.

    Args:
        results: results for several N
        variant: one of `VARIANTS`
    """
    x = [math.log(result.candidates) for result in results]
    y = [math.log(result.seconds[variant]) for result in results]
    return float(np.polyfit(x, y, 1)[0])
