"""The demo: search a gallery of scenes by embedding, then rerank the candidates, unpruned and pruned."""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import scene_gallery
from radical_rerank.embedded.scenes.embedder import SceneEmbedder
from radical_rerank.lab.first_stage import retrieve
from radical_rerank.lab.page import PageRow, Section, write_page
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.reranking import Ranking, Reranker
from radical_rerank.reranking.encoding import VISION_CACHE_BYTES, VisionCache, load_image

log = logging.getLogger("radical_rerank")

COMPARED = (("dense", 1.0), ("radical", 0.2), ("radical", 0.1))
"""(method, fraction of visual tokens kept)"""
RUNS = 3
"""timed runs per ranking"""


def run_demo(out: str | Path, *, queries: int = 8, size: int = 1000, as_json: bool = False) -> Path:
    """Run the demo, print its tables and write its page.

    Args:
        out: the folder of the page
        queries: how many queries
        size: scenes in the gallery, at least 20
        as_json: print JSON instead of tables

    Returns:
        The path of the page.
    """
    data = scene_gallery(size=size, queries=queries, seed=1)
    backbone = Backbone.from_pretrained()
    log.info("embedding a gallery of %d generated scenes", size)
    pools = retrieve(data, SceneEmbedder(backbone), CANDIDATES)
    cache = VisionCache(VISION_CACHE_BYTES)
    rerankers = [Reranker(backbone, method, keep=keep, vision_cache=cache) for method, keep in COMPARED]
    rows, sections = [], []
    for task in data.tasks:
        names = [name for name, _ in pools[task.id]]
        relevant = [place for place, name in enumerate(names) if name in task.relevant]
        log.info("ranking %d candidates for “%s”", CANDIDATES, task.text)
        row, section = _ranked(rerankers, task.text, [load_image(data.picture(n)) for n in names], relevant)
        rows.append(row)
        sections.append(section)
    intro = (
        f"{CANDIDATES} candidates from a gallery of {size} generated scenes, found by embedding and ranked "
        "listwise by the small model that ships with the package. Move a slider to see which visual tokens "
        "are alive after each stage: the bright ones are, the grey ones were dropped. A green frame marks a "
        "match."
    )
    page = write_page(Path(out) / "index.html", "What decided the order", intro, sections)
    if as_json:
        sys.stdout.write(json.dumps({"gallery": size, "rows": rows, "page": str(page)}, indent=1) + "\n")
    else:
        methods = [_name(reranker) for reranker in rerankers]
        _print_ranks(rows, methods)
        _print_means(rows, methods)
    log.info("the candidates in order, with their tokens: %s", page)
    return page


def _ranked(
    rerankers: Sequence[Reranker], query: str, images: Sequence[Image.Image], relevant: Sequence[int]
) -> tuple[dict[str, Any], Section]:
    """Rank the candidates of one query by every method. Returns facts for the tables, and for the page."""
    facts: dict[str, Any] = {"query": query, "first stage": _first_match(range(len(images)), relevant)}
    shown = []
    for reranker in rerankers:
        ranking, seconds = _timed(reranker, query, images)
        name = _name(reranker)
        facts[name] = _facts(ranking, relevant, seconds)
        shown.append(PageRow(name, _sentence(facts[name]), ranking))
    return facts, Section(query, images, relevant, shown)


def _timed(reranker: Reranker, query: str, images: Sequence[Image.Image]) -> tuple[Ranking, float]:
    """Return the ranking, and the median of its seconds without encoding the pictures."""
    reranker.rank(query, images)  # fills the vision cache
    rankings = [reranker.rank(query, images) for _ in range(RUNS)]
    seconds = [sum(ranking.reports[0].seconds.values()) for ranking in rankings]
    return rankings[-1], statistics.median(seconds)


def _first_match(order: Sequence[int], relevant: Sequence[int]) -> int | None:
    """Return the rank of the first match, from 1; None if there is none."""
    return next((place for place, number in enumerate(order, start=1) if number in relevant), None)


def _facts(ranking: Ranking, relevant: Sequence[int], seconds: float) -> dict[str, Any]:
    report = ranking.report
    assert report is not None
    return {
        "rank": _first_match(ranking.order, relevant),
        "visual_tokens": report.visual_tokens,
        "visual_tokens_left": report.visual_tokens_left,
        "flops_saved": report.flops_saved,
        "kv_saved": report.kv_saved,
        "seconds": seconds,
    }


def _sentence(facts: dict[str, Any]) -> str:
    return (
        f"match at {facts['rank'] or '–'}; {facts['visual_tokens']} → {facts['visual_tokens_left']} visual "
        f"tokens, {facts['flops_saved']:.0%} of the FLOPs saved, {1000 * facts['seconds']:.0f} ms"
    )


def _name(reranker: Reranker) -> str:
    method = type(reranker.pruner).__name__
    return method if reranker.pruner.keep == 1 else f"{method} {reranker.pruner.keep:.0%}"


def _print_ranks(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    title = f"rank of the first match among {CANDIDATES} candidates"
    table = Table(title=title, title_justify="left")
    table.add_column("query", overflow="fold")
    for name in ("first stage", *methods):
        table.add_column(name, justify="right")
    for row in rows:
        ranks = [row["first stage"], *(row[name]["rank"] for name in methods)]
        table.add_row(escape(row["query"]), *(str(rank or "–") for rank in ranks))
    Console().print(table)


def _print_means(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    table = Table(title=f"means over {len(rows)} queries", title_justify="left")
    for name in ("method", "visual tokens", "FLOPs saved", "KV saved", "ms"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name in methods:
        mean = {
            key: statistics.mean(row[name][key] for row in rows) for key in rows[0][name] if key != "rank"
        }
        table.add_row(
            name,
            f"{mean['visual_tokens']:.0f} → {mean['visual_tokens_left']:.0f}",
            f"{mean['flops_saved']:.0%}",
            f"{mean['kv_saved']:.0%}",
            f"{1000 * mean['seconds']:.0f}",
        )
    Console().print(table)
