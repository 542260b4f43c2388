"""The shape of a sentence-transformers CrossEncoder: `rank` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.reranking import Reranker


class ImageCrossEncoder:
    """A drop-in where a CrossEncoder ranks pictures. Pairs of one query are scored as one list.

    options: those of `Reranker.from_pretrained`; or pass a `reranker`
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, reranker: Reranker | None = None, **options: Any
    ) -> None:
        self.reranker = reranker or Reranker.from_pretrained(model, **options)

    def rank(
        self,
        query: str,
        documents: Sequence[Any],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Best first: {"corpus_id", "score"}, with the document as "image" if asked for."""
        ranking = self.reranker.rank(query, [_picture(document) for document in documents], top_k=top_k)
        return [
            {
                "corpus_id": result.index,
                "score": result.probability,
                **({"image": result.document} if return_documents else {}),
            }
            for result in ranking
        ]

    def predict(
        self,
        inputs: Sequence[tuple[str, Any]] | tuple[str, Any],
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> Any:
        """One score per (query, picture) pair, in their order; a single pair gives a number.

        A score says how a picture stands among those that share its query."""
        if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], str):
            return self.predict([inputs])[0]
        places: dict[str, list[int]] = {}
        for number, (query, _) in enumerate(inputs):
            places.setdefault(query, []).append(number)
        scores = np.zeros(len(inputs), dtype=np.float32)
        lists = [(query, [_picture(inputs[i][1]) for i in own]) for query, own in places.items()]
        rankings = self.reranker.rank_many(lists, progress=bool(show_progress_bar))
        for own, ranking in zip(places.values(), rankings, strict=True):
            for result in ranking:
                scores[own[result.index]] = result.probability
        return scores


def _picture(document: Any) -> Any:
    return document["image"] if isinstance(document, dict) else document
