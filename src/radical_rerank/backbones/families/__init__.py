"""One file per model family."""

from radical_rerank.backbones.families.base import Family
from radical_rerank.backbones.families.internvl import InternVL
from radical_rerank.backbones.families.qwen_vl import QwenVL

FAMILIES: dict[str, type[Family]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "internvl": InternVL,
    "internvl_lite": InternVL,
}
"""by the configuration's `model_type`"""

__all__ = ["FAMILIES", "Family", "InternVL", "QwenVL"]
