"""From the scores of a list to probabilities: fitted on lists whose relevant documents are known.

Three steps, none of which changes the order of a list: a temperature for the softmax over the list, the
probability that the list holds a match at all, and a monotone map of their product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from radical_rerank.errors import CalibrationError

Array = np.ndarray[Any, np.dtype[np.float64]]

SURE = 1e-9
"""probabilities are kept this far from 0 and 1 where their log-odds are needed"""
LEAST = 1e-3
"""where an isotonic curve is 0, the probability is this part of what it was before the curve"""
APART = 1e-6
"""probabilities of different scores differ at least by this factor, also as 32-bit numbers"""
FOLDS = 5
KINDS = ("platt", "isotonic")


@dataclass(frozen=True)
class LabelledList:
    """The scores of one list, and which of its documents are relevant.

    Args:
        scores: log-probabilities among the candidates, one per document
        relevant: whether each document is relevant; none is if nothing fits
        signals: facts about the whole list, by name (`Ranking.signals`)

    Example:
        >>> LabelledList([-0.1, -2.4], [True, False]).matched
        True
    """

    scores: Sequence[float]
    relevant: Sequence[bool]
    signals: Mapping[str, float] | None = None

    @property
    def matched(self) -> bool:
        """Whether any document is relevant."""
        return any(self.relevant)


@dataclass(frozen=True)
class ScoreCalibration:
    """Turns the scores of a list into probabilities that each document is relevant.

    With p the softmax of the scores at the temperature, and c the probability that the list holds a match (a
    logistic regression on signals of the whole list), the probability of a document is f(log-odds of c·p). f
    is monotone, so that probabilities are in the order of the scores.

    Args:
        temperature: above 1 if the model is too sure
        signals: the facts about a list that c depends on
        weights, bias: of c's logistic regression; without signals, c is 1
        kind: "platt", f is sigmoid(slope · x + intercept), or "isotonic", f runs through `points`
        slope, intercept: of "platt"
        points: (x, probability) of "isotonic", ascending in both
        weight: of a first stage's scores; None if the lists had none
        settings: what it was fitted with; see `calibration_for`
        lists: how many lists it was fitted on, half of them without a match

    Example:
        >>> sharp = ScoreCalibration(temperature=2.0)
        >>> [round(p, 2) for p in sharp.probabilities([-0.01, -4.6])]
        [0.91, 0.09]
    """

    temperature: float = 1.0
    signals: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    bias: float = 0.0
    kind: str = "platt"
    slope: float = 1.0
    intercept: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    weight: float | None = None
    settings: Mapping[str, Any] | None = None
    lists: int = 0

    def __post_init__(self) -> None:
        # What comes from JSON has lists.
        for name in ("signals", "weights"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        numbers = [self.temperature, self.bias, self.slope, self.intercept, *self.weights]
        if not all(map(math.isfinite, [*numbers, *(v for point in self.points for v in point)])):
            raise CalibrationError("calibration of scores: every number must be finite")
        if self.temperature <= 0 or self.slope < 0 or self.kind not in KINDS:
            raise CalibrationError("calibration of scores: temperature, slope or kind is out of range")
        if len(self.signals) != len(self.weights) or (self.kind == "isotonic" and not self.points):
            raise CalibrationError("calibration of scores: weights or points are missing")
        if list(self.points) != sorted(self.points) or any(
            later[1] < earlier[1] for earlier, later in zip(self.points, self.points[1:], strict=False)
        ):
            raise CalibrationError("calibration of scores: points must ascend")

    # Use.

    def probabilities(
        self, scores: Sequence[float], signals: Mapping[str, float] | None = None, *, front: int | None = None
    ) -> list[float]:
        """Return the probability that each document is relevant.

        Args:
            scores: of one list
            signals: facts about the whole list
            front: how many of the best were scored together; by default all
        """
        if not len(scores):
            return []
        given = np.asarray(scores, dtype=np.float64)
        p = self._map(self._log_odds(given, signals, front))
        # An isotonic curve has flat parts, but whoever sorts by probability must get the order of the scores.
        best_first = np.argsort(-given, kind="stable")
        for better, worse in pairwise(best_first):
            distance = 0.0 if given[better] == given[worse] else APART
            p[worse] = min(p[worse], p[better] * (1 - distance))
        values: list[float] = p.tolist()
        return values

    def usable(self, signals: Mapping[str, float] | None) -> bool:
        """Return whether a list has the signals that this calibration needs."""
        known = {name for name, value in (signals or {}).items() if math.isfinite(value)}
        return set(self.signals) <= known | set(_OF_SCORES)

    def matched(self, scores: Sequence[float], signals: Mapping[str, float] | None = None) -> float:
        """Return c, the probability that the list holds a match."""
        if not self.signals:
            return 1.0
        tempered = _log_softmax(np.asarray(scores, dtype=np.float64) / self.temperature)
        values = signal_values(tempered, signals, self.signals)
        return float(_sigmoid(np.asarray(values @ np.asarray(self.weights) + self.bias)))

    def _log_odds(self, scores: Array, signals: Mapping[str, float] | None, front: int | None) -> Array:
        tempered = scores / self.temperature
        best = np.sort(tempered)[::-1][:front]
        share = np.minimum(0.0, tempered - _logsumexp(best))  # documents behind the front have less than it
        held = self.matched((best * self.temperature).tolist(), signals)
        return _logit(held * np.exp(share))

    def _map(self, x: Array) -> Array:
        if self.kind == "platt":
            return _sigmoid(self.slope * x + self.intercept)
        places, values = np.asarray(self.points).T
        curve = np.interp(x, places, values)
        # A curve that starts at 0 would call every poor document equally impossible.
        return np.asarray(np.maximum(curve, LEAST * _sigmoid(x)), dtype=np.float64)

    # Fitting.

    @classmethod
    def fit(cls, lists: Iterable[LabelledList], *, signals: Sequence[str] = ()) -> ScoreCalibration:
        """Fit a calibration on labelled lists.

        Args:
            lists: with a match, and, if there are signals, some without
            signals: what the probability that a list holds a match depends on

        Returns:
            The calibration whose kind has the smaller negative log-likelihood on lists that were held out.
        """
        lists = list(lists)
        if not any(one.matched for one in lists):
            raise CalibrationError("no list has a relevant document: there is nothing to fit")
        held_out = dict.fromkeys(KINDS, 0.0)
        for fold in range(min(FOLDS, len(lists))):
            rest = [one for i, one in enumerate(lists) if i % FOLDS != fold]
            if not any(one.matched for one in rest):
                continue
            tested = lists[fold::FOLDS]
            for kind in KINDS:
                held_out[kind] += negative_log_likelihood(cls._fit(rest, signals, kind), tested)
        return cls._fit(lists, signals, min(KINDS, key=held_out.__getitem__))

    @classmethod
    def _fit(cls, lists: Sequence[LabelledList], signals: Sequence[str], kind: str) -> ScoreCalibration:
        fitted = cls(temperature=_fit_temperature(lists), lists=len(lists))
        held = [one.matched for one in lists]
        if signals and not all(held):
            rows = [
                signal_values(
                    _log_softmax(np.asarray(one.scores, dtype=np.float64) / fitted.temperature),
                    one.signals,
                    signals,
                )
                for one in lists
            ]
            weights, bias = logistic_regression(np.stack(rows), np.asarray(held, dtype=np.float64))
            fitted = replace(fitted, signals=tuple(signals), weights=tuple(weights.tolist()), bias=bias)
        x = np.concatenate(
            [fitted._log_odds(np.asarray(one.scores, dtype=np.float64), one.signals, None) for one in lists]
        )
        y = np.concatenate([np.asarray(one.relevant, dtype=np.float64) for one in lists])
        if kind == "isotonic":
            return replace(fitted, kind=kind, points=isotonic_points(x, y))
        slope, intercept = logistic_regression(x[:, None], y)
        if slope[0] < 0:  # the scores say nothing: every document has the mean probability
            return replace(fitted, slope=0.0, intercept=float(_logit(np.asarray(y.mean()))))
        return replace(fitted, slope=float(slope[0]), intercept=intercept)

    # Files.

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoreCalibration:
        """Read what `to_dict` returned, or raise a CalibrationError."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise CalibrationError(f"calibration of scores: unknown field {unknown[0]!r}")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"calibration of scores: {error}") from None


