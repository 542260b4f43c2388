"""One file per model family."""

from radical_rerank.backbones.families.base import Family
from radical_rerank.backbones.families.gemma3 import Gemma3
from radical_rerank.backbones.families.glm import Glm
from radical_rerank.backbones.families.idefics import Idefics
from radical_rerank.backbones.families.internvl import InternVL, InternVLLite
from radical_rerank.backbones.families.llava import Llava
from radical_rerank.backbones.families.mistral3 import Mistral3
from radical_rerank.backbones.families.qwen3_5 import Qwen35
from radical_rerank.backbones.families.qwen_vl import QwenVL

FAMILIES: dict[str, type[Family]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35,
    "internvl": InternVL,
    "internvl_lite": InternVLLite,
    "llava_next": Llava,
    "llava_onevision": Llava,
    "idefics3": Idefics,
    "smolvlm": Idefics,
    "mistral3": Mistral3,
    "gemma3": Gemma3,
    "glm4v": Glm,
}
"""by the configuration's `model_type`"""

REFUSED = {
    "gemma4": "its layers share keys and values with earlier ones, which hold other tokens after pruning, "
    "and each layer takes an input of its own for every token",
    "mllama": "its decoder reads images by cross attention: they have no tokens in the prompt",
    "lfm2_vl": "its layers have other parts than those the engine reads",
}
"""what is in the way of some model types that people ask for"""

__all__ = ["FAMILIES", "REFUSED", "Family"]
