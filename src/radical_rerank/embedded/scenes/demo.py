"""The demo: find a scene among a thousand, first by embedding, then by the embedded reranker."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import scene_gallery
from radical_rerank.embedded.scenes.embedder import SceneEmbedder
from radical_rerank.lab.catalog import retrieve
from radical_rerank.lab.page import PageRow, Section, write_page
from radical_rerank.reranking import Ranking, Reranker
from radical_rerank.reranking.encoding import VisionCache

METHODS = (("dense", 1.0), ("radical", 0.2), ("radical", 0.1))
RUNS = 3


def run_demo(out: Path, *, queries: int = 8, size: int = 1000, as_json: bool = False) -> None:
    console = Console(stderr=True, highlight=False)
    data = scene_gallery(size=size, queries=queries, seed=1)
    backbone = Backbone.from_pretrained()
    console.print(f"embedding a gallery of {size} generated scenes")
    pools = retrieve(data, SceneEmbedder(backbone), 20)
    cache = VisionCache(1 << 28)
    rerankers = [Reranker(backbone, method, keep=keep, vision_cache=cache) for method, keep in METHODS]
    rows, sections = [], []
    for task in data.tasks:
        names = [name for name, _ in pools[task.id]]
        images = [data.picture(name) for name in names]
        relevant = [place for place, name in enumerate(names) if name in task.relevant]
        console.print(f"ranking 20 candidates for “{escape(task.text)}”")
        ran = [_timed(reranker, task.text, images) for reranker in rerankers]
        row: dict[str, Any] = {"query": task.text, "first stage": _rank(range(20), relevant)}
        shown = []
        for reranker, (ranking, seconds) in zip(rerankers, ran, strict=True):
            facts = _facts(ranking, relevant, seconds)
            row[_name(reranker)] = facts
            shown.append(PageRow(_name(reranker), _sentence(facts), ranking))
        rows.append(row)
        sections.append(Section(task.text, images, relevant, shown))
    page = write_page(
        out / "index.html",
        "What decided the order",
        f"A gallery of {size} generated scenes, 20 candidates by embedding, ranked listwise by the small "
        "model that ships with the package. Move a slider to see which visual tokens are alive after each "
        "stage: bright ones are, grey ones were dropped. A green frame is a match.",
        sections,
    )
    if as_json:
        sys.stdout.write(json.dumps({"gallery": size, "rows": rows, "page": str(page)}, indent=1) + "\n")
    else:
        _print(rows, [_name(reranker) for reranker in rerankers])
    console.print(f"the candidates in order, token by token: {page}")


def _timed(reranker: Reranker, query: str, images: Sequence[Any]) -> tuple[Ranking, float]:
    """The ranking, and the median seconds once the pictures are encoded."""
    ranking = reranker.rank(query, images)
    seconds = []
    for _ in range(RUNS):
        ranking = reranker.rank(query, images)
        seconds.append(sum(ranking.reports[0].seconds.values()))
    return ranking, statistics.median(seconds)


def _rank(order: Sequence[int], relevant: Sequence[int]) -> int | None:
    """Where the first match is, from 1; None if there is none."""
    return next((place for place, number in enumerate(order, start=1) if number in relevant), None)


def _facts(ranking: Ranking, relevant: Sequence[int], seconds: float) -> dict[str, Any]:
    report = ranking.report
    assert report is not None
    return {
        "rank": _rank(ranking.order, relevant),
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


def _print(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    console = Console()
    table = Table(title="rank of the first match among 20 candidates", title_justify="left")
    table.add_column("query", overflow="fold")
    for name in ("first stage", *methods):
        table.add_column(name, justify="right")
    for row in rows:
        ranks = [row["first stage"], *(row[name]["rank"] for name in methods)]
        table.add_row(escape(row["query"]), *(str(rank or "–") for rank in ranks))
    console.print(table)
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
    console.print(table)