def calibration_for(
    known: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]
) -> ScoreCalibration | None:
    """Return the calibration that was fitted with these settings, or None.

    Everything but `keep` must be the same; if everything is kept, the method does not matter. Of those that
    fit, the one with the nearest budget is taken (by ratio), if the budget lies in the range of those fitted.

    Args:
        known: calibrations as dicts, as a `Profile` holds them
        settings: of the Reranker
    """
    keep = settings["keep"]
    ignored = {"keep", "method"} if keep >= 1 else {"keep"}

    def rest(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in ignored}

    fitting: dict[float, Mapping[str, Any]] = {}
    for one in known:
        theirs = one.get("settings") or {}
        if "keep" in theirs and rest(theirs) == rest(settings):
            fitting[float(theirs["keep"])] = one
    if not fitting or not min(fitting) <= keep <= max(fitting):
        return None
    nearest = min(fitting, key=lambda at: abs(math.log(at / keep)))
    return ScoreCalibration.from_dict(fitting[nearest])


def probabilities_of(
    scores: Sequence[float],
    signals: Mapping[str, float],
    known: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    front: int,
) -> tuple[Sequence[float | None], bool]:
    """Return the probability of each document of a list, and whether a calibration gave them.

    Without one, they are the softmax over the documents and the answer `none`, if the template has it; else
    None.

    Args:
        scores: best first
        signals: facts about the whole list
        known: calibrations as dicts
        settings: of the Reranker
        front: how many of the best were scored together
    """
    calibration = calibration_for(known, settings) if known else None
    if calibration is not None and calibration.usable(signals):
        return calibration.probabilities(scores, signals, front=front), True
    if "match" not in signals:
        return [None] * len(scores), False
    matched = float(_sigmoid(np.asarray(signals["match"])))
    return [matched * math.exp(score) for score in scores], False


