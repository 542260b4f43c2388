"""Answers to questions about one scene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from radical_rerank.backbones import Backbone, ImageFeatures, layout_of
from radical_rerank.lab.datasets import Question, QuestionSet, picture_digest
from radical_rerank.lab.records import Cell, Records, digest_of
from radical_rerank.lab.runner import Runner
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Pruner
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS


def ask(
    runner: Runner, data: QuestionSet, cells: Sequence[Cell], records: Records, progress: Progress
) -> None:
    """Run what is missing: one record per question and setting, with the answer and whether it is right."""
    backbone, size = runner.backbone, runner.plain.max_image_tokens
    for number, question in enumerate(progress(data.questions, data.name)):
        picture = data.picture(question.picture)
        shown = picture_digest(picture, f"the picture {question.picture} of {data.name}")
        content = digest_of([data.name, question, shown])
        missing = [cell for cell in cells if records.claim(runner.key(cell, number, content))]
        if not missing:
            continue
        (feature,) = backbone.encode([backbone.preprocess(picture, size)])
        for cell in missing:
            pruner = runner.reranker(cell).pruner
            found = answer(backbone, pruner, feature, question.text, question.choices, key=number)
            records.add(
                {
                    "dataset": data.name,
                    "query": question.text,
                    "kind": kind_of(question),
                    **runner.named(cell, number, content),
                    "answer": found,
                    "right": found == question.answer,
                    **runner.provenance,
                }
            )


def kind_of(question: Question) -> str:
    return "yes/no" if len(question.choices) == 2 else "colour"


def accuracy(
    backbone: Backbone,
    pruners: Mapping[str, Pruner],
    data: QuestionSet,
    progress: Progress = silent,
) -> dict[str, dict[str, float]]:
    """Per method the share of right answers to yes/no and to colour questions."""
    right: dict[str, dict[str, list[bool]]] = {name: {} for name in pruners}
    for question in progress(data.questions, data.name):
        (feature,) = backbone.encode([backbone.preprocess(data.picture(question.picture), MAX_IMAGE_TOKENS)])
        for name, pruner in pruners.items():
            found = answer(backbone, pruner, feature, question.text, question.choices)
            right[name].setdefault(kind_of(question), []).append(found == question.answer)
    return {
        name: {kind: sum(values) / len(values) for kind, values in sorted(kinds.items(), reverse=True)}
        for name, kinds in right.items()
    }


def answer(
    backbone: Backbone,
    pruner: Pruner,
    feature: ImageFeatures,
    question: str,
    choices: Sequence[str],
    *,
    key: int = 0,
) -> str:
    """The choice whose word is the most probable next token.

    key: names the question, so that methods that draw do so anew for each
    """
    start, end = backbone.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    ids = [start, *[backbone.image_token_id] * len(feature.tokens), end]
    ids += backbone.tokenizer(f"question: {question} answer:", add_special_tokens=False)["input_ids"]
    with pruner.on(backbone.model, replace(layout_of(backbone.model, ids), key=key)):
        logits = backbone.next_token_logits(backbone.inputs([ids], [feature]))[0]
    words = [backbone.tokenizer(f" {c}", add_special_tokens=False)["input_ids"][0] for c in choices]
    return choices[int(logits[words].argmax())]
