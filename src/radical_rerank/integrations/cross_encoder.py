"""A reranker with the interface of a sentence-transformers CrossEncoder: `rank` and `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.integrations.documents import as_list, shown, shown_string
from radical_rerank.reranking import Query, Reranker
from radical_rerank.reranking.encoding import Parts


class ImageCrossEncoder:
    """A drop-in for a CrossEncoder that ranks pictures, texts, and documents with both.

    A document is a picture in any form that `Reranker.rank` takes, a text, or a dict with `text` and `image`;
    `image` may be a list. So is a query, except that a plain string is always a text.

    Args:
        model: a model id or a folder
        reranker: use this reranker instead of loading a model
        text: whether texts are shown to the model; by default if it reads texts, see `integrations.documents`
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
        self,
        model: str = DEFAULT_MODEL,
        *,
        reranker: Reranker | None = None,
        text: bool | None = None,
        **options: Any,
    ) -> None:
        self.reranker, self.text = reranker or Reranker(model, **options), text

    def rank(
        self,
        query: Any,
        documents: Sequence[Any],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Rank documents for a query.

        Args:
            query: what to look for
            documents: pictures, texts, or dicts with `text` and `image`
            top_k: return only the best K
            return_documents: add the document to each hit
            batch_size, show_progress_bar: ignored

        Returns:
            {"corpus_id", "score"} for each document, best first; with its "image" and "text" if requested.
        """
        asked = [self._shown(document, f"document {i}") for i, document in enumerate(documents)]
        hits = []
        for result in self.reranker.rank(_query(query), asked, top_k=top_k):
            hits.append({"corpus_id": result.index, "score": result.probability})
            if return_documents:
                given = documents[result.index]
                kind = "text" if "text" in asked[result.index] else "image"
                hits[-1] |= given if isinstance(given, Mapping) else {kind: given}
        return hits

    def predict(
        self,
        inputs: Sequence[Any],
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> Any:
        """Score (query, document) pairs. Pairs with the same query are scored as one list.

        A score compares a document with the others of its query. Scores of different queries are not
        comparable.

        Args:
            inputs: the pairs, or a single pair
            batch_size: ignored
            show_progress_bar: show a progress bar on stderr

        Returns:
            An array of scores, in the order of the pairs; one number for a single pair.
        """
        if len(inputs) and not isinstance(inputs[0], (list, tuple)):
            return self.predict([inputs])[0]
        asked: dict[Any, tuple[Query, list[int]]] = {}
        for number, (given, _) in enumerate(inputs):
            query = _query(given)
            asked.setdefault(_identity(query), (query, []))[1].append(number)
        lists = [
            (query, [self._shown(inputs[i][1], f"the document of pair {i}") for i in own])
            for query, own in asked.values()
        ]
        scores = np.zeros(len(inputs), dtype=np.float32)
        rankings = self.reranker.rank_many(lists, progress=bool(show_progress_bar))
        for (_, own), ranking in zip(asked.values(), rankings, strict=True):
            for result in ranking:
                scores[own[result.index]] = result.probability
        return scores

    def _shown(self, document: Any, name: str) -> dict[str, Any]:
        if isinstance(document, str):
            return shown_string(self.reranker, self.text, name, document)
        parts = _parts(document, name)
        return shown(self.reranker, self.text, name, parts.images, parts.text)


def _parts(given: Any, name: str) -> Parts:
    """Read a picture, or a dict whose `image` may be a list."""
    if isinstance(given, Mapping) and isinstance(given.get("image"), (list, tuple)):
        given = {**given, "image": None, "images": [*given["image"], *as_list(given.get("images"))]}
    return Parts.of(given, name)


def _query(given: Any) -> Query:
    if isinstance(given, (str, Query)):
        return Query.of(given)
    parts = _parts(given, "the query")
    return Query(parts.text, images=parts.images)


def _identity(query: Query) -> Any:
    """Return what equal queries have in common: texts and paths by their content, pictures as objects."""
    pictures = [query.reference, *query.images]
    known = (image if isinstance(image, (str, bytes)) else id(image) for image in pictures)
    return query.text, query.instruction, *known