# Signals of a whole list.

_OF_SCORES = ("top", "margin", "entropy")
"""signals that the scores themselves give"""


def signal_values(
    tempered: Array, signals: Mapping[str, float] | None, names: Sequence[str]
) -> np.ndarray[Any, Any]:
    """Return signals of a list by their names.

    Args:
        tempered: the list's log-probabilities, at the temperature
        signals: facts that the scores do not give
        names: "top" (the log-odds of the best), "margin" (between the best two), "entropy", or names of
            `signals`
    """
    ordered = np.sort(tempered)[::-1]
    known = {
        "top": float(_logit(np.exp(ordered[:1]))[0]),
        "margin": float(ordered[0] - ordered[1]) if len(ordered) > 1 else 0.0,
        "entropy": float(-(np.exp(tempered) * tempered).sum()),
        **(signals or {}),
    }
    missing = [name for name in names if name not in known]
    if missing:
        raise CalibrationError(f"the list has no signal {missing[0]!r}")
    return np.asarray([known[name] for name in names], dtype=np.float64)


# How good probabilities are.


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same probability.

    Args:
        low, high: of the probabilities
        count: how many predictions
        mean: their mean probability
        fraction: how many of them were right, from 0 to 1
    """

    low: float
    high: float
    count: int
    mean: float
    fraction: float


def reliability(probabilities: Sequence[float], labels: Sequence[bool], bins: int = 15) -> list[Bin]:
    """Return the predictions in bins of equal width. Empty bins are left out.

    Example:
        >>> reliability([0.1, 0.2, 0.9], [False, True, True], bins=2)[0]
        Bin(low=0.0, high=0.5, count=2, mean=0.15000000000000002, fraction=0.5)
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    places = np.minimum((p * bins).astype(int), bins - 1)
    return [
        Bin(place / bins, (place + 1) / bins, int(own.sum()), float(p[own].mean()), float(y[own].mean()))
        for place in range(bins)
        if (own := places == place).any()
    ]


def expected_calibration_error(
    probabilities: Sequence[float], labels: Sequence[bool], bins: int = 15
) -> float:
    """Return how far probabilities are from what happened: the mean over bins, weighted by their sizes.

    Example:
        >>> expected_calibration_error([0.5, 0.5, 1.0], [True, False, True])
        0.0
    """
    parts = reliability(probabilities, labels, bins)
    total = sum(part.count for part in parts)
    return sum(part.count * abs(part.mean - part.fraction) for part in parts) / max(1, total)


