"""LlamaIndex: retrieved image nodes, the best three in order."""

import base64
import io

from llama_index.core.schema import ImageNode, NodeWithScore

from radical_rerank import Reranker
from radical_rerank.integrations.llamaindex import RadicalPostprocessor
from radical_rerank.embedded.scenes.lists import make_list

sample = make_list("test", 7, 6)  # six generated scenes; the first sentence describes one of them
nodes = []
for image in sample.images:
    image.save(file := io.BytesIO(), "PNG")
    nodes.append(NodeWithScore(node=ImageNode(image=base64.b64encode(file.getvalue()).decode()), score=0.0))
postprocessor = RadicalPostprocessor(reranker=Reranker.from_pretrained(keep=0.2), top_n=3)
for node in postprocessor.postprocess_nodes(nodes, query_str=sample.descriptions[0].text()):
    print(nodes.index(next(n for n in nodes if n.node is node.node)), round(node.score, 3))
