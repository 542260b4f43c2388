"""An image reranker with the interface of a sentence-transformers CrossEncoder: `rank` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.reranking import Reranker


class ImageCrossEncoder:
    """A drop-in for a CrossEncoder that ranks images.

    Args:
        model: a model id or a folder
        reranker: use this reranker instead of loading a model
        options: passed on to `Reranker`

    Example:
        >>> from radical_rerank import generated_list
        >>> query, images = generated_list(0, candidates=5)
        >>> model = ImageCrossEncoder("scenes", keep=0.2)
        >>> [hit["corpus_id"] for hit in model.rank(query, images, top_k=1)]
        [2]
        >>> int(model.predict([(query, image) for image in images]).argmax())
        2
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, reranker: Reranker | None = None, **options: Any
    ) -> None:
        self.reranker = reranker or Reranker(model, **options)

    def rank(
        self,
        query: str,
        documents: Sequence[Any],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Rank images for a query.

        Args:
            query: what to look for
            documents: images in any form that `Reranker.rank` takes, or {"image": …}
            top_k: return only the best K
            return_documents: add the image to each hit
            batch_size, show_progress_bar: ignored

        Returns:
            {"corpus_id", "score"} for each image, best first; with "image" if requested.
        """
        ranking = self.reranker.rank(query, [_image_of(document) for document in documents], top_k=top_k)
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
        """Score (query, image) pairs. Pairs with the same query are scored as one list.

        A score compares an image with the others of its query. Scores of different queries are not
        comparable.

        Args:
            inputs: the pairs, or a single pair
            batch_size: ignored
            show_progress_bar: show a progress bar on stderr

        Returns:
            An array of scores, in the order of the pairs; one number for a single pair.
        """
        if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], str):
            return self.predict([inputs])[0]
        places: dict[str, list[int]] = {}
        for number, (query, _) in enumerate(inputs):
            places.setdefault(query, []).append(number)
        scores = np.zeros(len(inputs), dtype=np.float32)
        lists = [(query, [_image_of(inputs[i][1]) for i in own]) for query, own in places.items()]
        rankings = self.reranker.rank_many(lists, progress=bool(show_progress_bar))
        for own, ranking in zip(places.values(), rankings, strict=True):
            for result in ranking:
                scores[own[result.index]] = result.probability
        return scores


def _image_of(document: Any) -> Any:
    return document["image"] if isinstance(document, dict) else document
