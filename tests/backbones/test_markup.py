"""Tokens inside an image that show no part of it: row breaks, newline embeddings, the names of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from radical_rerank import RaDiCal, Random, layout_of
from radical_rerank.backbones import Backbone, Row
from radical_rerank.backbones.families.base import find_rows
from radical_rerank.errors import InputError, LayoutError
from radical_rerank.pruning import Layout
from radical_rerank.reranking.prompt import PromptTemplate, build_prompt
from tests.cases import LLAVA, PROFILE, Case, first_fast, make_case, model_of, stack

MARKED = ["mistral3", "llava_next", "llava_onevision", "smolvlm", "idefics3"]


def shapes_of(family: str) -> list[tuple[int, int]]:
    return [(3, 4), (2, 2), (4, 3)] if family == "mistral3" else [(1, 1), (2, 1), (1, 1)]


def test_markup_belongs_to_no_candidates_tokens() -> None:
    layout = Layout(12, (range(1, 4), range(5, 8)), (10,), markup=((3, range(1, 3)), (5, range(6, 8))))
    assert layout.positions.tolist() == [1, 2, 6, 7]
    assert layout.candidate_of.tolist() == [0, 0, 1, 1]
    assert layout.rows == (8, 9, 10, 11)
    with pytest.raises(LayoutError, match="markup at position 9 is not inside an image"):
        Layout(12, (range(1, 4),), (10,), markup=((9, range(1, 3)),))
    with pytest.raises(LayoutError, match="position 3 is an image's"):
        Layout(12, (range(1, 4),), (10,), rows=(3, 10), markup=((3, range(1, 3)),))


def left_alone(run: Any, row: int, layout: Layout) -> set[int]:
    """Positions of a list's prompt that are alive."""
    state = run._state
    index = state.index[row] if state.valid is None else state.index[row][state.valid[row]]
    return {int(position) - state.offsets[row] for position in index}


@pytest.mark.parametrize("keep", [0.03, 0.2, 0.6])
@pytest.mark.parametrize("family", first_fast(MARKED))
def test_markup_leaves_with_the_last_token_of_its_row(family: str, keep: float) -> None:
    """In a batch of two lists, at every one of three stages. All else stays, the budget is that of tokens."""
    model = model_of(family)
    cases = [
        make_case(family, shapes_of(family), seed=1, reference=(2, 2)),
        make_case(family, shapes_of(family)[:1], seed=2, text=5),
    ]
    pruner = Random(keep=keep, layers=(1, 3, 5), profile=PROFILE)
    with torch.no_grad(), pruner.on(model, [case.layout for case in cases]) as run:
        model(**stack(cases), use_cache=True)
        gone = 0
        for row, case in enumerate(cases):
            layout, records = case.layout, run.stages[row]
            kept = {int(layout.positions[token]) for token in records[-1].survivors}
            assert len(kept) == records[-1].after
            marks = {p: span for p, span in layout.markup if any(p in c for c in layout.candidates)}
            expected = set(range(layout.length)) - set(layout.positions.tolist()) - set(marks)
            expected |= kept | {p for p, span in marks.items() if kept & set(span)}
            assert left_alone(run, row, layout) == expected
            gone += len([p for p, span in marks.items() if not kept & set(span)])
    assert gone > 0 or keep > 0.03


@pytest.mark.parametrize("family", first_fast(MARKED))
def test_the_layout_of_a_prompt_of_others_is_found(family: str) -> None:
    shapes = shapes_of(family)
    case = make_case(family, shapes, seed=1)
    if family == "mistral3":
        sizes = [[16 * a, 16 * b] for a, b in shapes]
    elif family.startswith("llava"):
        sizes = [list(LLAVA[a][0]) for a, _ in shapes]
    else:
        sizes = [[0, 0] if a == 1 else [1, 2] for a, _ in shapes]
    model = model_of(family)
    found = layout_of(model, case.ids, image_sizes=sizes, query=case.layout.query)
    assert found.positions.tolist() == case.layout.positions.tolist()
    assert found.candidate_of.tolist() == case.layout.candidate_of.tolist()
    if family in ("mistral3", "llava_next", "llava_onevision"):
        assert set(found.markup) == set(case.layout.markup)
    else:  # before the first tile, its name is text
        assert set(found.markup) <= set(case.layout.markup)
        assert len(case.layout.markup) - len(found.markup) == 2 * len(shapes)
    with torch.no_grad(), RaDiCal(keep=0.2, layers=(1, 4), profile=PROFILE).on(model, found) as run:
        model(**case.inputs)
    assert run.stages[0][-1].after > 0
    with pytest.raises(LayoutError, match="pass image_sizes="):
        layout_of(model, case.ids)


