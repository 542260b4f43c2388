"""Tiny models of the real architectures with random weights: to test the machinery, not to rank.

They are written in Hugging Face format and loaded by the same code as the large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from radical_rerank.lab.bench.models import bench_tokenizer as tiny_tokenizer

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
READABLE = {"qwen3_5": (1, 4, 6), "qwen3_5_moe": (1, 4, 7), "gemma3": (1, 4, 6)}
"""the layers of tiny models that see everything, where not all do"""
PINPOINTS = [[24, 24], [24, 48], [48, 24]]


def on_grid(family: str) -> bool:
    """Whether images have any grid of tokens (else tiles of 16 tokens)."""
    return family.startswith(("qwen", "glm", "mistral"))


def tile_of(family: str) -> int:
    """The side of a tile in pixels; it has 16 tokens."""
    return 128 if family == "internvl_lite" else 24 if family.startswith("llava") else 48


def _text(vocabulary: int, num_layers: int, eos: int | None, **other: Any) -> dict[str, Any]:
    """A decoder of width 64, with 4 heads of 16 that share 2 key-value heads."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        **other,
    }


# One function per family. text: the decoder's settings; common: the whole model's.

Settings = dict[str, Any]
VISION: Settings = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
TOWER: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _qwen2_vl(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Qwen2VLConfig

    vision = {key: VISION[key] for key in ("depth", "num_heads", "patch_size", "spatial_merge_size")}
    vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "temporal_patch_size": 2}
    return Qwen2VLConfig(text_config={**text, "rope_parameters": MROPE}, vision_config=vision, **common)


