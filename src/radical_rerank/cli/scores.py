"""`radical calibrate MODEL --scores DATASET`: fit probabilities on lists with known matches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from radical_rerank import progress as bars
from radical_rerank.cli.common import log, print_json, print_table
from radical_rerank.errors import InputError

if TYPE_CHECKING:
    from radical_rerank.reranking.fitting import JudgedList

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
    backbone = Backbone.from_pretrained(model, **loading)
    lists: Sequence[JudgedList]
    if Path(dataset).is_file():
        lists = list(islice(read_judged(Path(dataset)), limit))
    else:
        testbed = _testbed(dataset, data)
        first = backbone if backbone.name == testbed.name else None
        lists = judged_lists(
            testbed.for_fitting(dataset, limit),
            limit,
            lambda: testbed.embedder(first or Backbone.from_pretrained(testbed.name)),
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
    profile = replace(profile, scores=(*others, *(one.to_dict() for one in fitted)))
    path = profile.save(out or Profile.cache_path(backbone.identity))
    log.info("saved to %s", path)
    if plot:
        draw_reliability(plot, measured, f"{backbone.name} on {dataset}")
        log.info("drawn to %s", plot)
    if as_json:
        rows = [
            {**one.to_dict(), "measured": asdict(own)}
            for one, own in zip(fitted, measured.values(), strict=True)
        ]
        print_json({"model": backbone.name, "dataset": dataset, "calibrations": rows})
        return
    lines = []
    for one, (keep, own) in zip(fitted, measured.items(), strict=True):
        lines.append(
            [
                f"{keep:.0%}",
                f"{one.temperature:.2f}",
                one.kind,
                f"{own.ece_best_raw:.3f} → {own.ece_best:.3f}",
                f"{own.ece_all_raw:.4f} → {own.ece_all:.4f}",
                f"{own.auroc_raw:.3f} → {own.auroc:.3f}",
                "–" if one.weight is None else f"{one.weight:.2f}",
            ]
        )
    print_table(HEADS, lines, f"{escape(backbone.name)} on {len(lists)} lists of {dataset}")
    Console().print(
        "Raw → fitted; fitted on one half of the lists, measured on the other. Every list is ranked twice, "
        "with its match and with another list's picture in its place."
    )


def read_judged(path: Path) -> Iterator[JudgedList]:
    """Read lists of the user's own, a JSON object per line: query, images, relevant, and scores if known."""
    from radical_rerank.reranking.fitting import JudgedList

    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            images = [str(path.parent / image) for image in record["images"]]
            relevant = [bool(record["relevant"].count(place)) for place in range(len(images))]
            scores = None if record.get("scores") is None else [float(value) for value in record["scores"]]
            if scores is not None and len(scores) != len(images):
                raise ValueError("as many scores as images are needed")
            yield JudgedList(str(record["query"]), images, relevant, scores)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}, line {number}: not a judged list: {error!r}") from None


def _weight(fitted: float | None, reranker: Any) -> float | None:
    """Return the weight of a first stage: the new one, or the one that was fitted before."""
    known = reranker.calibration
    return fitted if fitted is not None or known is None else known.weight
