"""A ranker for the `rerankers` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.integrations.documents import shown, shown_string
from radical_rerank.reranking import Reranker

with needs_extra("rerankers"):
    from rerankers.documents import Document
    from rerankers.models.ranker import BaseRanker
    from rerankers.results import RankedResults, Result


class RadicalRanker(BaseRanker):  # type: ignore[misc, unused-ignore]
    """Ranks documents with a picture (`image_path` or `base64`), a text or both, and plain strings.

    Args:
        model_name_or_path: a model id or a folder
        verbose: as in the library's other rankers
        reranker: use this reranker instead of loading a model
        text: whether texts are shown to the model; by default if it reads texts, see `integrations.documents`
        options: passed on to `Reranker`

    Example:
        >>> from radical_rerank import generated_list
        >>> from radical_rerank.reranking.encoding import data_uri
        >>> query, images = generated_list(0, candidates=5)
        >>> ranker = RadicalRanker("scenes", keep=0.2)
        >>> ranker.rank(query, [data_uri(image) for image in images]).top_k(1)[0].doc_id
        2
    """

    ranking_type = "listwise"

    def __init__(
        self,
        model_name_or_path: str = DEFAULT_MODEL,
        verbose: int = 1,
        *,
        reranker: Reranker | None = None,
        text: bool | None = None,
        **options: Any,
    ) -> None:
        self.verbose, self.text = verbose, text
        self.reranker = reranker or Reranker(model_name_or_path, **options)

    def score(self, query: str, doc: str) -> float:
        """Raise an InputError: a listwise ranker cannot score a single document."""
        raise InputError("a listwise ranker scores documents against each other: use rank")

    def rank(
        self,
        query: str,
        docs: Any,
        doc_ids: Sequence[str | int] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> RankedResults:
        """Rank documents for a query.

        Args:
            query: what to look for
            docs: documents, texts, paths or data URIs; or a single one
            doc_ids: their ids; by default their places
            metadata: of plain strings, kept in the results

        Returns:
            The documents, best first.
        """
        given = [docs] if isinstance(docs, (str, Document)) else list(docs)
        documents, asked = [], []
        for number, doc in enumerate(given):
            if not isinstance(doc, Document):
                doc = self._document(doc, f"document {number}")
                doc.metadata = dict(metadata[number]) if metadata else {}
            if doc.doc_id is None:
                doc.doc_id = doc_ids[number] if doc_ids else number
            documents.append(doc)
            asked.append(shown(self.reranker, self.text, f"document {number}", _images_of(doc), doc.text))
        ranking = self.reranker.rank(query, asked)
        results = [
            Result(document=documents[result.index], score=result.probability, rank=place + 1)
            for place, result in enumerate(ranking)
        ]
        return RankedResults(results=results, query=query, has_scores=True)

    def _document(self, given: Any, name: str) -> Document:
        """Return a plain string as a document of the library."""
        asked = shown_string(self.reranker, self.text, name, str(given))
        if "text" in asked:
            return Document(text=asked["text"])
        kind = {"base64": given} if str(given).startswith("data:") else {"image_path": given}
        return Document(document_type="image", **kind)


def _images_of(document: Document) -> list[str]:
    given = document.base64
    if given is not None:
        return [given if given.startswith("data:") else f"data:image/png;base64,{given}"]
    return [] if document.image_path is None else [document.image_path]
