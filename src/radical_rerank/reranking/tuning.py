"""Tuning: find the schedules that keep a model's own ranking best, on lists without labels.

The aim of pruning is to preserve the order that the model gives unpruned. So a schedule is judged by Dense
alone: by KL(Dense ‖ pruned) of the scores over the candidates, averaged over lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from radical_rerank.errors import InputError
from radical_rerank.method import Schedule, arithmetic, counts_within, macs
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Dense, Profile, Pruner, RaDiCal, TunedSchedule
from radical_rerank.reranking.safety import Observed, Safety, margin

if TYPE_CHECKING:
    from radical_rerank.reranking.reranker import Reranker
    from radical_rerank.reranking.results import Ranking

BUDGETS = (0.1, 0.12, 0.15, 0.2, 0.3, 0.4, 0.5)
"""the parts of Dense's arithmetic that schedules are tuned for"""
FIRST_LOOK = 32
"""lists that every schedule is tried on; only the best are tried on all"""
BEAM = 3
EXPONENTS = (0.3, 0.6, 0.85)
"""how much of the cut a layer does that is added before another one"""
MOST_LAYERS = 3
RELEVANCES = ("mean", "words")


@dataclass(frozen=True)
class Ranked:
    """One list, ranked in one way.

    scores: by document
    cost: multiply-accumulates
    shared: tokens before the query, whose first layers a second ranking need not compute
    """

    scores: Sequence[float]
    cost: int
    shared: int = 0

    @classmethod
    def of(cls, ranking: Ranking) -> Ranked:
        """Take the scores and the cost of a ranking."""
        scores = [0.0] * len(ranking)
        for one in ranking:
            scores[one.index] = one.score
        reports = ranking.reports
        return cls(scores, sum(one.macs for one in reports), sum(one.tokens_before_query for one in reports))

    @property
    def best(self) -> int:
        """The index of the best document."""
        return max(range(len(self.scores)), key=self.scores.__getitem__)


def divergence(dense: Ranked, pruned: Ranked) -> float:
    """KL(Dense ‖ pruned) = Σ_k p_k (log p_k − log q_k) over the candidates."""
    return sum(math.exp(p) * (p - q) for p, q in zip(dense.scores, pruned.scores, strict=True))


