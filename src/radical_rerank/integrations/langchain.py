"""A LangChain document compressor: retrieved documents that are pictures, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict

from radical_rerank.reranking import Reranker


class RadicalCompressor(BaseDocumentCompressor):
    """The `top_n` best documents, each with its `relevance_score` in the metadata.

    A document's picture (a path, a data URI, bytes, a PIL image) is its metadata's `image_key`, or else its
    page content.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    reranker: Reranker
    top_n: int | None = None
    image_key: str = "image"

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        pictures: list[Any] = [d.metadata.get(self.image_key, d.page_content) for d in documents]
        return [
            documents[result.index].model_copy(
                update={
                    "metadata": {**documents[result.index].metadata, "relevance_score": result.probability}
                }
            )
            for result in self.reranker.rank(query, pictures, top_k=self.top_n)
        ]
