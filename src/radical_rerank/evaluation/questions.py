"""The embedded model's answers to questions about one scene."""

from __future__ import annotations

from collections.abc import Sequence

from radical_rerank.backbones import Backbone, ImageFeatures, layout_of
from radical_rerank.pruning import Pruner


def answer(
    backbone: Backbone, pruner: Pruner, feature: ImageFeatures, question: str, choices: Sequence[str]
) -> str:
    """The choice whose word is the most probable next token."""
    start, end = backbone.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    ids = [start, *[backbone.image_token_id] * len(feature.tokens), end]
    ids += backbone.tokenizer(f"question: {question} answer:", add_special_tokens=False)["input_ids"]
    with pruner.on(backbone.model, layout_of(backbone.model, ids)):
        logits = backbone.next_token_logits(backbone.inputs([ids], [feature]))[0]
    words = [backbone.tokenizer(f" {c}", add_special_tokens=False)["input_ids"][0] for c in choices]
    return choices[int(logits[words].argmax())]
