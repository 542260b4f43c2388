"""Fits calibrations of a Reranker's scores on lists whose relevant documents are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from radical_rerank.errors import CalibrationError
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking.encoding import Document
from radical_rerank.reranking.orders import mixed, standardised
from radical_rerank.reranking.reranker import AnyQuery, Reranker
from radical_rerank.reranking.scores import (
    Bin,
    LabelledList,
    ScoreCalibration,
    auroc,
    expected_calibration_error,
    reliability,
)

SIGNALS = ("logit", "top", "entropy")
"""what the probability that a list holds a match depends on, if its template offers no answer for that"""
WITH_NONE = ("match", *SIGNALS)


@dataclass(frozen=True)
class JudgedList:
    """A query, its documents, and which of them are relevant.

    Args:
        query: the query
        documents: the candidates
        relevant: whether each of them is relevant
        scores: of a first stage, one per document, if there are any

    Example:
        >>> JudgedList("a red star", ["a.jpg", "b.jpg"], [False, True]).relevant
        [False, True]
    """

    query: AnyQuery
    documents: Sequence[Document]
    relevant: Sequence[bool]
    scores: Sequence[float] | None = None


def without_match(own: JudgedList, other: JudgedList) -> JudgedList:
    """Return a list in which nothing fits: documents of another list stand in for the relevant ones.

    Args:
        own: the list
        other: of another query; its relevant documents are not taken, since they might fit, too
    """
    spare = [document for document, yes in zip(other.documents, other.relevant, strict=True) if not yes]
    wanted = sum(own.relevant)
    if len(spare) < wanted:
        raise CalibrationError(f"a list has only {len(spare)} documents that are not relevant")
    taken = iter(spare[-wanted:] if wanted else [])
    documents = [
        next(taken) if yes else document for document, yes in zip(own.documents, own.relevant, strict=True)
    ]
    return replace(own, documents=documents, relevant=[False] * len(documents), scores=None)


def labelled(
    reranker: Reranker, lists: Sequence[JudgedList], *, progress: Progress = silent
) -> list[tuple[LabelledList, LabelledList]]:
    """Rank every list as it is, and with its match taken out.

    Args:
        reranker: ranks them
        lists: at least two. Their match is taken out with documents of the next list
        progress: shows how many lists are done

    Returns:
        Per list, the scores with and without its match.
    """
    if len(lists) < 2:
        raise CalibrationError("calibration needs at least two lists")
    pairs = []
    for place in progress(range(len(lists)), f"ranking, {reranker.pruner.keep:.0%} kept"):
        own, other = lists[place], lists[(place + 1) % len(lists)]
        pairs.append((_ranked(reranker, own), _ranked(reranker, without_match(own, other))))
    return pairs


def _ranked(reranker: Reranker, one: JudgedList) -> LabelledList:
    ranking = reranker.rank(one.query, one.documents)
    scores = {result.index: result.score for result in ranking}
    return LabelledList(
        [scores[index] for index in range(len(one.documents))], list(one.relevant), dict(ranking.signals)
    )


@dataclass(frozen=True)
class Measured:
    """How good probabilities are on lists that were not fitted on.

    Args:
        lists: how many, with and without a match
        ece_best, ece_best_raw: the calibration error of the best document's probability, fitted and raw
        ece_all, ece_all_raw: the same of all documents
        auroc, auroc_raw: how well the confidence tells lists with a match from those without
        bins, bins_raw: the reliability of the best document's probability
    """

    lists: int
    ece_best: float
    ece_best_raw: float
    ece_all: float
    ece_all_raw: float
    auroc: float
    auroc_raw: float
    bins: list[Bin]
    bins_raw: list[Bin]


def measure(calibration: ScoreCalibration, lists: Sequence[LabelledList]) -> Measured:
    """Measure a calibration on lists that it was not fitted on."""
    fitted = [calibration.probabilities(one.scores, one.signals) for one in lists]
    raw = [[math.exp(score) for score in one.scores] for one in lists]
    best = [int(np.argmax(one.scores)) for one in lists]
    right = [bool(one.relevant[place]) for one, place in zip(lists, best, strict=True)]
    every = [bool(yes) for one in lists for yes in one.relevant]
    held = [one.matched for one in lists]

    def of(probabilities: Sequence[Sequence[float]]) -> tuple[float, float, float, list[Bin]]:
        top = [own[place] for own, place in zip(probabilities, best, strict=True)]
        error, error_all = (
            expected_calibration_error(top, right),
            expected_calibration_error(list(chain(*probabilities)), every),
        )
        return error, error_all, auroc(top, held), reliability(top, right)

    both = zip(of(fitted), of(raw), strict=True)
    return Measured(len(lists), *chain(*both))  # type: ignore[arg-type]


def fit_and_measure(
    reranker: Reranker, lists: Sequence[JudgedList], *, progress: Progress = silent
) -> tuple[ScoreCalibration, Measured]:
    """Fit a calibration on all lists, and measure one that was fitted on every other list on the rest.

    Args:
        reranker: whose scores are calibrated, at its budget
        lists: with their relevant documents
        progress: shows how many lists are done

    Returns:
        The calibration of all lists, and how good the one of one half was on the other half.
    """
    if reranker.scorer != "logits":
        raise CalibrationError(f'scores are calibrated with scorer "logits", not {reranker.scorer!r}')
    pairs = labelled(reranker, lists, progress=progress)
    signals = WITH_NONE if "match" in (pairs[0][0].signals or {}) else SIGNALS
    half = ScoreCalibration.fit(chain(*pairs[::2]), signals=signals)
    measured = measure(half, list(chain(*pairs[1::2])))
    weight = _fit_weight([own for own, _ in pairs], [one.scores for one in lists])
    whole = ScoreCalibration.fit(chain(*pairs), signals=signals)
    return replace(whole, weight=weight, settings=reranker.score_settings), measured


def _fit_weight(lists: Sequence[LabelledList], scores: Sequence[Sequence[float] | None]) -> float | None:
    """Return the weight of a first stage's scores that gives the relevant documents most probability."""
    known = [
        (one, standardised([float(value) for value in own]))
        for one, own in zip(lists, scores, strict=True)
        if own is not None and one.matched and not all(one.relevant)
    ]
    if not known:
        return None

    def loss(weight: float) -> float:
        total = 0.0
        for one, prior in known:
            got = mixed(one.scores, prior, weight, pointwise=False)
            total -= math.log(math.fsum(math.exp(s) for s, yes in zip(got, one.relevant, strict=True) if yes))
        return total

    grid = [step / 20 for step in range(61)]
    return min(grid, key=loss)