class Tuner:
    """Ranks lists under many schedules.

    Args:
        reranker: whose model, template and scorer are used
        lists: (query, documents) pairs, without labels
        profile: the model's trust profile
    """

    def __init__(self, reranker: Reranker, lists: Iterable[tuple[Any, Any]], profile: Profile) -> None:
        self.lists = list(lists)
        if len(self.lists) < 2:
            raise InputError("tuning needs at least two lists")
        self.reranker, self.profile = reranker, profile
        self.shape = reranker.backbone.shape
        self._dense: list[Ranked] = []
        self._size = (0, 0)

    def rank(self, pruner: Pruner, count: int | None = None) -> list[Ranked]:
        """Rank the first lists with a method."""
        ranker = self.reranker.with_pruner(pruner)
        rankings = ranker.rank_many(self.lists[:count])
        return [Ranked.of(ranking) for ranking in rankings]

    def dense(self, progress: Progress = silent) -> list[Ranked]:
        """The rankings without pruning, computed once."""
        if not self._dense:
            ranker = self.reranker.with_pruner(Dense())
            for ranking in progress(ranker.rank_many(self.lists), "without pruning", total=len(self.lists)):
                self._dense.append(Ranked.of(ranking))
                report = ranking.report
                assert report is not None
                self._size = report.visual_tokens, report.tokens - report.visual_tokens
        return self._dense

    def pruner(self, one: TunedSchedule, **options: Any) -> RaDiCal:
        """RaDiCal with a schedule."""
        return RaDiCal(flops=one.flops, profile=replace(self.profile, schedules=(one,)), **options)

    def measure(self, one: TunedSchedule, count: int | None = None) -> TunedSchedule:
        """Return the schedule with its KL and its agreement on the first lists."""
        dense = self.dense()[:count]
        pruned = self.rank(self.pruner(one), count)
        kl = sum(map(divergence, dense, pruned)) / len(pruned)
        same = sum(a.best == b.best for a, b in zip(dense, pruned, strict=True)) / len(pruned)
        return replace(one, kl=kl, agreement=same, lists=len(pruned))

    def reachable(self, schedule: Schedule, flops: float) -> bool:
        """Whether a schedule can cost this part of Dense's arithmetic, within 3%."""
        visual, text = self._size
        budget = flops * arithmetic((), (), self.shape, visual, text)
        counts = counts_within(schedule, budget, self.shape, visual, text)
        cost = arithmetic(schedule.layers, counts, self.shape, visual, text)
        return abs(cost / budget - 1) <= 0.03 and counts[-1] >= len(self.dense()[-1].scores) // 2

    def search(
        self, flops: float, progress: Progress = silent, *, known: Sequence[TunedSchedule] = ()
    ) -> TunedSchedule:
        """Find the schedule that keeps Dense's order best at a part of its arithmetic.

        A beam search: single layers and known schedules first, with both kinds of relevance, then one more
        layer before or after those of the best. All are tried on a few lists, and the best of all on all
        lists.

        known: schedules that are good at other costs
        """
        self.dense()
        look = min(FIRST_LOOK, len(self.lists))
        tried: dict[tuple[Schedule, str], TunedSchedule] = {}
        first = [Schedule((layer,), (1.0,)) for layer in self.profile.layers]
        first.append(replace(self.profile, schedules=()).schedule(flops, self.shape.num_layers))
        first.extend(one.schedule for one in known)
        front = [(one, relevance) for one in first for relevance in RELEVANCES]
        for _ in range(MOST_LAYERS):
            fresh = (one for one in dict.fromkeys(front) if one not in tried)
            new = [one for one in fresh if self.reachable(one[0], flops)]
            for one, relevance in progress(new, f"schedules for {flops:.0%} of the arithmetic"):
                wanted = TunedSchedule(flops, one.layers, one.exponents, relevance=relevance)
                tried[one, relevance] = self.measure(wanted, look)
            best = sorted(tried.values(), key=lambda one: one.kl)[:BEAM]
            front = [
                (longer, one.relevance)
                for one in best
                for longer in _longer(one.schedule, self.profile.layers)
            ]
        if not tried:
            raise InputError(f"no schedule of this model costs {flops:.0%} of the arithmetic of these lists")
        finalists = sorted(tried.values(), key=lambda one: one.kl)[: 2 * BEAM]
        measured = [
            self.measure(one)
            for one in progress(finalists, f"the best for {flops:.0%}, on {len(self.lists)} lists")
        ]
        return min(measured, key=lambda one: one.kl)

    def nucleus(self, one: TunedSchedule, progress: Progress = silent) -> TunedSchedule:
        """Add the share of the score with which a nucleus costs as much as the schedule on average."""
        share = self.share(lambda p: self.pruner(one, nucleus=p), one.flops, progress)
        return replace(one, nucleus=share)

    def share(self, pruner: Callable[[float], Pruner], flops: float, progress: Progress = silent) -> float:
        """Find the share with which a method costs this part of Dense on average, by bisection."""
        budget = flops * sum(one.cost for one in self.dense())
        low, high = math.log(1e-6), math.log(0.9)  # of 1 − share: the first costs the most
        for _ in progress(range(9), f"nucleus for {flops:.0%}"):
            middle = (low + high) / 2
            cost = sum(one.cost for one in self.rank(pruner(1 - math.exp(middle))))
            low, high = (middle, high) if cost > budget else (low, middle)
        return 1 - math.exp(high)

    def safety(self, schedules: Sequence[TunedSchedule], progress: Progress = silent) -> list[Safety]:
        """Watch on all lists how often each schedule differs from Dense, and with which margin.

        Returns:
            What was seen of each with Dense, and with the most expensive of them.
        """
        rankers = {one.flops: self.reranker.with_pruner(self.pruner(one)) for one in schedules}
        rankers[1.0] = self.reranker.with_pruner(Dense())
        ranked: dict[float, list[Ranked]] = {flops: [] for flops in rankers}
        for query, documents in progress(self.lists, f"the promise, on {len(self.lists)} lists"):
            for flops, ranker in rankers.items():  # list by list: its pictures are encoded once
                ranked[flops].append(Ranked.of(ranker.rank(query, documents)))
        dense = ranked[1.0]
        first = {one.flops: one.layers[0] for one in schedules} | {1.0: 0}  # Dense starts anew
        # Every pair that is compared makes the promises of all a little dearer: so not every larger one.
        costs = sorted(ranked)
        pairs = [(small, large) for small, large in combinations(costs, 2) if large in costs[-2:]]
        return [
            _seen(
                dense,
                (small, ranked[small]),
                (large, ranked[large]),
                reused=self._reused(dense, min(first[small], first[large])),
                compared=len(pairs),
            )
            for small, large in pairs
        ]

    def _reused(self, lists: Sequence[Ranked], depth: int) -> int:
        """What a second ranking need not compute: the first `depth` layers of the tokens that are shared."""
        layers = range(self.shape.num_layers)
        return sum(
            macs([one.shared if layer < depth else 0 for layer in layers], self.shape) for one in lists
        )


def _seen(
    dense: Sequence[Ranked],
    small: tuple[float, Sequence[Ranked]],
    large: tuple[float, Sequence[Ranked]],
    *,
    reused: int,
    compared: int,
) -> Safety:
    observed = [
        Observed(margin(a.scores), a.best == d.best, b.best == d.best)
        for a, b, d in zip(small[1], large[1], dense, strict=True)
    ]
    whole = sum(one.cost for one in dense)
    costs = sum(one.cost for one in small[1]), sum(one.cost for one in large[1]) - reused
    return Safety.of(observed, (small[0], large[0]), (costs[0] / whole, costs[1] / whole), compared)


def _longer(schedule: Schedule, layers: Sequence[int]) -> list[Schedule]:
    """Schedules with one more layer: before the others with a part of the first cut, or after them."""
    found = []
    for layer in layers:
        if layer in schedule.layers:
            continue
        place = sum(other < layer for other in schedule.layers)
        before = schedule.exponents[place - 1] if place else 0.0
        for e in EXPONENTS:
            if place < len(schedule.layers):
                own = before + e * (schedule.exponents[place] - before)
                exponents = [*schedule.exponents[:place], own, *schedule.exponents[place:]]
            else:  # after all others: they did the part e, it does the rest
                exponents = [*(e * other for other in schedule.exponents), 1.0]
            chosen = (*schedule.layers[:place], layer, *schedule.layers[place:])
            found.append(Schedule(chosen, tuple(exponents)))
    return found
