"""The first stage: embedders, exact search, pools, and the index of a folder."""

from radical_rerank.retrieval.embedder import Embedder
from radical_rerank.retrieval.folder import FolderIndex, Found, Update
from radical_rerank.retrieval.models import DualEncoder, SentenceEmbedder, embedder_of
from radical_rerank.retrieval.pools import read_run, write_run
from radical_rerank.retrieval.search import nearest

__all__ = [
    "DualEncoder",
    "Embedder",
    "FolderIndex",
    "Found",
    "SentenceEmbedder",
    "Update",
    "embedder_of",
    "nearest",
    "read_run",
    "write_run",
]
