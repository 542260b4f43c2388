"""A testbed: data with ground truth that experiments run on. The models that ship provide them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from radical_rerank.lab.datasets import Dataset, QuestionSet
from radical_rerank.retrieval import Embedder


@dataclass(frozen=True)
class Testbed:
    """Data sets of one world, and the first stage of the model that was made for it.

    name: also the name of that model, and of its embedder
    lists, composed: lists with one match; composed queries have a reference (options: lists, count, seed …)
    gallery, composed_gallery: galleries to search, with every relevant picture known
    questions: questions about single pictures
    embedder: (backbone, options) to an embedder
    """

    name: str
    lists: Callable[..., Dataset]
    composed: Callable[..., Dataset]
    gallery: Callable[..., Dataset]
    composed_gallery: Callable[..., Dataset]
    questions: Callable[..., QuestionSet]
    embedder: Callable[..., Embedder]
    about: Mapping[str, str]
    """by the name of each data set, what it is"""

    __test__ = False  # pytest would take the class for a test

    def open(self, name: str, lists: int | None = None) -> Dataset:
        """Open one of `about` by its name. lists: how many queries to draw, if they are drawn"""
        drawn = {} if lists is None else {"lists": lists}
        if name == self.name:
            return self.lists(**drawn)
        if name == f"{self.name}-composed":
            return self.composed(**drawn)
        return {f"{self.name}-gallery": self.gallery, f"{self.name}-composed-gallery": self.composed_gallery}[
            name
        ]()
