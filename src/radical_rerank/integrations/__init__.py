"""Adapters for other libraries. Each needs only its own library, which is an extra of this package."""

from __future__ import annotations

from typing import Any


def lmms_manifest() -> Any:
    """Return the description of our model for lmms-eval, which calls this through an entry point.

    It is here, not in `lmms_eval`, because lmms-eval may call it while that module is being imported.
    """
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("radical", chat_class_path="radical_rerank.integrations.lmms_eval.RadicalLmms")
