"""The demo: search a gallery by embedding, then rerank the candidates, unpruned and pruned."""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.photos.datasets import sample_gallery
from radical_rerank.embedded.photos.embedder import PhotoEmbedder
from radical_rerank.embedded.scenes.datasets import scene_gallery
from radical_rerank.embedded.scenes.embedder import SceneEmbedder
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.first_stage import retrieve
from radical_rerank.lab.page import PageRow, Section, write_page
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.reranking import Ranking, Reranker
from radical_rerank.reranking.encoding import VISION_CACHE_BYTES, VisionCache, load_image
from radical_rerank.retrieval import Embedder

log = logging.getLogger("radical_rerank")

COMPARED = (("dense", 1.0), ("radical", 0.2), ("radical", 0.1))
"""(method, fraction of visual tokens kept)"""
RUNS = 3
"""timed runs per ranking"""
READING = (
    "Candidates are found by embedding and ranked listwise. Move a slider to see which visual tokens are "
    "alive after each stage: the bright ones are, the grey ones were dropped. A green frame marks a match."
)


@dataclass(frozen=True)
class World:
    """Pictures to search, and the model that knows them.

    Args:
        model: the name of a model that ships; also of its page
        what: what the pictures are
        data: the gallery and the queries
        embedder: the first stage
    """

    model: str
    what: str
    data: Dataset
    embedder: Callable[[Backbone], Embedder]


def run_demo(out: str | Path, *, queries: int = 8, size: int = 1000, as_json: bool = False) -> list[Path]:
    """Run the demo on photographs and on generated scenes, print its tables and write its pages.

    Args:
        out: the folder of the pages
        queries: how many queries over the scenes
        size: scenes in the gallery, at least 20
        as_json: print JSON instead of tables

    Returns:
        The paths of the pages.
    """
    worlds = [
        World("photos", "scikit-image's sample pictures", sample_gallery(), PhotoEmbedder),
        World("scenes", "generated scenes", scene_gallery(size=size, queries=queries, seed=1), SceneEmbedder),
    ]
    results = [_show(world, Path(out), as_json) for world in worlds]
    if as_json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return [Path(result["page"]) for result in results]


def _show(world: World, out: Path, as_json: bool) -> dict[str, Any]:
    """Rank the queries of one world. Prints its tables, writes its page and returns its facts."""
    data, backbone = world.data, Backbone.from_pretrained(world.model)
    log.info("embedding %d pictures: %s", len(data.gallery), world.what)
    pools = retrieve(data, world.embedder(backbone), CANDIDATES)
    cache = VisionCache(VISION_CACHE_BYTES)
    rerankers = [Reranker(backbone, method, keep=keep, vision_cache=cache) for method, keep in COMPARED]
    rows, sections = [], []
    for task in data.tasks:
        names = [name for name, _ in pools[task.id]]
        relevant = [place for place, name in enumerate(names) if name in task.relevant]
        log.info("ranking %d candidates for “%s”", len(names), task.text)
        row, section = _ranked(rerankers, task.text, [load_image(data.picture(n)) for n in names], relevant)
        rows.append(row)
        sections.append(section)
    intro = (
        f"Pictures: {world.what}, {len(data.gallery)} in all. Model: {world.model}, which ships. {READING}"
    )
    page = write_page(out / f"{world.model}.html", "What decided the order", intro, sections)
    if not as_json:
        methods = [_name(reranker) for reranker in rerankers]
        _print_ranks(rows, methods, world.what)
        _print_means(rows, methods)
    log.info("the candidates in order, with their tokens: %s", page)
    return {"model": world.model, "gallery": len(data.gallery), "rows": rows, "page": str(page)}


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


def _print_ranks(rows: Sequence[dict[str, Any]], methods: Sequence[str], what: str) -> None:
    title = f"rank of the first match; {what}"
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
