"""A LlamaIndex node postprocessor that reranks nodes with pictures, texts or both."""

from __future__ import annotations

import mimetypes
from typing import Any

from radical_rerank.errors import InputError, needs_extra
from radical_rerank.integrations.documents import reads_texts, shown
from radical_rerank.reranking import Reranker

with needs_extra("llamaindex"):
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, ImageDocument, ImageNode, NodeWithScore, QueryBundle


class RadicalPostprocessor(BaseNodePostprocessor):
    """Keeps the best nodes, best first, with new scores.

    The picture of a node is that of an `ImageNode` or an `ImageDocument`, or the picture file that its
    metadata names as `file_path`. Its text is its content without metadata.

    Args:
        reranker: ranks the nodes
        top_n: how many nodes to keep; by default all
        text: whether texts are shown to the model; by default if it reads texts, see `integrations.documents`

    Example:
        >>> from radical_rerank import generated_list
        >>> from radical_rerank.reranking.encoding import data_uri
        >>> query, images = generated_list(0, candidates=5)
        >>> encoded = [data_uri(image).partition(",")[2] for image in images]
        >>> nodes = [ImageNode(id_=f"scene {i}", image=image) for i, image in enumerate(encoded)]
        >>> given = [NodeWithScore(node=node) for node in nodes]
        >>> postprocessor = RadicalPostprocessor(reranker=Reranker("scenes", keep=0.2), top_n=1)
        >>> [node.node.node_id for node in postprocessor.postprocess_nodes(given, query_str=query)]
        ['scene 2']
    """

    reranker: Reranker
    top_n: int | None = None
    text: bool | None = None

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex stores."""
        return "RadicalPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise InputError("reranking needs the query: pass query_bundle or query_str")
        asked = [self._shown(node.node, f"node {number}") for number, node in enumerate(nodes)]
        return [
            NodeWithScore(node=nodes[result.index].node, score=result.probability)
            for result in self.reranker.rank(query_bundle.query_str, asked, top_k=self.top_n)
        ]

    def _shown(self, node: BaseNode, name: str) -> dict[str, Any]:
        words = node.get_content()
        images = _images_of(node, unless=bool(words.strip()) and reads_texts(self.reranker, self.text))
        return shown(self.reranker, self.text, name, images, words)


def _images_of(node: BaseNode, *, unless: bool) -> list[Any]:
    """Return the picture of a node, if it has one.

    unless: leave out a `file_path` that is no picture by its name: readers write it for files of all kinds
    """
    if isinstance(node, (ImageNode, ImageDocument)) and (node.image or node.image_path or node.image_url):
        image = node.resolve_image()
        return [image if isinstance(image, str) else image.read()]
    path = node.metadata.get("file_path")
    kind = mimetypes.guess_type(str(path), strict=False)[0] or ""
    return [] if path is None or (unless and not kind.startswith("image/")) else [path]
