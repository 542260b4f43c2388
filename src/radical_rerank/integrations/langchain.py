"""A LangChain document compressor that reranks documents with pictures, texts or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radical_rerank.errors import needs_extra
from radical_rerank.integrations.documents import as_list, shown, shown_string
from radical_rerank.reranking import Reranker

with needs_extra("langchain"):
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from pydantic import ConfigDict


class RadicalCompressor(BaseDocumentCompressor):
    """Keeps the best documents, best first, with a `relevance_score` in their metadata.

    Args:
        reranker: ranks the documents
        top_n: how many documents to keep; by default all
        image_key: the metadata field with a document's picture (a path, a data URI, bytes or a PIL image), or
            with a list of pictures. Without it, a page content that is no text is a path or a data URI
        text: whether page contents are shown to the model; by default if it reads texts, see
            `integrations.documents`

    Example:
        >>> from radical_rerank import generated_list
        >>> query, images = generated_list(0, candidates=5)
        >>> documents = [Document(f"scene {i}", metadata={"image": image}) for i, image in enumerate(images)]
        >>> compressor = RadicalCompressor(reranker=Reranker("scenes", keep=0.2), top_n=1)
        >>> [document.page_content for document in compressor.compress_documents(documents, query)]
        ['scene 2']
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    reranker: Reranker
    top_n: int | None = None
    image_key: str = "image"
    text: bool | None = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Rank the documents for a query.

        Args:
            documents: documents with pictures in their metadata, page contents, or both
            query: what to look for
            callbacks: ignored

        Returns:
            Copies of the best documents, best first.
        """
        asked = [self._shown(document, f"document {i}") for i, document in enumerate(documents)]
        return [
            documents[result.index].model_copy(
                update={
                    "metadata": {**documents[result.index].metadata, "relevance_score": result.probability}
                }
            )
            for result in self.reranker.rank(query, asked, top_k=self.top_n)
        ]

    def _shown(self, document: Document, name: str) -> dict[str, Any]:
        images = as_list(document.metadata.get(self.image_key))
        if images:
            return shown(self.reranker, self.text, name, images, document.page_content)
        return shown_string(self.reranker, self.text, name, document.page_content)
