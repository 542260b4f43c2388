"""Rank cheaply, and again where the result is not sure.

The margin of a ranking is the difference of its two best scores. A list whose margin is below a threshold is
ranked again: with more tokens, which gives a promise about the order, or in another order (`SecondOrder`).

For a promise, the threshold comes from risk control on lists without labels, as in conformal prediction: for
lists drawn like them, the best document is Dense's in at least the promised share of all lists. Plain
conformal risk control promises that on average over calibrations; this one holds in 95% of all calibrations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from typing import Any

from radical_rerank.errors import CalibrationError

SURE = 0.95
"""the share of calibrations in which a promise holds"""
DIGITS = 5
"""margins are kept to so many digits"""
ROOM = 0.8
"""the part of a budget that a first order may cost, if a second one is to be paid from the rest"""


@lru_cache
def allowed_losses(n: int, agreement: float, sure: float = SURE) -> int:
    """Return how many of n lists may be lost: the most k with P(Binomial(n, 1 − agreement) ≤ k) ≤ 1 − sure.

    If more lists were lost in truth than promised, so few would be seen in only 1 − sure of all samples.
    It is -1 if n lists cannot promise it.

    Example:
        >>> allowed_losses(298, 0.99), allowed_losses(299, 0.99), allowed_losses(1000, 0.99)
        (-1, 0, 4)
    """
    tail, k = agreement**n, -1
    term = tail
    while tail <= 1 - sure + 1e-12 and k < n:
        k += 1
        term *= (n - k) / (k + 1) * (1 - agreement) / agreement
        tail += term
    return k


def margin(scores: Sequence[float]) -> float:
    """Return the difference of the two highest scores; infinite for a single one, which has no rival."""
    best, second = sorted([*scores, -inf], reverse=True)[:2]
    return best - second


@dataclass(frozen=True)
class Observed:
    """One list: the margin of the cheap ranking, and whether it and the larger one have Dense's best."""

    margin: float
    small_right: bool
    large_right: bool


