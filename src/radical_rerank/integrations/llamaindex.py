"""A LlamaIndex node postprocessor: retrieved image nodes, in order."""

from __future__ import annotations

from typing import Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle

from radical_rerank.errors import InputError
from radical_rerank.reranking import Reranker


class RadicalPostprocessor(BaseNodePostprocessor):
    """The `top_n` best nodes with their new scores. A node is an ImageNode, or has its picture's path in the
    metadata as `file_path`."""

    reranker: Reranker
    top_n: int | None = None

    @classmethod
    def class_name(cls) -> str:
        return "RadicalPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise InputError("reranking needs the query: pass query_bundle or query_str")
        pictures = [_picture(node, number) for number, node in enumerate(nodes)]
        return [
            NodeWithScore(node=nodes[result.index].node, score=result.probability)
            for result in self.reranker.rank(query_bundle.query_str, pictures, top_k=self.top_n)
        ]


def _picture(node: NodeWithScore, number: int) -> Any:
    if isinstance(node.node, ImageNode):
        found = node.node.resolve_image()
        return found if isinstance(found, str) else found.read()
    if "file_path" in node.node.metadata:
        return node.node.metadata["file_path"]
    raise InputError(f"node {number} is no ImageNode and has no file_path in its metadata")
