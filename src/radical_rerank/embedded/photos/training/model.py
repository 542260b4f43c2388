"""The photos model before training: its tokenizer, its configuration, its first weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from radical_rerank.backbones.lite_vision import STRIDE, InternVLLite, InternVLLiteConfig
from radical_rerank.embedded.photos import PICTURE, WORD_DIMS
from radical_rerank.embedded.photos.training.sources import START, Words, class_names, lite0_weights
from radical_rerank.reranking.prompt import IDENTIFIERS

SIDE = 288
"""pixels along each side of a picture"""
CELLS = (SIDE // STRIDE) ** 2
"""visual tokens of a picture"""
WIDTH = 256
"""the width of the decoder"""
SPECIAL = ("[PAD]", "[UNK]", "[END]", "<img>", "</img>", "<IMG_CONTEXT>", "<query>", "<answer>")
TEMPLATE = {
    "candidate": "{id}{image}",
    "ask_logits": "<query>{query}<answer>",
    "window": 20,
    "texts": False,
    "query_images": False,
}
"""the model's own prompt; it knows no other"""
SURE = 8.0
"""the norm of a class name in a cell's first description, beside the learned part of norm 1 or so"""
NAMED = 1.5
"""how much the names of classes say in a visual token, beside what the attention blocks say"""
TOWER = WORD_DIMS + 4
"""the width of the tower: the words' dimensions, and one that marks the picture; a multiple of its heads"""
LEAST_WEIGHT = 0.05
"""the norm of words that say nothing about a picture; rare words have norm 1"""


def make_tokenizer(words: Words) -> Any:
    """Return the tokenizer: MiniLM's WordPiece, without case, and a token for each identifier."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [*SPECIAL, *words.tokens]
    core = Tokenizer(models.WordPiece({entry: n for n, entry in enumerate(entries)}, unk_token="[UNK]"))
    marked = normalizers.Replace(Regex(r"\b(?=[a-z0-9])"), START)
    core.normalizer = normalizers.Sequence([normalizers.BertNormalizer(lowercase=True), marked])
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    # An identifier is a letter that stands alone, of either case. In a user's text it is plain text.
    names = [AddedToken(letter, single_word=True, normalized=False, special=True) for letter in IDENTIFIERS]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[END]",
        extra_special_tokens=[*SPECIAL[3:], *names],
    )


def make_config(tokenizer: Any, *, num_layers: int = 12) -> Any:
    """Return the configuration. num_layers: of the decoder"""
    token = tokenizer.convert_tokens_to_ids
    return InternVLLiteConfig(
        vision_config={
            "hidden_size": TOWER,
            "intermediate_size": 2 * WORD_DIMS,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "attention_bias": True,
            "image_size": [SIDE, SIDE],
            "patch_size": [STRIDE, STRIDE],
            "use_absolute_position_embeddings": False,
            "named": NAMED / SURE,
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 384,
            "num_hidden_layers": num_layers,
            # One wide head: all dimensions of the words are compared at once.
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "bos_token_id": None,
            "eos_token_id": token("[END]"),
            "pad_token_id": token("[PAD]"),
            "tie_word_embeddings": True,
            # Slow rotations: words find their visual tokens by content, from up to 1,700 positions away.
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e20},
        },
        image_token_id=token("<IMG_CONTEXT>"),
        image_seq_length=CELLS,
        downsample_ratio=1.0,
        tie_word_embeddings=True,
    )


def make_image_processor() -> Any:
    """Return the image processor: one tile of 288 × 288 pixels, scaled as EfficientNet-lite0 expects."""
    from transformers import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_to_patches=False,
        min_patches=1,
        max_patches=1,
        image_mean=[127 / 255] * 3,
        image_std=[128 / 255] * 3,
    )


def make_model(config: Any, words: Words, weights: Sequence[float], seed: int) -> Any:
    """Return a model with its first weights.

    The tower begins as EfficientNet-lite0 with attention blocks that do little. Its visual tokens are little
    more than the mean embedding of the class names, weighted by their probabilities. The decoder's first
    weights come later, see `decoder`.

    Args:
        config: from `make_config`
        words: with embeddings of `WORD_DIMS` dimensions
        weights: how much each word says, from 0 to 1: the norm of its embedding
        seed: of everything that is random
    """
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    model = InternVLLite(config)
    with torch.no_grad():
        _set_words(model, words, torch.tensor(weights))
        cells = model.model.vision_tower.embeddings.patch_embeddings
        cells.load_state_dict(lite0_weights(), strict=False)
        table = model.get_input_embeddings().weight
        cells.names.weight.copy_(class_embeddings(table, class_tokens(make_tokenizer(words))))
        nn.init.normal_(cells.project.weight, std=0.3 * cells.classifier.in_features**-0.5)
        cells.project.weight[:, cells.classifier.in_features :].mul_(0.3)
        nn.init.zeros_(cells.project.bias)
        nn.init.normal_(model.model.vision_tower.embeddings.cls_token, std=0.02)
        for block in model.model.vision_tower.encoder.layer:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=module.in_features**-0.5)
        _start_projector(model.model.multi_modal_projector)
    model.tie_weights()
    return model


def _set_words(model: Any, words: Words, weights: Tensor) -> None:
    table = model.get_input_embeddings().weight
    table.zero_()
    rows = slice(len(SPECIAL), len(SPECIAL) + len(words.tokens))
    table[rows, :WORD_DIMS] = words.vectors * weights.clamp(min=LEAST_WEIGHT)[:, None]


class ClassTokens(NamedTuple):
    """The words of the class names: (U,) their ids, (classes, U) how often each is in each name."""

    ids: Tensor
    counts: Tensor


def class_tokens(tokenizer: Any) -> ClassTokens:
    """Return the words of the names of the classes."""
    names = tokenizer(class_names(), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = sorted({token for name in names for token in name})
    counts = torch.tensor([[float(name.count(token)) for token in ids] for name in names])
    return ClassTokens(torch.tensor(ids), counts)


def class_embeddings(table: Tensor, names: ClassTokens) -> Tensor:
    """Return (`TOWER`, classes) of norm `SURE`: the mean direction of the words of each name."""
    # A product, since sums over repeated indices are not the same in every run.
    words = normalize(table[names.ids, :WORD_DIMS], dim=-1)
    directions = SURE * normalize(names.counts @ words, dim=-1).T
    return pad(directions, (0, 0, 0, TOWER - WORD_DIMS))


def _start_projector(projector: Any) -> None:
    """Make it the identity on the words' dimensions: far to the right, GELU is one. It is not trained."""
    for linear, scale, bias in ((projector.linear_1, 0.25, 4.0), (projector.linear_2, 4.0, -16.0)):
        nn.init.eye_(linear.weight)
        linear.weight.mul_(scale)
        nn.init.constant_(linear.bias, bias)
    # The decoder keeps the other dimensions for itself. The mark of the picture moves to one of them.
    projector.linear_2.weight[WORD_DIMS:] = 0
    projector.linear_2.bias[WORD_DIMS:] = 0
    projector.linear_2.weight[PICTURE, TOWER - 1] = 4.0
    projector.linear_2.bias[PICTURE] = -16.0
