"""Questions about single pictures: each family shows the picture in its own markup."""

from __future__ import annotations

from typing import Any

import pytest

from radical_rerank import Dense, Random
from radical_rerank.backbones import Backbone, ImageFeatures, slow
from radical_rerank.lab.questions import answer
from radical_rerank.reranking.prompt import PromptTemplate, ScoreHead, build_pair, sizes_of
from tests.cases import draw_list, first_fast
from tests.tiny import TINY_FAMILIES

COLOURS = ("red", "green", "blue", "yellow", "purple")
QUESTION = "which is the circle ?"


@pytest.mark.parametrize("family", first_fast(sorted(TINY_FAMILIES)))
def test_a_question_is_put_as_the_prompts_of_its_family_are(
    family: str, backbones: dict[str, Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, (_, (image, *_)) = backbones[family], draw_list(3, 1)
    (feature,) = backbone.encode([backbone.preprocess(image, 64)])
    asked: list[list[int]] = []
    inputs = backbone.inputs

    def noted(ids: list[list[int]], features: list[ImageFeatures]) -> dict[str, Any]:
        asked.extend(ids)
        return inputs(ids, features)

    monkeypatch.setattr(backbone, "inputs", noted)
    given = answer(backbone, Dense(), feature, QUESTION, COLOURS)
    # The same words as a template. With a head, it asks for no answers that are tokens.
    words = PromptTemplate(pair="{image}question: {query} answer:", chat="{body}", head=ScoreHead("score"))
    prompt = build_pair(backbone, words, QUESTION, *sizes_of([feature]))
    assert asked == [prompt.ids]
    logits = slow.stock_logits(backbone, inputs(asked, [feature]))[0, -1]
    tokens = [backbone.tokenizer(f" {colour}")["input_ids"][0] for colour in COLOURS]
    assert given == COLOURS[int(logits[tokens].argmax())]
    assert answer(backbone, Random(keep=0.1, layers=(2,)), feature, QUESTION, COLOURS) in COLOURS