def auroc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Return the probability that a positive scores above a negative; a tie counts one half.

    Example:
        >>> auroc([0.1, 0.4, 0.4, 0.9], [False, False, True, True])
        0.875
    """
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    positives, negatives = int(y.sum()), int((~y).sum())
    if not positives or not negatives:
        raise CalibrationError("AUROC needs both kinds of labels")
    _, place, counts = np.unique(s, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[y].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def negative_log_likelihood(calibration: ScoreCalibration, lists: Iterable[LabelledList]) -> float:
    """Return the sum over all documents of these lists."""
    total = 0.0
    for one in lists:
        p = np.clip(np.asarray(calibration.probabilities(one.scores, one.signals)), 1e-6, 1 - 1e-6)
        total -= float(np.log(np.where(np.asarray(one.relevant, dtype=bool), p, 1 - p)).sum())
    return total


# Arithmetic.


def logistic_regression(
    rows: Array, labels: Array, *, ridge: float = 1e-3, steps: int = 100
) -> tuple[Array, float]:
    """Fit weights and bias by Newton's method, on standardised columns.

    Args:
        rows: (n, k)
        labels: (n,) of 0 and 1
        ridge: of the weights
        steps: at most

    Returns:
        (k,) weights and the bias, in the units of the columns.
    """
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.column_stack([(rows - mean) / scale, np.ones(len(rows))])
    penalty = np.diag([*[ridge * len(rows)] * rows.shape[1], 1e-9])

    def loss(w: Array) -> float:
        z = design @ w
        return float((np.logaddexp(0, z) - labels * z).sum() + w @ penalty @ w / 2)

    w = np.zeros(design.shape[1])
    for _ in range(steps):
        p = _sigmoid(design @ w)
        gradient = design.T @ (p - labels) + penalty @ w
        hessian = (design * (p * (1 - p))[:, None]).T @ design + penalty
        step = np.linalg.solve(hessian + 1e-9 * np.eye(len(w)), gradient)
        size = 1.0
        while size > 1e-6 and loss(w - size * step) > loss(w):
            size /= 2
        w = w - size * step
        if np.abs(size * step).max() < 1e-10:
            break
    weights = w[:-1] / scale
    return weights, float(w[-1] - weights @ mean)


def isotonic_points(x: Array, y: Array) -> tuple[tuple[float, float], ...]:
    """Fit a function that never falls to (x, y) by pooling adjacent violators.

    Returns:
        The (mean x, mean y) of every pool, ascending: the function runs through them in straight lines.
    """
    values, place = np.unique(x, return_inverse=True)
    weight = np.bincount(place).astype(np.float64)
    level = np.bincount(place, weights=y) / weight
    pools: list[tuple[float, float, float]] = []  # sums of weight, weight · x, weight · y
    for w, at, mean in zip(weight, values, level, strict=True):
        pools.append((w, w * at, w * mean))
        while len(pools) > 1 and pools[-2][2] * pools[-1][0] >= pools[-1][2] * pools[-2][0]:
            last, before = pools.pop(), pools.pop()
            pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    return tuple((at / w, min(1.0, max(0.0, total / w))) for w, at, total in pools)


def _fit_temperature(lists: Sequence[LabelledList]) -> float:
    """Return the temperature at which the softmax gives the relevant documents most probability."""
    known = [one for one in lists if one.matched and not all(one.relevant)]
    if not known:
        return 1.0
    shape = len(known), max(len(one.scores) for one in known)
    scores, relevant = np.full(shape, -np.inf), np.full(shape, -np.inf)
    for row, one in enumerate(known):
        scores[row, : len(one.scores)] = one.scores
        relevant[row, : len(one.scores)] = np.where(one.relevant, one.scores, -np.inf)
    top = scores.max(axis=1, keepdims=True)

    def loss(log_temperature: float) -> float:
        t = math.exp(log_temperature)
        among, right = (np.exp((each - top) / t).sum(axis=1) for each in (scores, relevant))
        return float((np.log(among) - np.log(np.maximum(right, 1e-300))).sum())

    low, high = math.log(0.05), math.log(50.0)
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    while high - low > 1e-5:  # golden section: the loss has one minimum
        if loss(left) < loss(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
    return math.exp((low + high) / 2)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def _logit(p: Array) -> Array:
    p = np.clip(p, SURE, 1 - SURE)
    return np.log(p) - np.log1p(-p)


def _logsumexp(x: Array) -> float:
    top = float(x.max())
    return top + float(np.log(np.exp(x - top).sum()))


def _log_softmax(x: Array) -> Array:
    return x - _logsumexp(x)
