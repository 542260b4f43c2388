"""The embedded model's answers to questions about one scene."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from radical_rerank.backbones import Backbone, ImageFeatures, layout_of
from radical_rerank.evaluation.datasets import QuestionSet
from radical_rerank.pruning import Pruner


def accuracy(
    backbone: Backbone,
    pruners: Mapping[str, Pruner],
    data: QuestionSet,
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> dict[str, dict[str, float]]:
    """Per method the share of right answers to yes/no and to colour questions."""
    right: dict[str, dict[str, list[bool]]] = {name: {} for name in pruners}
    for question in track(data.questions):
        (feature,) = backbone.encode([backbone.preprocess(data.picture(question.picture), 384)])
        kind = "yes/no" if len(question.choices) == 2 else "colour"
        for name, pruner in pruners.items():
            found = answer(backbone, pruner, feature, question.text, question.choices)
            right[name].setdefault(kind, []).append(found == question.answer)
    return {
        name: {kind: sum(values) / len(values) for kind, values in sorted(kinds.items(), reverse=True)}
        for name, kinds in right.items()
    }


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
