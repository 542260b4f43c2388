"""Tiny models of the real architectures with random weights: to test the machinery, not to rank.

They are written in Hugging Face format and loaded by the same code as the large ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from radical_rerank.lab.bench.models import bench_tokenizer as tiny_tokenizer

TINY_FAMILIES = (
    "qwen3_vl",
    "qwen2_5_vl",
    "internvl_llama",
    "internvl_qwen2",
    "internvl_qwen3",
    "internvl_lite",
)


def tile_of(family: str) -> int:
    """The side of a tile of a tiny InternVL, in pixels; it has 16 tokens."""
    return 128 if family == "internvl_lite" else 48


def tiny_config(family: str = "qwen3_vl", *, num_layers: int = 8, vocabulary: int = 256, **ids: int) -> Any:
    """The configuration of a tiny model; `ids` are special-token ids of its tokenizer."""
    from transformers import InternVLConfig, Qwen2_5_VLConfig, Qwen3VLConfig

    from radical_rerank.backbones.lite_vision import InternVLLiteConfig

    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": ids.pop("eos_token_id", None),
        "pad_token_id": None,
    }
    image = ids.pop("image_token_id", vocabulary - 1)
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    if family.startswith("internvl_"):
        kind = family.removeprefix("internvl_")
        tower: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": tile_of(family),
        }
        common = {"image_token_id": image, "image_seq_length": 16, "tie_word_embeddings": False}
        if kind == "lite":
            tower |= {"patch_size": 32, "num_classes": 10, "use_absolute_position_embeddings": False}
            return InternVLLiteConfig(
                text_config={"model_type": "qwen3", **text},
                vision_config=tower,
                downsample_ratio=1.0,
                **common,
            )
        return InternVLConfig(
            text_config={"model_type": kind, **text}, vision_config={**tower, "patch_size": 6}, **common
        )
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
    }
    common = {"image_token_id": image, "tie_word_embeddings": False}
    if family == "qwen2_5_vl":
        return Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": mrope},
            vision_config={**vision, "window_size": 32, "fullatt_block_indexes": [3]},
            **common,
        )
    if family == "qwen3_vl":
        return Qwen3VLConfig(
            text_config={**text, "rope_parameters": {**mrope, "mrope_interleaved": True}},
            vision_config={**vision, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1, 2]},
            **common,
        )
    raise ValueError(f"no tiny model of {family!r}; there are: {', '.join(TINY_FAMILIES)}")


def tiny_model(config: Any, *, seed: int = 0, attn_implementation: str = "sdpa") -> Any:
    """A model with seeded random weights, large enough that its attention is not uniform."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attn_implementation)
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
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
    from transformers import GotOcr2ImageProcessorPil, Qwen2VLImageProcessorPil

    folder = Path(folder)
    tokenizer = tokenizer or tiny_tokenizer()
    config = tiny_config(
        family,
        num_layers=num_layers,
        vocabulary=len(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        eos_token_id=tokenizer.eos_token_id,
    )
    tiny_model(config, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.startswith("internvl_"):
        processor = GotOcr2ImageProcessorPil(size={"height": tile_of(family), "width": tile_of(family)})
    else:
        processor = Qwen2VLImageProcessorPil(
            patch_size=8, merge_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
        )
    processor.save_pretrained(folder)
    return folder
