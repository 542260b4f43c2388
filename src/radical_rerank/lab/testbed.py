"""A testbed: data with known relevant pictures that the experiments run on. Models that ship provide one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from radical_rerank.lab.datasets import Dataset, QuestionSet
from radical_rerank.retrieval import Embedder


@dataclass(frozen=True)
class Testbed:
    """Data sets of one kind of pictures, and the first stage of the model that was trained on them.

    Args:
        name: the name of the testbed, of that model and of its embedder
        lists: opens lists with one relevant picture each (options: lists, count, seed, …)
        composed: opens the same with a reference picture per query
        gallery: opens a gallery to search, with all relevant pictures known
        composed_gallery: opens the same with a reference picture per query
        questions: opens questions about single pictures
        embedder: makes the first stage from a backbone
        about: a description of each data set, by its name
    """

    name: str
    lists: Callable[..., Dataset]
    composed: Callable[..., Dataset]
    gallery: Callable[..., Dataset]
    composed_gallery: Callable[..., Dataset]
    questions: Callable[..., QuestionSet]
    embedder: Callable[..., Embedder]
    about: Mapping[str, str]

    __test__ = False  # pytest would take the class for a test

    def open(self, name: str, lists: int | None = None) -> Dataset:
        """Open one of the data sets in `about`.

        Args:
            name: its name
            lists: how many queries to generate; a gallery has a fixed number
        """
        drawn = {} if lists is None else {"lists": lists}
        if name == self.name:
            return self.lists(**drawn)
        if name == f"{self.name}-composed":
            return self.composed(**drawn)
        if name == f"{self.name}-composed-gallery":
            return self.composed_gallery()
        return {f"{self.name}-gallery": self.gallery}[name]()
