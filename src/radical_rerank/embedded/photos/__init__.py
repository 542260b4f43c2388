"""A small reranker of photographs."""
