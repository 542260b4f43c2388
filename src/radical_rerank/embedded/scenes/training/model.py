"""The scenes model before training: its tokenizer, its configuration, its first weights."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radical_rerank.embedded.scenes.world import ATTRIBUTE_WORDS
from radical_rerank.reranking.prompt import IDENTIFIERS

SPECIAL = (
    "<|pad|>",
    "<unk>",
    "<|end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_WORDS = (
    "a an and with the on at of is are in instead above below there what which colour thing answer "
    "reference yes no"
)
MARK = "▁"
"""stands for the space before a word: " a" is the article, "a" is an identifier"""

NONE = " no"
"""the answer that nothing matches"""

TEMPLATE = {
    "intro": "",
    "reference": "reference{image}",
    "candidate": "{id}{image}",
    "ask_logits": "query: {query} answer:",
    "ask_generate": "query: {query} answer:",
    "ask_composed_logits": "change: {query} answer:",
    "ask_composed_generate": "change: {query} answer:",
    "none": NONE,
    "window": 20,
    "texts": False,
    "query_images": False,
}
"""the model's own prompt; it knows no other words"""


def make_tokenizer() -> Any:
    """Return the tokenizer. A word's token includes the space before it; an identifier's does not."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [MARK + word for word in dict.fromkeys([*ATTRIBUTE_WORDS, *_WORDS.split()])]
    plain = [
        "query",
        "change",
        "question",
        "reference",
        ":",
        "?",
        MARK + "?",
        ",",
        ".",
        ">",
        MARK + ">",
        MARK,
    ]
    entries = list(dict.fromkeys([*SPECIAL, *IDENTIFIERS, *plain, *words]))
    core = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>"))
    # A capital at the start of a word begins a sentence; it is not an identifier.
    capitals = [normalizers.Replace(Regex(f" {c}"), f" {c.lower()}") for c in string.ascii_uppercase]
    core.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), *capitals])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(MARK, prepend_scheme="never"), pre_tokenizers.Punctuation("isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=list(SPECIAL[3:]),
    )


def word_ids(tokenizer: Any, words: Sequence[str]) -> Tensor:
    """Return the tokens of words inside a sentence."""
    return torch.tensor([tokenizer.convert_tokens_to_ids(MARK + word) for word in words])


def make_config(tokenizer: Any, *, num_layers: int = 12, hidden: int = 192) -> Any:
    """Return the configuration of a small Qwen3-VL.

    Args:
        tokenizer: from `make_tokenizer`
        num_layers: of the decoder
        hidden: its width
    """
    from transformers import Qwen3VLConfig

    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": hidden // 32,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "bos_token_id": None,
            "eos_token_id": ids["<|end|>"],
            "pad_token_id": ids["<|pad|>"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_heads": 4,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def make_image_processor() -> Any:
    """Return the image processor. A visual token is 16 × 16 pixels."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        size={"shortest_edge": 32 * 32, "longest_edge": 160 * 160},
        image_mean=[0.5] * 3,
        image_std=[0.25] * 3,
    )


def make_model(config: Any, seed: int) -> Any:
    """Return a model with its first weights.

    Word embeddings have norm 1. Output projections are zero, so that every layer begins as the identity.
    """
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if (
                    name.endswith(("o_proj", "down_proj", "attn.proj", "mlp.linear_fc2"))
                    and "merger" not in name
                ):
                    module.weight.zero_()
                if "deepstack_merger" in name and name.endswith("linear_fc2"):
                    module.weight.mul_(0.1)
                if module.bias is not None:
                    module.bias.zero_()
        embedding = model.get_input_embeddings().weight
        nn.init.normal_(embedding, std=embedding.shape[1] ** -0.5)
        nn.init.normal_(model.model.visual.pos_embed.weight, std=0.2)
    model.tie_weights()
    return model
