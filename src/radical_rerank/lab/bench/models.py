"""Random models with the proportions of the paper's, for timing."""

from __future__ import annotations

from typing import Any

import torch

_SPECIAL = (
    "<|endoftext|>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<img>",
    "</img>",
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WORDS = (
    "> : . , ? image images candidate candidates query which best matches the with its letter only answer "
    "rank all from to relevant most least shows are reference change modification system user assistant "
    "red green blue yellow purple orange white black small large left right above below of an and is it "
    "circle square triangle star cross ring diamond heart pink cyan at top bottom on background instead"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def bench_tokenizer() -> Any:
    """Make a word-level tokenizer that knows the letters and a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *_LETTERS, *dict.fromkeys(_WORDS.split())]
    words = list(dict.fromkeys(words))
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=list(_SPECIAL[2:]),
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def bench_model(width: int, num_layers: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Make a random Qwen3-VL with the proportions of the 4B at another width.

    The 4B has width 2560, 32 heads and 8 key-value heads of 128, MLP 9728, 24 vision blocks of width 1024.

    Args:
        width: the hidden size
        num_layers: decoder layers
        seed: seeds the weights
        dtype: of the weights, from the start: at full width, twice the memory may not be there
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    groups = max(1, round(8 * width / 2560))
    vision_heads = max(1, round(16 * width / 2560))
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 256,
            "hidden_size": width,
            "intermediate_size": 8 * round(9728 * width / 2560 / 8),
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4 * groups if width >= 2560 else 3 * groups,
            "num_key_value_heads": groups,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "eos_token_id": _SPECIAL.index("<|im_end|>"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 24,
            "hidden_size": 64 * vision_heads,
            "intermediate_size": 256 * vision_heads,
            "num_heads": vision_heads,
            "out_hidden_size": width,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        image_token_id=_SPECIAL.index("<|image_pad|>"),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.eval()


def bench_processor() -> Any:
    """Make the image processor of the 4B: 16 pixels per patch, 2 × 2 patches per token."""
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size)
