"""Questions about single pictures, answered with and without pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from radical_rerank.backbones import Backbone, ImageFeatures, layout_of
from radical_rerank.lab.datasets import Question, QuestionSet, picture_digest
from radical_rerank.lab.records import Cell, Records, digest_of
from radical_rerank.lab.runner import Runner
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Pruner
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, ImageLike, load_image


def ask(
    runner: Runner, data: QuestionSet, cells: Sequence[Cell], records: Records, progress: Progress = silent
) -> None:
    """Answer every question under every cell, except where a record exists already.

    Args:
        runner: the model and its options
        data: the questions
        cells: the settings
        records: where new records are added, with the answer and whether it is right
        progress: shows the progress over questions
    """
    backbone, size = runner.backbone, runner.plain.max_image_tokens
    for number, question in enumerate(progress(data.questions, data.name)):
        picture = data.picture(question.picture)
        shown = picture_digest(picture, f"the picture {question.picture} of {data.name}")
        content = digest_of([data.name, question, shown])
        missing = [cell for cell in cells if records.claim(runner.key(cell, number, content))]
        if not missing:
            continue
        feature = _encoded(backbone, picture, size)
        for cell in missing:
            pruner = runner.reranker(cell).pruner
            given = answer(backbone, pruner, feature, question.text, question.choices, key=number)
            records.add(
                {
                    "dataset": data.name,
                    "query": question.text,
                    "kind": kind_of(question),
                    **runner.named(cell, number, content),
                    "answer": given,
                    "right": given == question.answer,
                    **runner.provenance,
                }
            )


def kind_of(question: Question) -> str:
    """Return the kind of a question: "yes/no" or "colour"."""
    return "yes/no" if len(question.choices) == 2 else "colour"


def accuracy(
    backbone: Backbone,
    pruners: Mapping[str, Pruner],
    data: QuestionSet,
    progress: Progress = silent,
) -> dict[str, dict[str, float]]:
    """Measure the share of right answers.

    Args:
        backbone: the model
        pruners: the methods to compare, by name
        data: the questions
        progress: shows the progress over questions

    Returns:
        Per method and kind of question ("yes/no", "colour") the share of right answers.
    """
    right: dict[str, dict[str, list[bool]]] = {name: {} for name in pruners}
    for question in progress(data.questions, data.name):
        feature = _encoded(backbone, data.picture(question.picture), MAX_IMAGE_TOKENS)
        for name, pruner in pruners.items():
            given = answer(backbone, pruner, feature, question.text, question.choices)
            right[name].setdefault(kind_of(question), []).append(given == question.answer)
    return {
        name: {kind: sum(values) / len(values) for kind, values in sorted(kinds.items(), reverse=True)}
        for name, kinds in right.items()
    }


def _encoded(backbone: Backbone, picture: ImageLike, max_tokens: int) -> ImageFeatures:
    (feature,) = backbone.encode([backbone.preprocess(load_image(picture), max_tokens)])
    return feature


def answer(
    backbone: Backbone,
    pruner: Pruner,
    feature: ImageFeatures,
    question: str,
    choices: Sequence[str],
    *,
    key: int = 0,
) -> str:
    """Return the choice whose first token is the most probable answer.

    Args:
        backbone: the model
        pruner: the method that prunes the picture's tokens
        feature: the encoded picture
        question: the question
        choices: the possible answers
        key: a number that identifies the question: methods that draw at random draw differently for each
    """
    tokenizer, (before, after) = backbone.tokenizer, backbone.family.markup
    mark = tokenizer.convert_ids_to_tokens(backbone.image_token_id)
    ids: list[int] = tokenizer(f"{before}{feature.text(mark)}{after}")["input_ids"]
    ids += tokenizer(f"question: {question} answer:", add_special_tokens=False)["input_ids"]
    layout = replace(layout_of(backbone.model, ids, image_sizes=[feature.grid]), key=key)
    with pruner.on(backbone.model, layout):
        logits = backbone.next_token_logits(backbone.inputs([ids], [feature]))[0]
    words = [tokenizer(f" {c}", add_special_tokens=False)["input_ids"][0] for c in choices]
    return choices[int(logits[words].argmax())]
