"""A data set's lists with their relevant documents, to fit scores on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from radical_rerank.lab.datasets import Dataset, LazySequence
from radical_rerank.lab.first_stage import retrieve
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.lab.plots import PALETTE, figure, save
from radical_rerank.reranking.fitting import JudgedList, Measured
from radical_rerank.retrieval import Embedder


def judged_lists(
    data: Dataset, limit: int, embedder: Callable[[], Embedder], *, depth: int = CANDIDATES
) -> LazySequence[JudgedList]:
    """Return a data set's lists with their relevant documents, made when they are used.

    Args:
        data: the data set
        limit: how many lists at most
        embedder: makes the first stage, for data sets that have a gallery instead of lists
        depth: how many candidates the first stage finds

    Returns:
        The lists. Those of a gallery have the first stage's scores.
    """
    found = None if data.tasks[0].candidates is not None else retrieve(data, embedder(), depth)

    def one(number: int) -> JudgedList:
        task = data.tasks[number]
        names: list[str]
        if found is None:
            names, scores = list(task.candidates or ()), None
        else:
            names, scores = [name for name, _ in found[task.id]], [score for _, score in found[task.id]]
        return JudgedList(
            data.query(task),
            [data.document(name) for name in names],
            [name in task.relevant for name in names],
            scores,
        )

    return LazySequence(min(limit, len(data.tasks)), one)


def draw_reliability(path: str | Path, measured: dict[float, Measured], title: str) -> Path:
    """Plot how often the best document is right over its probability: raw dotted, fitted in full.

    Args:
        path: the file to write
        measured: by budget
        title: the plot's title
    """
    picture, axes = figure(height=4.6)
    axes.plot([0, 1], [0, 1], color="black", lw=1, ls="--")
    for colour, (keep, one) in zip(PALETTE * 2, measured.items(), strict=False):
        for bins, style, label in (
            (one.bins_raw, "o:", f"{keep:.0%} kept, raw (ECE {one.ece_best_raw:.3f})"),
            (one.bins, "o-", f"{keep:.0%} kept, fitted (ECE {one.ece_best:.3f})"),
        ):
            points = [(own.mean, own.fraction) for own in bins]
            axes.plot(*zip(*points, strict=True), style, ms=4, color=colour, label=label)
    axes.set_xlabel("probability of the best document")
    axes.set_ylabel("how often it is a match")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)
    return save(picture, Path(path))
