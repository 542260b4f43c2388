"""LangChain: rerank image documents and keep the best three."""

from langchain_core.documents import Document

from radical_rerank import Reranker, generated_list
from radical_rerank.integrations.langchain import RadicalCompressor

query, images = generated_list(7, candidates=6)
documents = [Document(f"scene {i}", metadata={"image": image}) for i, image in enumerate(images)]
compressor = RadicalCompressor(reranker=Reranker("scenes", keep=0.2), top_n=3)
for document in compressor.compress_documents(documents, query):
    print(document.page_content, round(document.metadata["relevance_score"], 3))
