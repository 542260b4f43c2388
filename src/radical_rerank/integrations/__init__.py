"""Thin adapters to what people already use; each needs only its own library."""

from __future__ import annotations

import math
from typing import Any

from radical_rerank.reranking import RankedDocument


def probability(result: RankedDocument) -> float:
    """A result's score as a probability among its list's candidates, in [0, 1]."""
    return math.exp(min(0.0, result.score))


def lmms_manifest() -> Any:
    """What lmms-eval finds by its entry point. Here, since it may ask while its adapter is being imported."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("radical", chat_class_path="radical_rerank.integrations.lmms_eval.RadicalLmms")
