"""The runner: ranks a data set under several settings and writes one record per query and setting."""

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
from radical_rerank.reranking import Query, Ranking, Reranker
from radical_rerank.reranking.calibration import profile_of
from radical_rerank.reranking.encoding import VISION_CACHE_BYTES, VisionCache

Pools = Mapping[str, Sequence[str]]
"""per query the candidates of a first stage, best first"""
Scores = Mapping[str, Mapping[str, float]]
"""per query the first stage's score of each candidate"""


@dataclass(frozen=True)
class QueryWork:
    """One query with its candidates.

    Args:
        number: the query's number in the data set
        task: the query
        candidates: the ids of its candidates
        query: the query with its pictures
        documents: the candidates by id, as `Reranker.rank` takes them
        content: a digest of the query, the judgements, and all texts and pictures
    """

    number: int
    task: Task
    candidates: Sequence[str]
    query: Query
    documents: Mapping[str, Any]
    content: str


@dataclass
class Runner:
    """Ranks the lists of a data set under every cell. All cells share one model and one vision cache.

    Args:
        backbone: the model
        provenance: facts to write into every record (see `provenance`)
        options: options of every Reranker (scorer, max_image_tokens, …)
        profile: the model's trust profile; by default it is looked up, or measured, when a method needs it

    Example:
        >>> from radical_rerank import generated_list
        >>> query, images = generated_list(0, candidates=4)
        >>> task = Task("q1", query, {"0": 1}, candidates=("0", "1", "2", "3"))
        >>> data = Dataset("example", [task], lambda name: images[int(name)])
        >>> records = Records()
        >>> cells = [Cell("Dense", "dense"), Cell("FastV 20%", "fastv", 0.2)]
        >>> Runner(Backbone.from_pretrained("scenes")).run(data, cells, records)
        >>> [record["measures"]["R@1"] for record in records.claimed()]
        [1.0, 1.0]
    """

    backbone: Backbone
    provenance: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    profile: Profile | None = None

    def __post_init__(self) -> None:
        self._cache = VisionCache(VISION_CACHE_BYTES)
        self._rerankers: dict[str, Reranker] = {}
        self._settings: dict[str, str] = {}
        self._tuned_pairs = () if self.profile is None else self.profile.safety
        """what `radical tune` saw: only cells that rank in two orders use it"""
        self.plain = self.reranker(Cell("Dense", "dense"))
        """the Reranker without pruning; making it here also checks the options before anything runs"""

    def run(
        self,
        data: Dataset,
        cells: Sequence[Cell],
        records: Records,
        *,
        pools: Pools | None = None,
        scores: Scores | None = None,
        limit: int | None = None,
        progress: Progress = silent,
    ) -> None:
        """Rank every query under every cell, except where a record exists already.

        Args:
            data: the data set
            cells: the settings
            records: where existing records are looked up and new ones are added
            pools: the candidates of a first stage, if the data set has no lists of its own
            scores: the first stage's scores, to mix into the ranking; the cells' `data` has their weight
            limit: rank only the first queries, up to this number
            progress: shows the progress over queries
        """
        count = len(data.tasks) if limit is None else min(limit, len(data.tasks))
        # Query by query, not cell by cell: a query's pictures are then encoded only once.
        for number in progress(range(count), data.name):
            work = work_of(data, number, pools)
            missing = []
            for cell in self.missing(work, cells, records):
                known = records.elsewhere(self.key(cell, number, work.content))
                if known is None:
                    missing.append(cell)
                else:
                    records.add({**known, **self.named(cell, number, work.content)})
            for record in self.ranked(data, work, missing, scores):
                records.add(record)

    def missing(self, work: QueryWork, cells: Sequence[Cell], records: Records) -> list[Cell]:
        """Claim the records of a query under all these cells. Returns the cells that have no record yet."""
        return [cell for cell in cells if records.claim(self.key(cell, work.number, work.content))]

    def records_of(
        self, data: Dataset, number: int, cells: Sequence[Cell], pools: Pools | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rank one query under these cells. Yields the records."""
        return self.ranked(data, work_of(data, number, pools), cells)

    def ranked(
        self, data: Dataset, work: QueryWork, cells: Sequence[Cell], scores: Scores | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rank a prepared query under these cells. Yields the records."""
        task = work.task
        for cell in cells:
            order = list(work.candidates)
            random.Random(f"{cell.seed} {task.id}").shuffle(order)
            reranker = self.reranker(cell)
            try:
                first = None if scores is None else [scores[task.id][name] for name in order]
                ranking = reranker.rank(
                    work.query,
                    [work.documents[name] for name in order],
                    scores=first,
                    weight=cell.data.get("weight"),
                    permutations=cell.data.get("permutations"),
                )
            except RadicalError as error:
                raise type(error)(f"{data.name}, query {task.id}, {cell.name}: {error}") from error
            yield self._record(data, work, cell, order, ranking)

    def _record(
        self, data: Dataset, work: QueryWork, cell: Cell, order: Sequence[str], ranking: Ranking
    ) -> dict[str, Any]:
        """Return the record of a ranking. order: the candidates as they stood in the prompt"""
        task, totals = work.task, ranking.totals
        names = [order[i] for i in ranking.order]
        return {
            "dataset": data.name,
            "query": task.text,
            **self.named(cell, work.number, work.content),
            "ranking": names,
            "scores": [round(result.score, 5) for result in ranking],
            "relevant": task.relevant,
            "in_pool": any(name in task.relevant for name in work.candidates),
            "measures": measure({task.id: names}, {task.id: task.relevant})[task.id],
            "candidates": len(work.candidates),
            "tokens": totals.tokens,
            "visual_tokens": totals.visual_tokens,
            "visual_tokens_left": totals.visual_tokens_left,
            "average_tokens": totals.average_tokens,
            "flops_saved": totals.flops_saved,
            "kv_saved": totals.kv_saved,
            "repairs": ranking.repairs,
            "unreadable": ranking.unreadable,
            "cut": len(ranking.cut),
            "seconds": {part: round(spent, 6) for part, spent in totals.seconds.items()},
            **self.provenance,
        }

    def key(self, cell: Cell, number: int, content: str) -> Key:
        """Return the key of a record. It covers everything that could change the record.

        Args:
            cell: the setting
            number: the query's number
            content: the digest of the query (`QueryWork.content`)
        """
        return cell.key, str(number), digest_of([self._setting(cell), content])

    def named(self, cell: Cell, number: int, content: str) -> dict[str, Any]:
        """Return the first fields of a record: its key and the settings behind it."""
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
        """Return a digest of the model and of all settings, including defaults and the trust profile."""
        if cell.key not in self._settings:
            reranker = self.reranker(cell)
            facts = [reranker.settings, self.backbone.input_digest, reranker.pruner, cell.seed]
            self._settings[cell.key] = digest_of(facts)
        return self._settings[cell.key]

    def reranker(self, cell: Cell) -> Reranker:
        """Return the Reranker of a cell. It is made once."""
        if cell.key not in self._rerankers:
            pruner = build(cell.method, keep=cell.keep, **cell.options)
            if "seed" not in cell.options:
                pruner = pruner.with_seed(cell.seed)
            if pruner.needs_profile:
                # Without a budget of arithmetic, the tuned schedules change no ranking either.
                pruner = pruner.with_profile(self._profile_for(cell))
            # One unreadable answer must not end a run over thousands of queries. Tables count them.
            # No list comes twice, and a cache for each cell would fill the memory.
            options = {"on_unreadable": "keep", "prompt_cache_bytes": 0, **self.options}
            self._rerankers[cell.key] = Reranker(self.backbone, pruner, vision_cache=self._cache, **options)
        return self._rerankers[cell.key]

    def _profile_for(self, cell: Cell) -> Profile:
        """Return the profile without what changes no ranking of the cell: records must not depend on it."""
        if "permutations" in cell.data:
            return replace(self.known_profile, safety=self._tuned_pairs)
        if "flops" in cell.options:
            return self.known_profile
        return replace(self.known_profile, schedules=())

    @property
    def known_profile(self) -> Profile:
        """The model's trust profile. It is looked up, or measured, on first use."""
        if self.profile is None:
            found = profile_of(self.plain)
            self._tuned_pairs = found.safety
            # Calibrations of scores and of promises change no ranking: a record must not depend on them.
            self.profile = replace(found, scores=(), safety=())
        return self.profile


def work_of(data: Dataset, number: int, pools: Pools | None = None) -> QueryWork:
    """Prepare one query of a data set.

    Args:
        data: the data set
        number: the query's number
        pools: the candidates of a first stage, if the data set has no lists of its own
    """
    task = data.tasks[number]
    candidates = _candidates(data, task, pools)
    contents = [data.contents(candidates), data.picture_contents(task.pictures)]
    content = digest_of([data.name, list(candidates), task.facts, contents])
    documents = {name: data.document(name) for name in candidates}
    return QueryWork(number, task, candidates, data.query(task), documents, content)


def _candidates(data: Dataset, task: Task, pools: Pools | None) -> Sequence[str]:
    candidates = task.candidates if pools is None else pools.get(task.id)
    if not candidates:
        where = "in the pools" if pools is not None else f"in {data.name}; it needs a first stage"
        raise InputError(f"query {task.id} ({task.text!r}) has no candidates {where}")
    if len(set(candidates)) < len(candidates):
        raise InputError(f"the pool of query {task.id} names a document twice")
    return candidates
