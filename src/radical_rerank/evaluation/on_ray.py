"""The same runner on Ray Data: one reranker per worker, the same records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.evaluation.datasets import Dataset
from radical_rerank.evaluation.records import Cell, Records
from radical_rerank.evaluation.runner import Pools, Runner, Track


@dataclass(frozen=True)
class Job:
    """What a worker needs to know; it loads model and data itself."""

    model: str
    dataset: Callable[[], Dataset]
    cells: Sequence[Cell]
    provenance: dict[str, Any]
    pools: Pools | None = None
    threads: int | None = None


class Worker:
    """Ranks queries by number; gives their records as JSON lines."""

    def __init__(self, job: Job) -> None:
        import torch

        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.job = job
        self.runner = Runner(Backbone.from_pretrained(job.model), job.provenance)
        self.data = job.dataset()
        self.cells = {cell.key: cell for cell in job.cells}

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        lines = []
        for number, missing in zip(batch["number"], batch["missing"], strict=True):
            cells = [self.cells[key] for key in json.loads(str(missing))]
            for record in self.runner.records_of(self.data, int(number), cells, self.job.pools):
                lines.append(json.dumps(record, ensure_ascii=False))
        return {"record": lines}


def run_on_ray(
    address: str,
    job: Job,
    records: Records,
    count: int,
    *,
    workers: int = 2,
    track: Track = lambda items, label: items,
) -> None:
    """Run what is missing of the first `count` queries. address: "local", or a cluster's."""
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray: pip install 'radical-rerank[ray]'") from None
    work = []
    for number in range(count):
        missing = [cell.key for cell in job.cells if not records.has(cell, str(number))]
        if missing:
            work.append({"number": number, "missing": json.dumps(missing)})
    if not work:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = not ray.is_initialized()
    if started:
        options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
        ray.init(**options) if address == "local" else ray.init(address, log_to_driver=False)
    try:
        rows = (
            ray.data.from_items(work, override_num_blocks=min(len(work), 4 * workers))
            .map_batches(Worker, fn_constructor_args=[job], batch_size=1, concurrency=workers)
            .iter_rows()
        )
        for row in track(rows, "on Ray"):
            records.add(json.loads(row["record"]))
    finally:
        if started:
            ray.shutdown()
