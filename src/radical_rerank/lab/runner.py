"""Runs settings over a data set and writes one record per query and setting; goes on after a kill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError, RadicalError
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.metrics import measure
from radical_rerank.lab.records import Cell, Key, Records, digest_of
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Profile, build
from radical_rerank.reranking import Query, Reranker
from radical_rerank.reranking.calibration import profile_of
from radical_rerank.reranking.encoding import VISION_CACHE_BYTES, Document, VisionCache

Pools = Mapping[str, Sequence[str]]
"""per query the candidates of the first stage, best first"""


@dataclass(frozen=True)
class Work:
    """One query with its candidates, and a digest of both: of the words, the judgements and every picture."""

    number: int
    task: Task
    candidates: Sequence[str]
    pictures: Mapping[str, Document]
    content: str


@dataclass
class Runner:
    """Ranks a data set's lists with every cell. All cells share one model and one vision cache.

    options: for every Reranker (scorer, max_image_tokens …)
    profile: the model's trust profile; None: looked up or measured when a method needs it
    """

    backbone: Backbone
    provenance: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    profile: Profile | None = None

    def __post_init__(self) -> None:
        self._cache = VisionCache(VISION_CACHE_BYTES)
        self._rerankers: dict[str, Reranker] = {}
        self._settings: dict[str, str] = {}
        # Prompts and pictures as every cell has them, without pruning; a bad option is told at once.
        self.plain = self.reranker(Cell("Dense", "dense"))

    def run(
        self,
        data: Dataset,
        cells: Sequence[Cell],
        records: Records,
        *,
        pools: Pools | None = None,
        limit: int | None = None,
        progress: Progress = silent,
    ) -> None:
        """Query by query, so that every cell finds the pictures encoded."""
        count = len(data.tasks) if limit is None else min(limit, len(data.tasks))
        for number in progress(range(count), data.name):
            work = work_of(data, number, pools)
            for record in self.ranked(data, work, self.missing(work, cells, records)):
                records.add(record)

    def missing(self, work: Work, cells: Sequence[Cell], records: Records) -> list[Cell]:
        """The cells that have no record of this query yet. All of them are claimed for this run."""
        return [cell for cell in cells if records.claim(self.key(cell, work.number, work.content))]

    def records_of(
        self, data: Dataset, number: int, cells: Sequence[Cell], pools: Pools | None = None
    ) -> Iterator[dict[str, Any]]:
        """The records of one query."""
        return self.ranked(data, work_of(data, number, pools), cells)

    def ranked(self, data: Dataset, work: Work, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
        task = work.task
        reference = None if task.reference is None else work.pictures[task.reference]
        for cell in cells:
            order = list(work.candidates)
            random.Random(f"{cell.seed} {task.id}").shuffle(order)
            reranker = self.reranker(cell)
            pictures = [work.pictures[name] for name in order]
            try:
                ranking = reranker.rank(Query(task.text, reference), pictures)
            except RadicalError as error:
                raise type(error)(f"{data.name}, query {task.id}, {cell.name}: {error}") from error
            names = [order[i] for i in ranking.order]
            found = measure({task.id: names}, {task.id: task.relevant})[task.id]
            totals = ranking.totals
            yield {
                "dataset": data.name,
                "query": task.text,
                **self.named(cell, work.number, work.content),
                "ranking": names,
                "scores": [round(result.score, 5) for result in ranking],
                "relevant": task.relevant,
                "in_pool": any(name in task.relevant for name in work.candidates),
                "measures": found,
                "candidates": len(work.candidates),
                "tokens": totals.tokens,
                "visual_tokens": totals.visual_tokens,
                "visual_tokens_left": totals.visual_tokens_left,
                "average_tokens": totals.average_tokens,
                "flops_saved": totals.flops_saved,
                "kv_saved": totals.kv_saved,
                "repairs": ranking.repairs,
                "unreadable": ranking.unreadable,
                "seconds": {part: round(spent, 6) for part, spent in totals.seconds.items()},
                **self.provenance,
            }

    def key(self, cell: Cell, number: int, content: str) -> Key:
        """What names the record of a query: every fact that could change it. `content`: of the query."""
        return cell.key, str(number), digest_of([self._setting(cell), content])

    def named(self, cell: Cell, number: int, content: str) -> dict[str, Any]:
        """The head of a record: its key, and what the key stands for, where that can be read."""
        cell_key, task, setting = self.key(cell, number, content)
        return {
            "task": task,
            "cell": cell.name,
            "cell_key": cell_key,
            "setting": setting,
            "method": cell.method,
            "keep": cell.keep,
            "seed": cell.seed,
            "options": cell.options,
            "data": cell.data,
            **self.reranker(cell).settings,
        }

    def _setting(self, cell: Cell) -> str:
        """A digest of the model and of all that a Reranker was told, defaults and trust profile included."""
        if cell.key not in self._settings:
            reranker = self.reranker(cell)
            facts = [reranker.settings, self.backbone.input_digest, reranker.pruner, cell.seed]
            self._settings[cell.key] = digest_of(facts)
        return self._settings[cell.key]

    def reranker(self, cell: Cell) -> Reranker:
        if cell.key not in self._rerankers:
            pruner = build(cell.method, keep=cell.keep, **cell.options)
            if "seed" not in cell.options:
                pruner = pruner.with_seed(cell.seed)
            if pruner.needs_profile:
                pruner = pruner.with_profile(self.known_profile)
            self._rerankers[cell.key] = Reranker(
                # One answer that cannot be read must not end a run of thousands: tables say how often it was.
                self.backbone,
                pruner,
                vision_cache=self._cache,
                **{"on_unreadable": "keep", **self.options},
            )
        return self._rerankers[cell.key]

    @property
    def known_profile(self) -> Profile:
        """The trust profile, looked up or measured when it is first needed."""
        if self.profile is None:
            self.profile = profile_of(self.plain)
        return self.profile


def work_of(data: Dataset, number: int, pools: Pools | None = None) -> Work:
    """One query of a data set, with its pool where there are pools."""
    task = data.tasks[number]
    candidates = _candidates(data, task, pools)
    reference = [] if task.reference is None else [task.reference]
    shown = [data.contents(candidates), data.contents(reference)]
    content = digest_of([data.name, list(candidates), replace(task, candidates=None), shown])
    pictures = {name: data.picture(name) for name in (*candidates, *reference)}
    return Work(number, task, candidates, pictures, content)


def _candidates(data: Dataset, task: Task, pools: Pools | None) -> Sequence[str]:
    candidates = task.candidates if pools is None else pools.get(task.id)
    if not candidates:
        where = "in the pools" if pools is not None else f"in {data.name}; it needs a first stage"
        raise InputError(f"query {task.id} ({task.text!r}) has no candidates {where}")
    if len(set(candidates)) < len(candidates):
        raise InputError(f"the pool of query {task.id} names a picture twice")
    return candidates