@dataclass(frozen=True)
class Safety:
    """What `radical tune` saw of two schedules on n lists.

    The cheapest of many pairs is cheap by luck, too. So the chance of a broken promise is divided by the
    number of pairs (Bonferroni): then the promise of the chosen one holds in 95% of all calibrations.

    Args:
        small, large: the parts of Dense's arithmetic that they may cost; large = 1 is Dense itself
        small_cost, large_cost: the parts that they did cost; of the large one, what the small one had not
            computed
        margins: of the small one, all n, ascending
        wrong: those of lists where its best document is not Dense's, ascending
        large_wrong: how often the large one's is not
        compared: how many pairs were seen on these lists

    Example:
        >>> seen = [Observed(0.1, False, True), *[Observed(1.0 + i, True, True) for i in range(399)]]
        >>> safety = Safety.of(seen, (0.1, 1.0), (0.1, 1.0))
        >>> safety.threshold(0.98), safety.threshold(0.99), safety.threshold(0.999)
        (0.0, 1.0, None)
    """

    small: float
    large: float
    small_cost: float
    large_cost: float
    margins: tuple[float, ...]
    wrong: tuple[float, ...]
    large_wrong: int
    compared: int

    @classmethod
    def of(
        cls,
        observed: Sequence[Observed],
        budgets: tuple[float, float],
        costs: tuple[float, float],
        compared: int = 1,
    ) -> Safety:
        """Sum up what was seen of two schedules."""
        return cls(
            *budgets,
            *costs,
            tuple(sorted(round(one.margin, DIGITS) for one in observed)),
            tuple(sorted(round(one.margin, DIGITS) for one in observed if not one.small_right)),
            sum(not one.large_right for one in observed),
            compared,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Safety:
        """Read what `to_dict` wrote."""
        try:
            return cls(**{**data, "margins": tuple(data["margins"]), "wrong": tuple(data["wrong"])})
        except (KeyError, TypeError):
            raise CalibrationError(
                "the tuned profile is of another version: run `radical tune` again"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)

    def threshold(self, agreement: float) -> float | None:
        """Return the least threshold that promises this agreement; None if these lists cannot promise it.

        A list counts as lost if it passes with another best document than Dense's, or if the large ranking
        has another one. The number of lost lists falls as the threshold rises, so the least threshold at
        which the binomial bound holds controls the risk (risk-controlling prediction sets).
        """
        sure = 1 - (1 - SURE) / self.compared
        allowed = allowed_losses(len(self.margins), agreement, sure) - self.large_wrong
        if allowed < 0:
            return None
        # All wrong lists but the `allowed` ones with the largest margins must be ranked again.
        rank_again = len(self.wrong) - allowed
        if rank_again <= 0:
            return 0.0
        limit = self.wrong[rank_again - 1]
        return _next_above(self.margins, limit)

    def cost(self, agreement: float) -> float:
        """Return the mean cost to expect, as a part of Dense's; infinite if it cannot be promised."""
        threshold = self.threshold(agreement)
        if threshold is None:
            return float("inf")
        again = bisect_left(self.margins, threshold) / len(self.margins)
        return self.small_cost + again * self.large_cost


def _next_above(values: Sequence[float], limit: float) -> float:
    """The smallest of the ascending values above the limit; a little above the limit if none is."""
    return next((value for value in values if value > limit), limit + 1e-6)


@dataclass(frozen=True)
class Promise:
    """Two schedules, and the margin below which a list is ranked with the larger one."""

    pair: Safety
    threshold: float


def promise(known: Sequence[Mapping[str, Any]], agreement: float, model: str) -> Promise:
    """Return the cheapest pair of schedules that promises the agreement, or raise a CalibrationError."""
    if not known:
        raise CalibrationError(f"agreement= needs a tuned profile of {model}: run `radical tune {model}`")
    best = min(map(Safety.from_dict, known), key=lambda one: one.cost(agreement))
    threshold = best.threshold(agreement)
    if threshold is None:
        raise CalibrationError(
            f"an agreement of {agreement:.2%} cannot be promised from {len(best.margins)} lists: "
            "run `radical tune` with more lists"
        )
    return Promise(best, threshold)


def worth_keeping(pairs: Sequence[Safety]) -> list[Safety]:
    """Return the pairs that are the cheapest for some agreement, and one of each schedule (`SecondOrder`)."""
    best = cheapest(pairs)
    known = {one.small for one in best}
    return [*best, *(one for one in pairs if one.large == 1 and one.small not in known)]


def cheapest(pairs: Sequence[Safety]) -> list[Safety]:
    """Return the pairs that are the cheapest for some agreement from 50% to 99.9%."""
    agreements = [0.5 + 0.001 * step for step in range(500)]
    promised = [a for a in agreements if any(one.threshold(a) is not None for one in pairs)]
    best = (min(pairs, key=lambda one: one.cost(a)) for a in promised)
    # Too few lists promise nothing; that is then said of the one that is left.
    return list({id(one): one for one in best}.values()) or list(pairs[:1])


@dataclass(frozen=True)
class SecondOrder:
    """A budget spent on a second order of the candidates where the first one is not sure.

    Args:
        first: the part of Dense's arithmetic that the first order may cost; the second may cost the budget
        threshold: the margin below which a list has a second order
    """

    first: float
    threshold: float

    @classmethod
    def of(cls, known: Sequence[Mapping[str, Any]], flops: float, model: str) -> SecondOrder:
        """Divide a budget B so that it is the mean cost.

        The first order gets the largest tuned schedule that costs at most `ROOM` of B, c. A share s of the
        lists has a second order: c + s B = B. If no schedule is that cheap, one order costs B.

        known: what `radical tune` saw of the model's schedules
        """
        if not known:
            raise CalibrationError(
                f'permutations="auto" needs a tuned profile of {model}: run `radical tune {model}`'
            )
        cheap = [one for one in map(Safety.from_dict, known) if one.small <= ROOM * flops]
        first = max(cheap, key=lambda one: one.small, default=None)
        if first is None:
            return cls(flops, 0.0)
        share = 1 - first.small_cost / flops
        return cls(first.small, first.margins[int(share * len(first.margins))])
