"""The first stage: embedders and exact search."""

from radical_rerank.retrieval.embedder import Embedder, SceneEmbedder, nearest

__all__ = ["Embedder", "SceneEmbedder", "nearest"]
