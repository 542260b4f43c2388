"""One short file per reduction method, and the registry of their names."""

from __future__ import annotations

from radical_rerank.pruning.base import (
    Layout,
    Look,
    Merge,
    PrunedStage,
    Pruner,
    PruningRun,
    Share,
    Stage,
    StageView,
    VisionSignals,
    build,
)
from radical_rerank.pruning.cdpruner import CDPruner
from radical_rerank.pruning.dart import DART
from radical_rerank.pruning.dense import Dense
from radical_rerank.pruning.divprune import DivPrune
from radical_rerank.pruning.dynres import DynResDTI, DynResQRel
from radical_rerank.pruning.fastv import FastV
from radical_rerank.pruning.lowres import LowRes
from radical_rerank.pruning.profile import ModelIdentity, Profile, TunedSchedule
from radical_rerank.pruning.pyramiddrop import PyramidDrop
from radical_rerank.pruning.qi_ei import QIEI
from radical_rerank.pruning.radical import RaDiCal
from radical_rerank.pruning.random import Random
from radical_rerank.pruning.scope import SCOPE
from radical_rerank.pruning.sparsevlm import SparseVLM
from radical_rerank.pruning.trimtokenator import TrimTokenatorLC
from radical_rerank.pruning.v2drop import V2Drop
from radical_rerank.pruning.visionzip import VisionZip

METHODS: dict[str, type[Pruner]] = {
    "radical": RaDiCal,
    "random": Random,
    "dense": Dense,
    "fastv": FastV,
    "pyramiddrop": PyramidDrop,
    "sparsevlm": SparseVLM,
    "dart": DART,
    "visionzip": VisionZip,
    "lowres": LowRes,
    "dynres-qrel": DynResQRel,
    "dynres-dti": DynResDTI,
    "qi-ei": QIEI,
    "cdpruner": CDPruner,
    "divprune": DivPrune,
    "scope": SCOPE,
    "v2drop": V2Drop,
    "trimtokenator-lc": TrimTokenatorLC,
}


__all__ = [
    "DART",
    "METHODS",
    "QIEI",
    "SCOPE",
    "CDPruner",
    "Dense",
    "DivPrune",
    "DynResDTI",
    "DynResQRel",
    "FastV",
    "Layout",
    "Look",
    "LowRes",
    "Merge",
    "ModelIdentity",
    "Profile",
    "PrunedStage",
    "Pruner",
    "PruningRun",
    "PyramidDrop",
    "RaDiCal",
    "Random",
    "Share",
    "SparseVLM",
    "Stage",
    "StageView",
    "TrimTokenatorLC",
    "TunedSchedule",
    "V2Drop",
    "VisionSignals",
    "VisionZip",
    "build",
]
