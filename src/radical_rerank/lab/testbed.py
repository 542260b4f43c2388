"""A testbed: data with known relevant pictures that the experiments run on. Models that ship provide one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset, QuestionSet
from radical_rerank.retrieval import Embedder


@dataclass(frozen=True)
class Testbed:
    """Data sets of one kind of pictures, and the first stage of the model that was trained on them.

    Args:
        name: the name of the testbed, of that model and of its embedder
        lists: opens lists with one relevant picture each (options: lists, count, seed, …)
        gallery: opens a gallery to search, with all relevant pictures known
        embedder: makes the first stage from a backbone
        about: a description of each data set, by its name
        pool_lists: opens lists of what the first stage finds; None if there are none
        pooled: whether `lists` are those
        composed_lists: opens lists with a reference picture per query; None if there are none
        composed_searches: opens a gallery with a reference picture per query; None if there is none
        question_set: opens questions about single pictures; None if there are none
        fitting_split: the split of `lists` and `gallery` that nothing is trained on and no figure is of
    """

    name: str
    lists: Callable[..., Dataset]
    gallery: Callable[..., Dataset]
    embedder: Callable[..., Embedder]
    about: Mapping[str, str]
    pool_lists: Callable[..., Dataset] | None = None
    pooled: bool = False
    composed_lists: Callable[..., Dataset] | None = None
    composed_searches: Callable[..., Dataset] | None = None
    question_set: Callable[..., QuestionSet] | None = None
    fitting_split: str = "validation"

    __test__ = False  # pytest would take the class for a test

    def with_pools(self) -> Testbed:
        """Return the testbed whose lists are what the first stage finds."""
        if self.pool_lists is None:
            raise InputError(f"the testbed {self.name} has no lists of its first stage")
        return replace(self, lists=self.pool_lists, pooled=True)

    def composed(self, **options: int) -> Dataset:
        """Open lists with a reference picture per query."""
        if self.composed_lists is None:
            raise InputError(f"the testbed {self.name} has no composed queries")
        return self.composed_lists(**options)

    def composed_gallery(self) -> Dataset:
        """Open a gallery with a reference picture per query."""
        if self.composed_searches is None:
            raise InputError(f"the testbed {self.name} has no composed queries")
        return self.composed_searches()

    def questions(self, **options: int) -> QuestionSet:
        """Open questions about single pictures."""
        if self.question_set is None:
            raise InputError(f"the testbed {self.name} has no questions about single pictures")
        return self.question_set(**options)

    def for_fitting(self, name: str, lists: int) -> Dataset:
        """Open lists, or a gallery to search, to fit something on: no figure is of them.

        Args:
            name: the testbed's name, or that of its gallery
            lists: how many queries at most
        """
        if name == self.name:
            return self.lists(lists=lists, split=self.fitting_split)
        if name == f"{self.name}-gallery":
            return self.gallery(split=self.fitting_split)
        raise InputError(f"scores are fitted on {self.name} or {self.name}-gallery, not on {name}")

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
