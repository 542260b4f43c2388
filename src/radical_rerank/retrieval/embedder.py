"""The first stage: pictures and queries as vectors, compared by dot product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from radical_rerank.reranking.encoding import ImageLike


class Embedder(Protocol):
    """Anything that turns pictures and queries into vectors of one space."""

    name: str

    @property
    def fingerprint(self) -> str:
        """A digest of the weights: vectors of other weights are of another space."""

    def embed_images(self, images: Sequence[ImageLike]) -> Tensor:
        """(n, d) one vector per picture."""

    def embed_queries(self, queries: Sequence[str]) -> Tensor:
        """(n, d) one vector per query."""