def _qwen2_5_vl(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Qwen2_5_VLConfig

    vision = {**VISION, "window_size": 32, "fullatt_block_indexes": [3]}
    return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": MROPE}, vision_config=vision, **common)


def _qwen3_vl(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    text |= {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
    vision = {**VISION, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1, 2]}
    if family == "qwen3_vl_moe":  # the fourth layer is dense
        text |= {**MOE, "mlp_only_layers": [3]}
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **common)
    return Qwen3VLConfig(text_config=text, vision_config=vision, **common)


def _qwen3_5(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    full = READABLE[family]
    kinds = ["linear_attention", "full_attention"]
    text |= {
        "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        "layer_types": [kinds[layer in full] for layer in range(text["num_hidden_layers"])],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    vision = {**VISION, "num_position_embeddings": 256}
    if family == "qwen3_5_moe":
        text |= {**MOE, "shared_expert_intermediate_size": 24}
        del text["intermediate_size"]
        return Qwen3_5MoeConfig(text_config=text, vision_config=vision, **common)
    return Qwen3_5Config(text_config=text, vision_config=vision, **common)


def _internvl(family: str, text: Settings, common: Settings) -> Any:
    from transformers import InternVLConfig

    from radical_rerank.backbones.lite_vision import InternVLLiteConfig

    kind = family.removeprefix("internvl_")
    tower = {**TOWER, "image_size": tile_of(family)}
    common |= {"image_seq_length": 16}
    if kind == "lite":
        tower |= {"patch_size": 32, "num_classes": 10, "use_absolute_position_embeddings": False}
        text |= {"model_type": "qwen3"}
        return InternVLLiteConfig(text_config=text, vision_config=tower, downsample_ratio=1.0, **common)
    text |= {"model_type": kind, **(MOE if kind == "qwen3_moe" else {})}
    return InternVLConfig(text_config=text, vision_config={**tower, "patch_size": 6}, **common)


def _llava(family: str, text: Settings, common: Settings) -> Any:
    from transformers import LlavaNextConfig, LlavaOnevisionConfig

    tower = {**TOWER, "num_hidden_layers": 3, "image_size": 24, "patch_size": 6}
    common |= {"image_token_index": common.pop("image_token_id"), "image_grid_pinpoints": PINPOINTS}
    if family == "llava_next":
        text |= {"model_type": "mistral", "sliding_window": None}
        return LlavaNextConfig(
            text_config=text, vision_config={**tower, "model_type": "clip_vision_model"}, **common
        )
    text |= {"model_type": "qwen2"}
    return LlavaOnevisionConfig(
        text_config=text, vision_config={**tower, "model_type": "siglip_vision_model"}, **common
    )


def _idefics(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Idefics3Config, SmolVLMConfig

    config = SmolVLMConfig if family == "smolvlm" else Idefics3Config
    tower = {**TOWER, "image_size": 48, "patch_size": 6}
    return config(
        text_config={**text, "model_type": "llama"},
        vision_config=tower,
        scale_factor=2,
        pad_token_id=0,
        **common,
    )


def _mistral3(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Mistral3Config

    tower = {**TOWER, "model_type": "pixtral", "patch_size": 8, "image_size": 256, "head_dim": 8}
    common |= {"image_token_index": common.pop("image_token_id"), "spatial_merge_size": 2}
    text |= {"model_type": "mistral", "sliding_window": None}
    return Mistral3Config(text_config=text, vision_config=tower, **common)


def _gemma3(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Gemma3Config

    kinds = ["sliding_attention", "full_attention"]
    text |= {
        "layer_types": [kinds[layer in READABLE[family]] for layer in range(text["num_hidden_layers"])],
        "sliding_window": 20,
        "query_pre_attn_scalar": 20,
    }
    tower = {**TOWER, "model_type": "siglip_vision_model", "image_size": 48, "patch_size": 6}
    return Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=16, **common)


def _glm4v(family: str, text: Settings, common: Settings) -> Any:
    from transformers import Glm4vConfig

    del text["head_dim"]
    text |= {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
    vision = {**VISION, "image_size": 64}
    return Glm4vConfig(text_config=text, vision_config=vision, **common)


_CONFIGS: dict[str, Callable[[str, Settings, Settings], Any]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "internvl_llama": _internvl,
    "internvl_qwen2": _internvl,
    "internvl_qwen3": _internvl,
    "internvl_lite": _internvl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "internvl_qwen3_moe": _internvl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "llava_next": _llava,
    "llava_onevision": _llava,
    "smolvlm": _idefics,
    "idefics3": _idefics,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "glm4v": _glm4v,
}
TINY_FAMILIES = tuple(_CONFIGS)


def tiny_config(family: str = "qwen3_vl", *, num_layers: int = 8, vocabulary: int = 256, **ids: int) -> Any:
    """The configuration of a tiny model; `ids` are special-token ids of its tokenizer."""
    if family not in _CONFIGS:
        raise ValueError(f"no tiny model of {family!r}; there are: {', '.join(TINY_FAMILIES)}")
    image = ids.pop("image_token_id", vocabulary - 1)
    text = _text(vocabulary, num_layers, ids.pop("eos_token_id", None))
    return _CONFIGS[family](family, text, {"image_token_id": image, "tie_word_embeddings": False})


def tiny_model(config: Any, *, seed: int = 0, attn_implementation: str = "sdpa") -> Any:
    """A model with seeded random weights, large enough that its attention is not uniform."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attn_implementation)
        for name, weight in model.named_parameters():
            if weight.ndim == 2 or "experts" in name:
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
                if "q_proj" in name or "k_proj" in name:
                    weight.data *= 1.5
                if "classifier" in name:
                    weight.data *= 3  # cells of random convolutions look alike, so their classes should not
            if weight.ndim == 4 and config.model_type == "internvl_lite":
                torch.nn.init.kaiming_normal_(weight)  # the picture reaches the last of many layers
    return model.eval()


def pair_tokenizer() -> Any:
    """A tiny tokenizer that also knows words of the trained rerankers' prompts, with Qwen's chat template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = tiny_tokenizer()
    words = sorted(plain.get_vocab(), key=plain.get_vocab().get)
    words += [
        "yes",
        "no",
        "Yes",
        "No",
        "True",
        "False",
        *"[]<*1234",
        "Query",
        "Document",
        "Instruct",
        "Ranking",
    ]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = plain.backend_tokenizer.pre_tokenizer
    special = {"unk_token": "<unk>", "pad_token": plain.pad_token, "eos_token": plain.eos_token}
    extra = [token for token in plain.all_special_tokens if token not in special.values()]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=extra, **special)
    tokenizer.chat_template = CHAT
    return tokenizer


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(
    folder: str | Path,
    family: str = "qwen3_vl",
    *,
    seed: int = 0,
    num_layers: int = 8,
    tokenizer: Any = None,
) -> Path:
    """Write a tiny model with tokenizer and image processor, for `from_pretrained(folder)`."""
    folder = Path(folder)
    if tokenizer is None:
        tokenizer = tiny_tokenizer()
        if family in TINY_FAMILIES[6:]:
            tokenizer.add_tokens([*_MARKUP, "\n"], special_tokens=True)
    config = tiny_config(
        family,
        num_layers=num_layers,
        vocabulary=len(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        eos_token_id=tokenizer.eos_token_id,
    )
    tiny_model(config, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _processor(family).save_pretrained(folder)
    return folder


_MARKUP = (
    *("[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<end_of_image>", "<|begin_of_image|>"),
    *("<|end_of_image|>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{r}_col_{c}>" for r in (1, 2, 3) for c in (1, 2, 3)),
)


def _processor(family: str) -> Any:
    import transformers

    side = tile_of(family)
    square = {"height": side, "width": side}
    if family == "llava_next":
        return transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": side}, crop_size=square, image_grid_pinpoints=PINPOINTS
        )
    if family == "llava_onevision":
        return transformers.LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=PINPOINTS)
    if family in ("smolvlm", "idefics3"):
        longest = {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}
        kind = "SmolVLM" if family == "smolvlm" else "Idefics3"
        return getattr(transformers, f"{kind}ImageProcessorPil")(**longest)
    if family == "mistral3":
        patch = {"height": 16, "width": 16}
        return transformers.PixtralImageProcessorPil(size={"longest_edge": 256}, patch_size=patch)
    if family == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size=square)
    if family.startswith("internvl_"):
        return transformers.GotOcr2ImageProcessorPil(size=square)
    frames = 2 if family == "glm4v" else 1  # GLM counts the pixels of two frames
    size = {"shortest_edge": 32 * 32 * frames, "longest_edge": 256 * 256 * frames}
    kind = "Glm4v" if family == "glm4v" else "Qwen2VL"
    return getattr(transformers, f"{kind}ImageProcessorPil")(patch_size=8, merge_size=2, size=size)
