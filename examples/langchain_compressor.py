"""LangChain: retrieved documents that are pictures, the best three in order."""

from langchain_core.documents import Document

from radical_rerank import Reranker
from radical_rerank.integrations.langchain import RadicalCompressor
from radical_rerank.embedded.scenes.lists import make_list

sample = make_list("test", 7, 6)  # six generated scenes; the first sentence describes one of them
documents = [Document(f"scene {i}", metadata={"image": image}) for i, image in enumerate(sample.images)]
compressor = RadicalCompressor(reranker=Reranker.from_pretrained(keep=0.2), top_n=3)
for document in compressor.compress_documents(documents, sample.descriptions[0].text()):
    print(document.page_content, round(document.metadata["relevance_score"], 3))
