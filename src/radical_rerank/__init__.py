"""Listwise image reranking with vision-language models, at a fraction of their visual tokens."""

from radical_rerank.backbones import Backbone, layout_of
from radical_rerank.errors import RadicalError
from radical_rerank.pruning import Dense, Layout, Profile, Pruner, RaDiCal, Random
from radical_rerank.reranking import PromptTemplate, PruningReport, Query, Ranking, Reranker, calibrate

__version__ = "0.1.0"

__all__ = [
    "Backbone",
    "Dense",
    "Layout",
    "Profile",
    "PromptTemplate",
    "Pruner",
    "PruningReport",
    "Query",
    "RaDiCal",
    "RadicalError",
    "Random",
    "Ranking",
    "Reranker",
    "calibrate",
    "layout_of",
]
