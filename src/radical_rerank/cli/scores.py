"""`radical calibrate MODEL --scores DATASET`: fit probabilities on lists with known matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from radical_rerank import progress as bars
from radical_rerank.cli.common import log, print_json, print_table
from radical_rerank.errors import InputError

if TYPE_CHECKING:
    from radical_rerank.lab.datasets import Dataset
    from radical_rerank.lab.testbed import Testbed
    from radical_rerank.reranking.fitting import Measured
    from radical_rerank.reranking.scores import ScoreCalibration

KEEPS = (1.0, 0.2, 0.1)
"""the budgets that calibrations are fitted at"""
HEADS = ("kept", "temperature", "map", "ECE of the best", "ECE of all", "AUROC of a match", "weight")


def calibrate_scores(
    model: str,
    dataset: str,
    *,
    limit: int,
    keeps: Sequence[float],
    data: str | None,
    out: str | None,
    plot: str | None,
    loading: dict[str, Any],
    as_json: bool,
) -> None:
    """Fit calibrations at several budgets, keep them in the model's profile, and show how good they are."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.cli.lab import _testbed
    from radical_rerank.lab.judged import draw_reliability, judged_lists
    from radical_rerank.pruning import Profile
    from radical_rerank.reranking import Reranker
    from radical_rerank.reranking.calibration import profile_of
    from radical_rerank.reranking.encoding import VISION_CACHE_BYTES, VisionCache
    from radical_rerank.reranking.fitting import fit_and_measure

    if any(not 0 < keep <= 1 for keep in keeps):
        raise InputError("every --keep must lie between 0 and 1")
    testbed = _testbed(dataset, data)
    source = _lists(dataset, testbed, limit)
    backbone = Backbone.from_pretrained(model, **loading)
    first_stage = backbone if backbone.name == testbed.name else None
    lists = judged_lists(
        source, limit, lambda: testbed.embedder(first_stage or Backbone.from_pretrained(testbed.name))
    )
    profile = profile_of(backbone)
    cache = VisionCache(VISION_CACHE_BYTES)
    fitted, measured = [], {}
    for keep in keeps:
        pruner = Reranker(backbone, keep=keep).pruner.with_profile(profile)
        reranker = Reranker(backbone, pruner, vision_cache=cache)
        one, measured[keep] = fit_and_measure(reranker, lists, progress=bars.bar)
        fitted.append(replace(one, weight=_weight(one.weight, reranker)))
    settings = [one.settings for one in fitted]
    others = [one for one in profile.scores if one.get("settings") not in settings]
    scores = (*others, *(one.to_dict() for one in fitted))
    # A published profile becomes this model's own: scores belong to the very weights that gave them.
    profile = replace(profile, scores=scores, fingerprint=backbone.fingerprint)
    path = profile.save(out or Profile.cache_path(backbone.identity))
    log.info("saved to %s", path)
    if plot:
        draw_reliability(plot, measured, f"{backbone.name} on {source.name}")
        log.info("drawn to %s", plot)
    if as_json:
        rows = [
            {**one.to_dict(), "measured": asdict(own)}
            for one, own in zip(fitted, measured.values(), strict=True)
        ]
        print_json({"model": backbone.name, "dataset": source.name, "calibrations": rows})
        return
    _show(fitted, measured, f"{escape(backbone.name)} on {len(lists)} lists of {source.name}")


def _show(fitted: Sequence[ScoreCalibration], measured: dict[float, Measured], title: str) -> None:
    lines = [
        [
            f"{keep:.0%}",
            f"{one.temperature:.2f}",
            one.kind,
            f"{own.ece_best_raw:.3f} → {own.ece_best:.3f}",
            f"{own.ece_all_raw:.4f} → {own.ece_all:.4f}",
            f"{own.auroc_raw:.3f} → {own.auroc:.3f}",
            "–" if one.weight is None else f"{one.weight:.2f}",
        ]
        for one, (keep, own) in zip(fitted, measured.items(), strict=True)
    ]
    print_table(HEADS, lines, title)
    Console().print(
        "Raw → fitted; fitted on one half of the lists, measured on the other. Every list is ranked twice, "
        "with its match and with another list's picture in its place."
    )


def _lists(dataset: str, testbed: Testbed, limit: int) -> Dataset:
    """Return the user's own lists, or those of the testbed."""
    from radical_rerank.lab.catalog import LISTS
    from radical_rerank.lab.own_lists import own_lists

    return own_lists(dataset) if dataset.endswith(LISTS) else testbed.for_fitting(dataset, limit)


def _weight(fitted: float | None, reranker: Any) -> float | None:
    """Return the weight of a first stage: the new one, or the one that was fitted before."""
    known = reranker.calibration
    return fitted if fitted is not None or known is None else known.weight
