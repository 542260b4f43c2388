"""A LlamaIndex node postprocessor that reranks image nodes."""

from __future__ import annotations

from typing import Any

from radical_rerank.errors import InputError, needs_extra
from radical_rerank.reranking import Reranker

with needs_extra("llamaindex"):
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle


class RadicalPostprocessor(BaseNodePostprocessor):
    """Keeps the best nodes, best first, with new scores.

    A node is an `ImageNode`, or has the path of its image in its metadata as `file_path`.

    Args:
        reranker: ranks the images
        top_n: how many nodes to keep; by default all

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

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex stores."""
        return "RadicalPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise InputError("reranking needs the query: pass query_bundle or query_str")
        images = [_image_of(node, number) for number, node in enumerate(nodes)]
        return [
            NodeWithScore(node=nodes[result.index].node, score=result.probability)
            for result in self.reranker.rank(query_bundle.query_str, images, top_k=self.top_n)
        ]


def _image_of(node: NodeWithScore, number: int) -> Any:
    if isinstance(node.node, ImageNode):
        image = node.node.resolve_image()
        return image if isinstance(image, str) else image.read()
    if "file_path" in node.node.metadata:
        return node.node.metadata["file_path"]
    raise InputError(
        f"node {number} has no image: it needs to be an ImageNode or have a file_path in its metadata"
    )
