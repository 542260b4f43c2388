"""The demo: twenty generated pictures, ranked unpruned and pruned, by a tiny model with random weights."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from radical_rerank.backbones import Backbone
from radical_rerank.backbones.tiny import write_tiny
from radical_rerank.pruning import Profile
from radical_rerank.reranking import Reranker, calibrate
from radical_rerank.reranking.pictures import draw_list

RUNS = 5


def run_demo(as_json: bool = False) -> None:
    console = Console(stderr=True)
    query, images, _ = draw_list(seed=7, count=20)
    with tempfile.TemporaryDirectory() as folder:
        backbone = Backbone.from_pretrained(write_tiny(folder, "qwen3_vl", layers=16))
        console.print("Qwen3-VL architecture, 16 layers, RANDOM weights: the order below means nothing,")
        console.print("the tokens, the arithmetic saved and the time are real.")
        profile = calibrate(backbone, [draw_list(seed, 20)[:2] for seed in range(4)])
        rows = [
            _measure(backbone, profile, method, keep, query, images)
            for method, keep in (("dense", 1.0), ("radical", 0.2), ("radical", 0.1))
        ]
    if as_json:
        sys.stdout.write(json.dumps({"query": query, "weights": "random", "rows": rows}, indent=1) + "\n")
        return
    columns = ("method", "keep", "visual tokens", "FLOPs saved", "KV saved", "ms", "first five")
    table = Table(*columns, title=f"“{query}”, 20 candidates")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['keep']:.0%}",
            f"{row['visual_tokens']} → {row['visual_tokens_left']}",
            f"{row['flops_saved']:.0%}",
            f"{row['kv_saved']:.0%}",
            f"{1000 * row['seconds']:.0f}",
            " ".join(map(str, row["order"][:5])),
        )
    Console().print(table)


def _measure(
    backbone: Backbone, profile: Profile, method: str, keep: float, query: str, images: list[Image.Image]
) -> dict[str, Any]:
    options: dict[str, Any] = {} if method == "dense" else {"calibration": profile}
    reranker = Reranker(backbone, method, keep=keep, **options)
    ranking = reranker.rank(query, images)  # fills the vision cache
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        ranking = reranker.rank(query, images)
        seconds.append(time.perf_counter() - start)
    report = ranking.report
    assert report is not None
    return {
        "method": method,
        "keep": keep,
        "visual_tokens": report.visual_tokens,
        "visual_tokens_left": report.visual_tokens_left,
        "flops_saved": report.flops_saved,
        "kv_saved": report.kv_saved,
        "seconds": statistics.median(seconds),
        "order": ranking.order,
    }
