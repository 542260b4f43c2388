"""Runs settings over a data set and writes one record per query and setting; goes on after a kill."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.evaluation.datasets import Dataset, Task
from radical_rerank.evaluation.metrics import measure
from radical_rerank.evaluation.records import Cell, Records
from radical_rerank.pruning import Profile, build
from radical_rerank.pruning.radical import RaDiCal
from radical_rerank.reranking import Query, Reranker
from radical_rerank.reranking.cache import VisionCache
from radical_rerank.reranking.calibration import profile_of

Track = Callable[[Iterable[Any], str], Iterable[Any]]
Pools = Mapping[str, Sequence[str]]
"""per query the candidates of the first stage, best first"""


@dataclass
class Runner:
    """Ranks a data set's lists with every cell. All cells share one model and one vision cache.

    say: hears of calibration; rerank options (scorer, max_image_tokens …) go to every Reranker
    """

    backbone: Backbone
    provenance: dict[str, Any]
    say: Callable[[str], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cache = VisionCache(1 << 30)
        self._rerankers: dict[str, Reranker] = {}
        self._profile: Profile | None = None

    def run(
        self,
        data: Dataset,
        cells: Sequence[Cell],
        records: Records,
        *,
        pools: Pools | None = None,
        limit: int | None = None,
        track: Track = lambda items, label: items,
    ) -> None:
        """Query by query, so that every cell finds the pictures encoded."""
        count = len(data.tasks) if limit is None else min(limit, len(data.tasks))
        for number in track(range(count), data.name):
            missing = [cell for cell in cells if not records.has(cell, str(number))]
            for record in self.records_of(data, number, missing, pools):
                records.add(record)

    def records_of(
        self, data: Dataset, number: int, cells: Sequence[Cell], pools: Pools | None = None
    ) -> Iterator[dict[str, Any]]:
        """The records of one query."""
        if not cells:
            return
        task = data.tasks[number]
        candidates = _candidates(data, task, pools)
        pictures = {name: data.picture(name) for name in candidates}
        reference = None if task.reference is None else data.picture(task.reference)
        for cell in cells:
            order = list(candidates)
            random.Random(f"{cell.seed} {task.id}").shuffle(order)
            reranker = self.reranker(cell)
            ranking = reranker.rank(Query(task.text, reference), [pictures[name] for name in order])
            names = [order[i] for i in ranking.order]
            found = measure({task.id: names}, {task.id: task.relevant})[task.id]
            totals = ranking.totals
            yield {
                "dataset": data.name,
                "task": str(number),
                "query": task.text,
                "cell": cell.name,
                "cell_key": cell.key,
                "method": cell.method,
                "keep": cell.keep,
                "seed": cell.seed,
                "options": cell.options,
                "data": cell.data,
                "model": self.backbone.name,
                "ranking": names,
                "scores": [round(result.score, 5) for result in ranking],
                "relevant": task.relevant,
                "in_pool": any(name in task.relevant for name in candidates),
                "measures": found,
                "candidates": len(candidates),
                "tokens": totals.tokens,
                "visual_tokens": totals.visual_tokens,
                "visual_tokens_left": totals.visual_tokens_left,
                "average_tokens": totals.average_tokens,
                "flops_saved": totals.flops_saved,
                "kv_saved": totals.kv_saved,
                "repairs": ranking.repairs,
                "seconds": {part: round(spent, 6) for part, spent in totals.seconds.items()},
                **self.provenance,
            }

    def reranker(self, cell: Cell) -> Reranker:
        if cell.key not in self._rerankers:
            options = dict(cell.options)
            if issubclass(type(build(cell.method)), RaDiCal):
                options = {"calibration": self.profile, "seed": cell.seed, **options}
            pruner = build(cell.method, keep=cell.keep, **options)
            self._rerankers[cell.key] = Reranker(
                self.backbone, pruner, vision_cache=self._cache, **self.options
            )
        return self._rerankers[cell.key]

    @property
    def profile(self) -> Profile:
        if self._profile is None:
            self._profile = profile_of(self.backbone, say=self.say)
        return self._profile


def _candidates(data: Dataset, task: Task, pools: Pools | None) -> Sequence[str]:
    candidates = task.candidates if pools is None else pools.get(task.id)
    if not candidates:
        where = "in the pools" if pools is not None else f"in {data.name}; it needs a first stage"
        raise InputError(f"query {task.id} ({task.text!r}) has no candidates {where}")
    if len(set(candidates)) < len(candidates):
        raise InputError(f"the pool of query {task.id} names a picture twice")
    return candidates
