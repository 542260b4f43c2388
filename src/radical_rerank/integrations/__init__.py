"""Thin adapters to what people already use; each needs only its own library."""

from __future__ import annotations

from typing import Any


def lmms_manifest() -> Any:
    """What lmms-eval finds by its entry point. Here, since it may ask while its adapter is being imported."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("radical", chat_class_path="radical_rerank.integrations.lmms_eval.RadicalLmms")
