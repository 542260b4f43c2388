"""Listwise image reranking with vision-language models, at a fraction of their visual tokens."""

from importlib.metadata import version

from radical_rerank.backbones import Backbone, layout_of
from radical_rerank.errors import RadicalError
from radical_rerank.pruning import (
    DART,
    METHODS,
    Dense,
    DynResDTI,
    DynResQRel,
    FastV,
    Layout,
    LowRes,
    Merge,
    Profile,
    Pruner,
    PyramidDrop,
    RaDiCal,
    Random,
    SparseVLM,
    Stage,
    StageView,
    VisionZip,
    build,
)
from radical_rerank.reranking import (
    Document,
    PromptTemplate,
    PruningReport,
    Query,
    RankedDocument,
    Ranking,
    Reranker,
    Skipped,
    StageReport,
    calibrate,
    generated_list,
)

__version__ = version("radical-rerank")

__all__ = [
    "DART",
    "METHODS",
    "Backbone",
    "Dense",
    "Document",
    "DynResDTI",
    "DynResQRel",
    "FastV",
    "Layout",
    "LowRes",
    "Merge",
    "Profile",
    "PromptTemplate",
    "Pruner",
    "PruningReport",
    "PyramidDrop",
    "Query",
    "RaDiCal",
    "RadicalError",
    "Random",
    "RankedDocument",
    "Ranking",
    "Reranker",
    "Skipped",
    "SparseVLM",
    "Stage",
    "StageReport",
    "StageView",
    "VisionZip",
    "build",
    "calibrate",
    "generated_list",
    "layout_of",
]
