"""From a query and images to a ranking: prompt, scorers, windows, calibration, the Reranker."""

from radical_rerank.reranking.calibration import calibrate
from radical_rerank.reranking.images import Document, load_image
from radical_rerank.reranking.prompt import PromptTemplate
from radical_rerank.reranking.report import PruningReport, StageReport
from radical_rerank.reranking.reranker import Query, RankedDocument, Ranking, Reranker, Skipped

__all__ = [
    "Document",
    "PromptTemplate",
    "PruningReport",
    "Query",
    "RankedDocument",
    "Ranking",
    "Reranker",
    "Skipped",
    "StageReport",
    "calibrate",
    "load_image",
]