def test_rows_are_found_between_other_tokens() -> None:
    ids = [5, 9, 9, 7, 9, 9, 8, 5, 9, 9, 7, 9, 9, 8, 5]
    rows = [Row(2, after="break"), Row(2, after="end")]
    spans = find_rows(ids, 9, [rows, rows])
    assert [span for span, _ in spans] == [range(1, 7), range(8, 14)]
    assert spans[0][1] == ((3, range(1, 3)), (6, range(4, 6)))
    named = find_rows([5, 1, 9, 9, 1, 2, 9, 9, 5], 9, [[Row(2, before="one"), Row(2, before="two")]])
    assert named == [(range(2, 8), ((4, range(6, 8)), (5, range(6, 8))))]
    both = find_rows([9, 9, 1, 2, 9, 9, 5], 9, [[Row(2, after="line"), Row(2, before="two")]])
    assert both == [(range(0, 6), ((2, range(0, 2)), (3, range(4, 6))))]


def spoken(backbone: Backbone, size: Any) -> tuple[list[str], Case | Layout]:
    """The tokens of a candidate in a prompt of ours."""
    prompt = build_prompt(backbone, PromptTemplate.load("default"), "red circle", [size])
    span = prompt.layout.candidates[0]
    return backbone.tokenizer.convert_ids_to_tokens(prompt.ids[span.start : span.stop]), prompt.layout


@pytest.mark.slow
@pytest.mark.parametrize("limit", [16, 48, 400])
@pytest.mark.parametrize("size", [(96, 96), (40, 90), (90, 40)])
@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_tiles_are_named_as_the_processor_names_them(
    family: str, size: tuple[int, int], limit: int, backbones: dict[str, Backbone]
) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    backbone = backbones[family]
    (feature,) = backbone.encode([backbone.preprocess(Image.new("RGB", size), limit)])
    assert len(feature.tokens) <= limit
    tokens, layout = spoken(backbone, feature.rows)
    names = ("<fake_token_around_image>", "<|image_pad|>", "<global-img>")
    expected = get_image_prompt_string(*feature.grid, 16, *names)
    ours = "".join(tokens)
    assert ours == expected == feature.text("<|image_pad|>")
    assert isinstance(layout, Layout)
    assert len(layout.positions) == len(feature.tokens) == ours.count("<|image_pad|>")


@pytest.mark.slow
def test_a_break_follows_each_row_of_mistrals_tokens(backbones: dict[str, Backbone]) -> None:
    backbone = backbones["mistral3"]
    (feature,) = backbone.encode([backbone.preprocess(Image.new("RGB", (64, 48)), 400)])
    tokens, layout = spoken(backbone, feature.rows)
    row = ["<|image_pad|>"] * 4
    assert tokens == [*row, "[IMG_BREAK]", *row, "[IMG_BREAK]", *row, "[IMG_END]"]
    assert isinstance(layout, Layout)
    assert [len(span) for _, span in layout.markup] == [4, 4, 4]


SIZED = ["llava_next", "llava_onevision", "smolvlm", "mistral3", "glm4v", "qwen2_vl"]


@pytest.mark.slow
@given(
    width=st.integers(8, 500), height=st.integers(8, 500), limit=st.integers(1, 400), which=st.integers(0, 5)
)
def test_tokens_are_counted_as_preprocessing_makes_them(
    backbones: dict[str, Backbone], width: int, height: int, limit: int, which: int
) -> None:
    backbone = backbones[SIZED[which]]
    assume(max(width, height) / min(width, height) < 50)
    image = Image.new("RGB", (width, height))
    pixels = backbone.preprocess(image, limit)
    tokens = sum(block.rows * block.columns for block in pixels.blocks)
    assert backbone.count_tokens(image, limit) == tokens <= limit
    assert len(backbone.encode([pixels])[0].tokens) == tokens


@pytest.mark.slow
def test_gemma_gives_every_image_the_same_tokens(backbones: dict[str, Backbone]) -> None:
    backbone = backbones["gemma3"]
    for size in ((8, 300), (48, 48), (500, 20)):
        assert backbone.count_tokens(Image.new("RGB", size), 16) == 16
    with pytest.raises(InputError, match="gives every image 16 visual tokens"):
        backbone.count_tokens(Image.new("RGB", (48, 48)), 15)
