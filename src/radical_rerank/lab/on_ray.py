"""The runner on Ray Data: every worker has its own Reranker. The records are the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.records import Cell, Key, Records
from radical_rerank.lab.runner import Pools, Runner, work_of
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Profile


@dataclass(frozen=True)
class EvaluationJob:
    """What a worker needs. It loads the model and the data itself.

    Args:
        model: a model id or a folder
        dataset: opens the data set
        cells: the settings
        provenance: facts to write into every record
        pools: the candidates of a first stage, if the data set has no lists of its own
        threads: CPU threads per worker; by default PyTorch decides
        options, profile: as in `Runner`
        dtype: the model's dtype; by default what suits the worker's device
        fingerprint: the model's fingerprint; records of a worker with another model are refused
    """

    model: str
    dataset: Callable[[], Dataset]
    cells: Sequence[Cell]
    provenance: dict[str, Any]
    pools: Pools | None = None
    threads: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    profile: Profile | None = None
    dtype: str | None = None
    fingerprint: str | None = None


class EvaluationWorker:
    """Ranks queries by their numbers and returns the records as JSON lines."""

    def __init__(self, job: EvaluationJob) -> None:
        import torch

        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.job = job
        backbone = Backbone.from_pretrained(job.model, dtype=job.dtype)
        self.runner = Runner(backbone, job.provenance, options=job.options, profile=job.profile)
        self.data = job.dataset()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        lines = []
        for number, there in zip(batch["number"], batch["there"], strict=True):
            work = work_of(self.data, int(number), self.job.pools)
            done = {tuple(key) for key in json.loads(str(there))}
            missing = [
                cell
                for cell in self.job.cells
                if self.runner.key(cell, work.number, work.content) not in done
            ]
            for record in self.runner.ranked(self.data, work, missing):
                lines.append(json.dumps(record, ensure_ascii=False))
        return {"record": lines}


def run_on_ray(
    address: str,
    job: EvaluationJob,
    records: Records,
    count: int,
    *,
    workers: int = 2,
    progress: Progress = silent,
) -> None:
    """Rank the first queries of a data set on Ray, except where a record exists already.

    Args:
        address: "local", or the address of a cluster
        job: what to run
        records: where new records are added
        count: how many queries
        workers: models that run at the same time
        progress: shows the progress over records
    """
    with needs_extra("ray"):
        import ray
    work = _work(job, records, count)
    with _running(ray, address):
        rows = (
            ray.data.from_items(work, override_num_blocks=min(len(work), 4 * workers))
            .map_batches(EvaluationWorker, fn_constructor_args=[job], batch_size=1, concurrency=workers)
            .iter_rows()
        )
        for row in progress(rows, "on Ray"):
            record = json.loads(row["record"])
            if job.fingerprint not in (None, record["fingerprint"]):
                raise InputError(
                    f"a worker loaded another model as {job.model}: its fingerprint is "
                    f"{record['fingerprint']}, not {job.fingerprint}"
                )
            records.add(record)


def _work(job: EvaluationJob, records: Records, count: int) -> list[dict[str, Any]]:
    """Return one item per query, with the keys of its records that exist already.

    Only a worker can tell which keys are missing, because only a worker has the model.
    """
    wanted = {cell.key for cell in job.cells}
    there: dict[str, list[Key]] = {}
    for key in sorted(records.keys()):
        if key[0] in wanted:
            there.setdefault(key[1], []).append(key)
    return [{"number": n, "there": json.dumps(there.get(str(n), []))} for n in range(count)]


@contextmanager
def _running(ray: Any, address: str) -> Iterator[None]:
    """Connect to Ray, unless the caller did. Ends the connection that it made."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = not ray.is_initialized()
    if started and address == "local":
        ray.init(log_to_driver=False, include_dashboard=False)
    elif started:
        ray.init(address, log_to_driver=False)
    try:
        yield
    finally:
        if started:
            ray.shutdown()
