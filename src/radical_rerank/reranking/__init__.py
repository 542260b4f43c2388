"""From a query and images to a ranking."""

from radical_rerank.reranking.calibration import calibrate, generated_list
from radical_rerank.reranking.check import Check, CheckReport, check_model
from radical_rerank.reranking.encoding import Document, Query, VisionCache, load_image
from radical_rerank.reranking.preset import Preset
from radical_rerank.reranking.prompt import PromptTemplate
from radical_rerank.reranking.reranker import Reranker
from radical_rerank.reranking.results import (
    Cut,
    PruningReport,
    RankedDocument,
    Ranking,
    Skipped,
    StageReport,
    Totals,
)

__all__ = [
    "Check",
    "CheckReport",
    "Cut",
    "Document",
    "Preset",
    "PromptTemplate",
    "PruningReport",
    "Query",
    "RankedDocument",
    "Ranking",
    "Reranker",
    "Skipped",
    "StageReport",
    "Totals",
    "VisionCache",
    "calibrate",
    "check_model",
    "generated_list",
    "load_image",
]
