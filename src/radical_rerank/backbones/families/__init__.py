"""One file per model family."""

from radical_rerank.backbones.families.base import Family
from radical_rerank.backbones.families.internvl import InternVL
from radical_rerank.backbones.families.qwen_vl import QwenVL

FAMILIES: dict[str, type[Family]] = {
    "qwen3_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "internvl": InternVL,
    "internvl_lite": InternVL,
}
"""by the configuration's `model_type`"""

TEXT_TYPES = ("qwen3_vl_text", "qwen2_5_vl_text", "llama", "qwen2", "qwen3")
"""Decoders the engine can read: layers with input_layernorm and self_attn.{q,k}_proj (and q/k norms, if
any), rotary embedding by halves, full attention"""

__all__ = ["FAMILIES", "TEXT_TYPES", "Family", "InternVL", "QwenVL"]
