"""The figures of the photos model, on photographs of Flickr8k's dev split."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from statistics import median

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.figures import Comparison, Evaluation, entropy_curves
from radical_rerank.embedded.photos.datasets import found_by, photo_gallery, photo_lists
from radical_rerank.embedded.photos.pictures import ASKED, CLASSES, STAMPS, sample_pictures
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.lab.records import Cell
from radical_rerank.reranking import Reranker
from radical_rerank.reranking.encoding import load_image

LARGE_SIZE = 4000, 3000
"""pixels of a photograph of a telephone"""
RUNS = 3
"""of which the median is reported"""


@dataclass(frozen=True)
class PhotoEvaluation(Evaluation):
    """Measures all figures of the photos model's card.

    Args:
        data: the folder of Flickr8k
        stamps: the folder of Tux Paint's stamps; the figure that needs it is left out where it is missing
    """

    data: str | Path = field(kw_only=True)
    stamps: Path = field(default=STAMPS, kw_only=True)

    @cached_property
    def found(self) -> dict[str, list[str]]:
        """Per query the photographs that the first stage finds, best first."""
        return found_by(self.backbone, self.data)

    def comparisons(self) -> list[Comparison]:
        """Return the comparisons of the card: random lists, and pools of the first stage."""
        gallery = photo_gallery(self.data)
        inside = [task for task in gallery.tasks if set(task.relevant) & set(self.found[task.id])]
        return [
            Comparison(
                photo_lists(self.data, lists=self.lists),
                [
                    Cell("Dense, N = 20", "dense"),
                    Cell("RaDiCal 20%, N = 20", "radical", 0.2),
                    Cell("RaDiCal 10%, N = 20", "radical", 0.1),
                    Cell("Random 20%, the same layers, N = 20", "random", 0.2),
                ],
            ),
            Comparison(
                replace(gallery, tasks=inside[: self.lists]),
                [Cell("Dense, pools with the match inside", "dense")],
                pools=self.found,
            ),
        ]

    def others(self) -> dict[str, Callable[[], dict[str, float]]]:
        """Return what measures the other figures, by their names."""
        measured = {
            "first stage": self.first_stage,
            "H_norm": self.entropy,
            "plain words": lambda: plain_words(self.backbone),
            "cold list": self.cold_list,
        }
        if self.stamps.is_dir():
            measured["class names"] = lambda: class_names_found(self.backbone, self.stamps)
        return measured

    def first_stage(self) -> dict[str, float]:
        """Return the recall of the first stage, and MRR@10 of its own order in the pools that are ranked."""
        ranks = [
            self.found[task.id].index(own) if own in self.found[task.id] else CANDIDATES
            for task in photo_gallery(self.data).tasks
            for own in task.relevant
        ]
        inside = [rank for rank in ranks if rank < CANDIDATES]
        ranked = inside[: self.lists]
        return {
            "R@1": sum(rank < 1 for rank in ranks) / len(ranks),
            "R@20": len(inside) / len(ranks),
            "MRR@10, match inside": sum(1 / (rank + 1) for rank in ranked if rank < 10) / max(1, len(ranked)),
            "queries": len(ranks),
        }

    def cold_list(self) -> dict[str, float]:
        """Return the median seconds of ranking 20 photographs of 12 megapixels, from JPEG to the order."""
        gallery = photo_gallery(self.data)
        files = []
        for name in gallery.gallery[:CANDIDATES]:
            file = BytesIO()
            load_image(gallery.picture(name)).resize(LARGE_SIZE).save(file, "JPEG", quality=90)
            files.append(file.getvalue())
        seconds = []
        for _ in range(RUNS):  # a new Reranker has an empty cache
            reranker = Reranker(self.backbone, "radical", keep=0.2)
            start = time.perf_counter()
            reranker.rank(gallery.tasks[0].text, files)
            seconds.append(time.perf_counter() - start)
        return {"seconds": median(seconds), "pictures": len(files)}

    def entropy(self) -> dict[str, float]:
        """Measure H_norm per layer on lists of the train and of the dev split."""
        count = max(1, self.lists // 10)
        first, second = (photo_lists(self.data, lists=count, split=split) for split in ("train", "dev"))
        return entropy_curves(self.backbone, first, second, self.progress)


def plain_words(backbone: Backbone) -> dict[str, float]:
    """Return for how many plain queries the right one of scikit-image's sample pictures comes first.

    They are pictures of things that few or no captions of the training data name.
    """
    return _first(backbone, ASKED, sample_pictures())


def class_names_found(backbone: Backbone, stamps: Path) -> dict[str, float]:
    """Return for how many names of classes that are in no caption the right one of the stamps comes first."""
    return _first(backbone, {name: Path(file).name for name, file in CLASSES.items()},
                  [stamps / file for file in CLASSES.values()])  # fmt: skip


def _first(backbone: Backbone, asked: Mapping[str, str], files: Sequence[Path]) -> dict[str, float]:
    """Return how often the right picture comes first. asked: the name of the right file of each query"""
    first = {}
    for name, method, keep in (("Dense", "dense", 1.0), ("RaDiCal 20%", "radical", 0.2)):
        reranker = Reranker(backbone, method, keep=keep)
        best = {query: files[reranker.rank(query, list(files))[0].index].name for query in asked}
        first[name] = float(sum(best[query] == file for query, file in asked.items()))
    return {**first, "queries": len(asked), "pictures": len(files)}
