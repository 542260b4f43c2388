"""A ranker of the `rerankers` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rerankers.documents import Document
from rerankers.models.ranker import BaseRanker
from rerankers.results import RankedResults, Result

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.errors import InputError
from radical_rerank.reranking import Reranker


class RadicalRanker(BaseRanker):
    """`rank(query, docs)`: documents of type "image" with `image_path` or `base64`, or paths and data URIs.

    options: those of `Reranker.from_pretrained`; or pass a `reranker`
    """

    ranking_type = "listwise"

    def __init__(
        self,
        model_name_or_path: str = DEFAULT_MODEL,
        verbose: int = 1,
        *,
        reranker: Reranker | None = None,
        **options: Any,
    ) -> None:
        self.verbose = verbose
        self.reranker = reranker or Reranker.from_pretrained(model_name_or_path, **options)

    def score(self, query: str, doc: str) -> float:
        raise InputError("a listwise ranker scores documents against each other: use rank")

    def rank(
        self,
        query: str,
        docs: Any,
        doc_ids: Sequence[str | int] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> RankedResults:
        given = [docs] if isinstance(docs, (str, Document)) else list(docs)
        documents = []
        for number, doc in enumerate(given):
            if not isinstance(doc, Document):
                kind = {"base64": doc} if str(doc).startswith("data:") else {"image_path": doc}
                doc = Document(document_type="image", **kind)
                doc.metadata = dict(metadata[number]) if metadata else {}
            if doc.doc_id is None:
                doc.doc_id = doc_ids[number] if doc_ids else number
            documents.append(doc)
        ranking = self.reranker.rank(query, [_picture(doc, i) for i, doc in enumerate(documents)])
        results = [
            Result(document=documents[result.index], score=result.probability, rank=place + 1)
            for place, result in enumerate(ranking)
        ]
        return RankedResults(results=results, query=query, has_scores=True)


def _picture(document: Document, number: int) -> Any:
    if document.base64 is not None:
        given = document.base64
        return given if given.startswith("data:") else f"data:image/png;base64,{given}"
    if document.image_path is not None:
        return document.image_path
    raise InputError(f"document {number} shows no image: it needs image_path or base64")
