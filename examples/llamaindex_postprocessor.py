"""LlamaIndex: rerank image nodes and keep the best three."""

from llama_index.core.schema import ImageNode, NodeWithScore

from radical_rerank import Reranker, generated_list
from radical_rerank.integrations.llamaindex import RadicalPostprocessor
from radical_rerank.reranking.encoding import data_uri

query, images = generated_list(7, candidates=6)
nodes = [
    NodeWithScore(node=ImageNode(id_=f"scene {i}", image=data_uri(image).partition(",")[2]), score=0.0)
    for i, image in enumerate(images)
]
postprocessor = RadicalPostprocessor(reranker=Reranker("scenes", keep=0.2), top_n=3)
for node in postprocessor.postprocess_nodes(nodes, query_str=query):
    print(node.node.node_id, round(node.score or 0.0, 3))
