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
LOOK = 4
"""every fourth list helps to choose a pair of schedules; the others make its promise"""
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
class Seen:
    """What was seen of two schedules on some lists.

    Args:
        margins: of the small one, all of them, ascending
        wrong: those of lists where its best document is not Dense's, ascending
        large_wrong: how often the large one's is not
    """

    margins: tuple[float, ...]
    wrong: tuple[float, ...]
    large_wrong: int

    @classmethod
    def of(cls, observed: Sequence[Observed]) -> Seen:
        """Sum up the lists."""
        return cls(
            tuple(sorted(round(one.margin, DIGITS) for one in observed)),
            tuple(sorted(round(one.margin, DIGITS) for one in observed if not one.small_right)),
            sum(not one.large_right for one in observed),
        )

    def threshold(self, losses: int) -> float | None:
        """Return the least threshold that loses at most so many lists; None if none does.

        A list counts as lost if it passes with another best document than Dense's, or if the large ranking
        has another one.
        """
        allowed = losses - self.large_wrong
        if allowed < 0:
            return None
        # All wrong lists but the `allowed` ones with the largest margins must be ranked again.
        rank_again = len(self.wrong) - allowed
        if rank_again <= 0:
            return 0.0
        return _next_above(self.margins, self.wrong[rank_again - 1])

    def again(self, threshold: float) -> float:
        """Return the share of the lists that are ranked again."""
        return bisect_left(self.margins, threshold) / max(len(self.margins), 1)


@dataclass(frozen=True)
class Safety:
    """What `radical tune` saw of two schedules.

    Two samples, because the cheapest of many pairs is cheap by luck, too: one chooses the pair; the other has
    not seen the choice and makes the promise.

    Args:
        small, large: the parts of Dense's arithmetic that they may cost; large = 1 is Dense itself
        small_cost, large_cost: the parts that they did cost; of the large one, what the small one had not
            computed
        look: the lists that choose
        rest: the lists that promise

    Example:
        >>> seen = [Observed(0.1, False, True), *[Observed(1.0 + i, True, True) for i in range(533)]]
        >>> safety = Safety.of(seen, (0.1, 1.0), (0.1, 1.0))
        >>> safety.threshold(0.98), safety.threshold(0.99), safety.threshold(0.999)
        (0.0, 1.0, None)
    """

    small: float
    large: float
    small_cost: float
    large_cost: float
    look: Seen
    rest: Seen

    @classmethod
    def of(
        cls, observed: Sequence[Observed], budgets: tuple[float, float], costs: tuple[float, float]
    ) -> Safety:
        """Sum up what was seen of two schedules: every fourth list chooses."""
        look, rest = observed[LOOK - 1 :: LOOK], [one for i, one in enumerate(observed, 1) if i % LOOK]
        return cls(*budgets, *costs, Seen.of(look), Seen.of(rest))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Safety:
        """Read what `to_dict` wrote."""
        try:
            samples = {
                part: Seen(
                    tuple(data[part]["margins"]), tuple(data[part]["wrong"]), data[part]["large_wrong"]
                )
                for part in ("look", "rest")
            }
            return cls(**{**data, **samples})
        except (KeyError, TypeError):
            raise CalibrationError(
                "the tuned profile is of an older version: run `radical tune` again"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)

    def threshold(self, agreement: float) -> float | None:
        """Return the least threshold that promises this agreement; None if these lists cannot promise it.

        The number of lost lists falls as the threshold rises, so the least threshold at which the binomial
        bound holds controls the risk (risk-controlling prediction sets).
        """
        return self.rest.threshold(allowed_losses(len(self.rest.margins), agreement))

    def cost(self, agreement: float) -> float:
        """Return the mean cost to expect, as a part of Dense's; infinite if it cannot be promised."""
        threshold = self.threshold(agreement)
        return inf if threshold is None else self.small_cost + self.rest.again(threshold) * self.large_cost

    def guess(self, agreement: float) -> float:
        """Return the mean cost that the lists that choose let expect; infinite if it cannot be promised."""
        allowed = allowed_losses(len(self.rest.margins), agreement)
        if allowed < 0:
            return inf
        threshold = self.look.threshold(round(allowed * len(self.look.margins) / len(self.rest.margins)))
        return inf if threshold is None else self.small_cost + self.look.again(threshold) * self.large_cost


def _next_above(values: Sequence[float], limit: float) -> float:
    """The smallest of the ascending values above the limit; a little above the limit if none is."""
    return next((value for value in values if value > limit), limit + 1e-6)


@dataclass(frozen=True)
class Promise:
    """Two schedules, and the margin below which a list is ranked with the larger one."""

    pair: Safety
    threshold: float


def promise(known: Sequence[Mapping[str, Any]], agreement: float, model: str) -> Promise:
    """Return the pair of schedules that should be the cheapest, and its threshold.

    The next pair is taken only if the larger schedule of the first one loses too many lists by itself.
    """
    if not known:
        raise CalibrationError(f"agreement= needs a tuned profile of {model}: run `radical tune {model}`")
    for one in in_order([Safety.from_dict(pair) for pair in known], agreement):
        threshold = one.threshold(agreement)
        if threshold is not None:
            return Promise(one, threshold)
    lists = max(len(Safety.from_dict(pair).rest.margins) for pair in known)
    raise CalibrationError(
        f"an agreement of {agreement:.2%} cannot be promised from {lists} lists: "
        "run `radical tune` with more lists"
    )


def in_order(pairs: Sequence[Safety], agreement: float) -> list[Safety]:
    """Return the pairs, the one that should be the cheapest first."""
    return sorted(pairs, key=lambda one: one.guess(agreement))


def worth_keeping(pairs: Sequence[Safety]) -> list[Safety]:
    """Return the pairs that come first for some agreement, and those of each schedule with Dense.

    Dense loses no list, so that an agreement that is promised at all can be promised with what is kept.
    """
    agreements = [0.5 + 0.001 * step for step in range(500)]
    first = [in_order(pairs, a)[0] for a in agreements] if pairs else []
    kept = {id(one) for one in first}
    return [one for one in pairs if id(one) in kept or one.large == 1]


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
        margins = first.rest.margins
        return cls(first.small, margins[int(share * len(margins))])
