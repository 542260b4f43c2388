"""Documents with pictures and texts: forms, prompts, layouts, budgets, and one score per document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from radical_rerank import METHODS, Backbone, Query, Reranker
from radical_rerank.errors import InputError, LayoutError
from radical_rerank.pruning import Layout, RaDiCal
from radical_rerank.reranking.encoding import Parts, is_text
from radical_rerank.reranking.prompt import Content, PromptTemplate, build_pair, build_prompt, cut_text
from tests.cases import PROFILE, first_fast
from tests.tiny import READABLE, TINY_FAMILIES

WORDS = ("red", "blue", "green", "circle", "square", "star", "small", "large")


@pytest.fixture(scope="session")
def backbone(pairs: dict[str, Backbone]) -> Backbone:
    """A tiny model that also knows the answers to a pair."""
    return pairs["qwen3_vl"]


def picture(seed: int, size: tuple[int, int] = (48, 32)) -> Image.Image:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=draw, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@st.composite
def documents(draw: st.DrawFn, fewest: int = 2) -> list[dict[str, Any]]:
    """Documents of up to three pictures and up to five words; none is empty."""
    found = []
    for number in range(draw(st.integers(fewest, 6))):
        images = draw(st.integers(0, 3))
        words = draw(st.lists(st.sampled_from(WORDS), min_size=0 if images else 1, max_size=5))
        sizes = [draw(st.sampled_from([(48, 32), (64, 64), (32, 96)])) for _ in range(images)]
        shown = [picture(10 * number + i, size) for i, size in enumerate(sizes)]
        found.append({"images": shown, "text": " ".join(words)})
    return found


# Forms.


def test_every_form_of_a_document() -> None:
    one, two = picture(1), picture(2)
    expected = Parts((one, two), "a red star")
    content = [
        {"type": "text", "text": "a red star"},
        {"type": "image_url", "image_url": {"url": one}},
        {"type": "image", "image": two},
    ]
    for form in (
        {"text": "a red star", "images": [one, two]},
        {"text": "a red star", "image": one, "images": [two]},
        {"content": content},
    ):
        assert Parts.of(form, "document 0") == expected
    assert Parts.of(one, "document 0") == Parts((one,))
    assert Parts.of("a red star", "document 0") == Parts(text="a red star")
    assert Parts.of("star.jpg", "document 0") == Parts(("star.jpg",))
    assert Parts.of({"content": "star"}, "document 0") == Parts(text="star")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "document 0 has neither a picture nor a text"),
        ({"text": "  "}, "document 0 has neither"),
        ({"images": []}, "document 0 has neither"),
        ({"imges": ["a.jpg"]}, "unknown field 'imges' of document 0; did you mean 'images'"),
        ({"images": "a.jpg"}, "document 0: images must be a list"),
        ({"text": 7}, "document 0: text must be a string, not a int"),
        ({"content": [{"type": "video", "video": "x"}]}, "document 0: a part of its content"),
        ({"content": ["x"]}, "document 0: a part of its content"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "document 0: a part of its content"),
        ("missing.jpg", r"document 0 \(missing.jpg\) does not exist"),
        ("one two.jpg", r"document 0 \(one two.jpg\) does not exist"),
        ("./my folder/picture", "does not exist"),
        ("word", r"document 0 \(word\) does not exist"),
        ({"text": "red", "images": [picture(1), b"x"]}, "document 0, image 1"),
    ],
)
def test_a_bad_document_is_named(backbone: Backbone, document: Any, message: str) -> None:
    reranker = Reranker(backbone, "dense")
    with pytest.raises(InputError, match=message):
        reranker.rank("red", [document, picture(2)])
    ranking = reranker.rank("red", [document, picture(2)], on_error="skip")
    assert [(one.index, bool(one.reason)) for one in ranking.skipped] == [(0, True)]
    assert ranking.order == [1]


def test_a_path_is_never_taken_for_a_text(tmp_path: Any) -> None:
    path = tmp_path / "two words"
    picture(1).save(path, "PNG")
    assert not is_text(str(path))
    for string in (
        "a.png",
        "a b.JPEG",
        "/a b",
        "~/a b",
        "C:\\a b",
        "data:image/png;base64,a b",
        "http://a b",
    ):
        assert not is_text(string), string
    for string in ("a red star", "see figure 2.", "the file a.png shows it"):
        assert is_text(string), string


# Prompts and layouts.


@settings(max_examples=25)
@given(documents(fewest=1), st.booleans(), st.integers(0, 2))
def test_the_layout_is_where_the_contents_are(
    backbone: Backbone, drawn: list[dict[str, Any]], pointwise: bool, context: int
) -> None:
    contents = [Content(tuple(4 + i for i in range(len(d["images"]))), d["text"]) for d in drawn]
    query = Content((5,) * context, "large circle")
    template = PromptTemplate.of(backbone)
    if pointwise:
        contents = contents[:1]
        prompt = build_pair(backbone, template, query, contents[0])
    else:
        prompt = build_prompt(backbone, template, query, contents)
    ids, layout, tokenizer = prompt.ids, prompt.layout, backbone.tokenizer
    own: list[list[int]] = [[int(str(size)) for size in content.images] for content in contents]
    sizes = [size for each in own for size in each]
    assert [len(span) for span in layout.candidates] == sizes
    assert [len(span) for span in layout.protected] == [5] * context
    assert layout.num_candidates == len(contents)
    owner = [k for k, each in enumerate(own) for size in each for _ in range(size)]
    assert layout.candidate_of.tolist() == owner
    image = [i for i, size in enumerate(sizes) for _ in range(size)]
    assert layout.image_of.tolist() == image
    shown = {p for span in (*layout.candidates, *layout.protected) for p in span}
    assert shown == {p for p, token in enumerate(ids) if token == backbone.image_token_id}
    # Between two letters stand a candidate's pictures, then its words.
    plain = [t for t in tokenizer.convert_ids_to_tokens(ids) if t != "<|image_pad|>"]
    for content in contents:
        written = ["<|vision_start|>", "<|vision_end|>"] * len(content.images) + content.text.split()
        assert any(plain[i : i + len(written)] == written for i in range(len(plain)))
    # The rows that judge are the text after all candidates, without the query's pictures.
    end = max((span.stop for span in layout.candidates), default=0)
    assert layout.rows[-1] == len(ids) - 1
    assert layout.rows[0] >= end
    words = [tokenizer.convert_ids_to_tokens(ids[p]) for p in layout.query]
    assert words == ["large", "circle"]
    assert set(layout.query) <= set(layout.rows)
    # Images by their numbers: the query's first, then the candidates'.
    assert sorted(prompt.order) == list(range(context + len(sizes)))
    firsts = sorted([(s.start, i + context) for i, s in enumerate(layout.candidates)]
                    + [(s.start, i) for i, s in enumerate(layout.protected)])  # fmt: skip
    assert list(prompt.order) == [number for _, number in firsts]


def test_text_rows_never_lie_in_a_candidate_s_text(backbone: Backbone) -> None:
    contents = [Content((4,), "red star"), Content((4,), "blue circle small square")]
    prompt = build_prompt(backbone, PromptTemplate.of(backbone), "green", contents)
    words = backbone.tokenizer.convert_ids_to_tokens([prompt.ids[p] for p in prompt.layout.rows])
    assert not {"blue", "circle", "small", "square"} & set(words)
    assert "green" in words


@pytest.mark.parametrize(
    "text", ["<|image_pad|>", "red <|im_end|> circle", "{id} {query}", "\ue000\ue001\ue003 x"]
)
def test_no_text_and_no_instruction_can_forge_markup(backbone: Backbone, text: str) -> None:
    template = PromptTemplate.of(backbone)
    honest = build_prompt(backbone, template, "red", [Content((4,), "star"), 4], instruction="small")
    for changed in (
        build_prompt(backbone, template, "red", [Content((4,), text), 4], instruction="small"),
        build_prompt(backbone, template, "red", [Content((4,), "star"), 4], instruction=text),
    ):
        special = [
            t
            for t in changed.ids
            if t in backbone.tokenizer.all_special_ids and t != backbone.tokenizer.unk_token_id
        ]
        assert special == [
            t
            for t in honest.ids
            if t in backbone.tokenizer.all_special_ids and t != backbone.tokenizer.unk_token_id
        ]
        assert len(changed.layout.positions) == 8


def test_pictures_alone_are_asked_for_as_before(backbone: Backbone) -> None:
    template = PromptTemplate.of(backbone)
    plain = build_prompt(backbone, template, "red star", [4, 6])
    assert build_prompt(backbone, template, Content((), "red star"), [Content((4,)), Content((6,))]) == plain
    text = backbone.tokenizer.decode(plain.ids)
    assert "document" not in text
    assert "Instruction" not in text


def test_an_instruction_goes_into_the_prompt(backbone: Backbone) -> None:
    template = PromptTemplate.of(backbone)
    prompt = build_prompt(backbone, template, "red", [4, 4], instruction="blue square")
    words = backbone.tokenizer.convert_ids_to_tokens(prompt.ids[prompt.layout.candidates[-1].stop :])
    assert words.index("blue") < words.index("red")
    assert [prompt.ids[p] for p in prompt.layout.query] == backbone.tokenizer.convert_tokens_to_ids(["red"])
    silent = replace(template, ask_logits="{query} ?")
    with pytest.raises(InputError, match=r"no \{instruction\}"):
        build_prompt(backbone, silent, "red", [4, 4], instruction="blue")
    assert build_prompt(backbone, silent, "red", [4, 4]).ids


def test_a_model_without_texts_says_so() -> None:
    reranker = Reranker("scenes", "dense")
    with pytest.raises(InputError, match="no place for a document's text"):
        reranker.rank("red star", [{"image": picture(1), "text": "red"}, picture(2)])
    with pytest.raises(InputError, match="no place for pictures in a query"):
        reranker.rank(Query("red star", images=[picture(1)]), [picture(1), picture(2)])


def test_owners_are_checked() -> None:
    spans = (range(1, 3), range(4, 6), range(7, 8))
    layout = Layout(12, spans, (9,), owners=(0, 0, 2), count=4)
    assert layout.candidate_of.tolist() == [0, 0, 0, 0, 2]
    assert (layout.num_candidates, Layout(12, spans, (9,)).num_candidates) == (4, 3)
    for owners, count in (((0, 1), 3), ((1, 0, 2), 3), ((0, 1, 2), 2)):
        with pytest.raises(LayoutError):
            Layout(12, spans, (9,), owners=owners, count=count)


def test_long_texts_are_cut_and_reported(backbone: Backbone) -> None:
    long = " ".join(WORDS * 5)
    text, tokens = cut_text(backbone, long, 7)
    assert (text.split(), tokens) == (list(WORDS[:7]), 40)
    assert cut_text(backbone, "red star", 7) == ("red star", 2)
    reranker = Reranker(backbone, "dense", max_text_tokens=7)
    given_long = reranker.rank("red", [{"text": long}, {"text": "red", "image": picture(1)}])
    given_cut = reranker.rank("red", [{"text": text}, {"text": "red", "image": picture(1)}])
    assert [(cut.index, cut.tokens, cut.kept) for cut in given_long.cut] == [(0, 40, 7)]
    assert given_cut.cut == ()
    assert [(r.index, r.score) for r in given_long] == [(r.index, r.score) for r in given_cut]
    assert given_long.to_dict()["cut"] == [{"index": 0, "tokens": 40, "kept": 7, "page": None}]


# Rankings.


@settings(max_examples=15)
@given(documents(), st.sampled_from(["logits", "pointwise"]), st.sampled_from(sorted(METHODS)))
def test_one_score_per_document_and_the_budget_holds(
    backbone: Backbone, drawn: list[dict[str, Any]], scorer: str, method: str
) -> None:
    reranker = _reranker(backbone, method, scorer)
    ranking = reranker.rank("red star", drawn)
    assert sorted(ranking.order) == list(range(len(drawn)))
    report = ranking.report
    assert report is not None
    assert len(report.blocks) == len(report.images) == len(drawn)
    assert [len(own) for own in report.images] == [len(document["images"]) for document in drawn]
    for stage in report.stages:
        assert len(stage.survivors) == len(drawn)
        assert sum(map(len, stage.survivors)) == stage.after
        for own, images in zip(stage.survivors, report.images, strict=True):
            assert len(set(own)) == len(own)
            assert all(0 <= token < sum(images) for token in own)
    if method in ("radical", "random", "fastv", "dart", "visionzip") and scorer == "logits":
        assert report.visual_tokens_left == reranker.pruner.budget_of(report.visual_tokens) or (
            method in ("radical", "random") and report.visual_tokens_left >= 1
        )


@settings(max_examples=10)
@given(st.lists(documents(), min_size=2, max_size=3), st.sampled_from(["logits", "pointwise"]))
def test_batches_equal_singles(backbone: Backbone, lists: list[list[dict[str, Any]]], scorer: str) -> None:
    reranker = _reranker(backbone, "radical", scorer)
    asked = [(f"{WORDS[i]} star", drawn) for i, drawn in enumerate(lists)]
    asked.append(("blue", [{"text": "red star"}, {"text": "blue square"}]))  # nothing to prune
    together = list(reranker.rank_many(asked, batch_size=len(asked)))
    for ranking, (query, drawn) in zip(together, asked, strict=True):
        alone = reranker.rank(query, drawn)
        assert ranking.order == alone.order
        assert [r.score for r in ranking] == pytest.approx([r.score for r in alone], abs=1e-4)
        assert ranking.report is not None
        assert alone.report is not None
        for stage, other in zip(ranking.report.stages, alone.report.stages, strict=True):
            assert stage.survivors == other.survivors


@settings(max_examples=10)
@given(documents(), st.randoms(use_true_random=False))
def test_permuting_documents_permutes_pointwise_results(
    backbone: Backbone, drawn: list[dict[str, Any]], random: Any
) -> None:
    reranker = _reranker(backbone, "dense", "pointwise")
    order = list(range(len(drawn)))
    random.shuffle(order)
    plain = {r.index: r.score for r in reranker.rank("red star", drawn)}
    mixed = {order[r.index]: r.score for r in reranker.rank("red star", [drawn[i] for i in order])}
    assert mixed == pytest.approx(plain, abs=1e-5)


def test_texts_are_never_pruned_and_reach_the_answer(backbone: Backbone) -> None:
    reranker = _reranker(backbone, "radical", "logits", keep=0.01)
    one = [{"image": picture(1), "text": "red star"}, {"image": picture(2), "text": "blue star"}]
    other = [{"image": picture(1), "text": "red star"}, {"image": picture(2), "text": "green circle"}]
    first, second = reranker.rank("red", one), reranker.rank("red", other)
    assert [r.score for r in first] != [r.score for r in second]
    report = first.report
    assert report is not None
    text = report.tokens - report.visual_tokens
    assert all(count >= text for count in report.tokens_per_layer)


def test_texts_alone_rank(backbone: Backbone) -> None:
    texts: list[Any] = ["red star", "blue small circle", {"text": "square"}]
    for method in METHODS:
        ranking = _reranker(backbone, method, "logits").rank("red", texts)
        assert sorted(ranking.order) == [0, 1, 2]
        assert ranking.totals.visual_tokens == 0
    stock = _stock_scores(backbone, "red", ["red star", "blue small circle", "square"])
    ranked = {r.index: r.score for r in _reranker(backbone, "radical", "logits").rank("red", texts)}
    assert [ranked[i] for i in range(3)] == pytest.approx(stock, abs=1e-5)


def _stock_scores(backbone: Backbone, query: str, texts: list[str]) -> list[float]:
    """The same question put to the stock model by hand."""
    body = "You are given 3 candidate documents. Each has a letter.\n"
    body += "".join(f"{name}: {text}\n" for name, text in zip("ABC", texts, strict=True))
    body += f"Query: {query}\nWhich candidate matches the query best? Answer with its letter only."
    prompt = backbone.tokenizer.apply_chat_template(
        [{"role": "user", "content": body}], tokenize=False, add_generation_prompt=True
    )
    ids = backbone.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = backbone.model(input_ids=ids).logits[0, -1].float()
    letters = backbone.tokenizer.convert_tokens_to_ids(list("ABC"))
    return logits[letters].log_softmax(-1).tolist()


# Queries.


def test_the_pictures_of_a_query_are_protected(backbone: Backbone) -> None:
    reranker = _reranker(backbone, "radical", "logits", keep=0.05)
    shown = [picture(i) for i in range(3)]
    plain = reranker.rank("red star", shown)
    mixed = reranker.rank(Query("red star", images=[picture(7)]), shown)
    assert plain.report is not None
    assert mixed.report is not None
    extra = mixed.report.tokens - plain.report.tokens
    assert extra == 2 + 6  # the markup, and 48 x 32 pixels
    for before, after in zip(plain.report.tokens_per_layer, mixed.report.tokens_per_layer, strict=True):
        assert after == before + extra
    assert mixed.report.visual_tokens == plain.report.visual_tokens


@pytest.mark.parametrize("scorer", ["logits", "pointwise"])
def test_a_query_may_be_pictures_alone(backbone: Backbone, scorer: str) -> None:
    reranker = _reranker(backbone, "radical", scorer)
    shown = [picture(i) for i in range(3)]
    ranking = reranker.rank({"image": picture(7)}, shown)
    other = reranker.rank({"image": picture(8)}, shown)
    assert sorted(ranking.order) == [0, 1, 2]
    assert [r.score for r in ranking] != [r.score for r in other]
    # q_emb is the mean of the picture's tokens.
    encoded = backbone.encode([backbone.preprocess(picture(7), 384)])[0]
    prompt = build_prompt(backbone, reranker.template, Content((6,)), [6, 6, 6])
    assert [prompt.ids[p] for p in prompt.layout.query] == [backbone.image_token_id] * len(encoded.tokens)


def test_forms_of_a_query_give_the_same_ranking(backbone: Backbone) -> None:
    reranker = _reranker(backbone, "radical", "logits")
    shown, own = [picture(i) for i in range(3)], picture(7)
    forms: list[Any] = [
        Query("red star", images=[own], instruction="small"),
        {"text": "red star", "image": own, "instruction": "small"},
        {"text": "red star", "images": [own], "instruction": "small"},
        {
            "content": [{"type": "image", "image": own}, {"type": "text", "text": "red star"}],
            "instruction": "small",
        },
    ]
    rankings = [reranker.rank(form, shown) for form in forms]
    for ranking in rankings[1:]:
        assert [(r.index, r.score) for r in ranking] == [(r.index, r.score) for r in rankings[0]]
    plain = reranker.rank(Query("red star", images=[own]), shown)
    assert [r.score for r in plain] != [r.score for r in rankings[0]]


def test_bad_queries(backbone: Backbone) -> None:
    reranker = Reranker(backbone, "dense")
    for query, message in (
        ({}, "the query has neither a picture nor a text"),
        ({"texts": "red"}, "unknown field 'texts' of the query"),
        (Query(""), "the query is empty"),
        (Query("red", picture(1), [picture(2)]), "has no other pictures"),
        (Query("red", images=[b"x"]), "the query's picture"),
    ):
        with pytest.raises(InputError, match=message):
            reranker.rank(query, [picture(1), picture(2)])


def _reranker(backbone: Backbone, method: str, scorer: str, keep: float = 0.3) -> Reranker:
    options: dict[str, Any] = {"profile": PROFILE} if method in ("radical", "random") else {}
    return Reranker(backbone, method, keep=keep, scorer=scorer, **options)


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_mixed_lists_on_every_family(backbones: dict[str, Backbone], family: str) -> None:
    model = backbones[family]
    mixed: list[Any] = [
        {"images": [picture(1, (64, 64)), picture(2, (96, 48))], "text": "red star"},
        {"text": "blue circle"},
        picture(3, (48, 96)),
        {"image": picture(4), "text": "green square small"},
    ]
    lists: list[Any] = [
        (Query("red star", images=[picture(9, (64, 48))]), mixed),
        ("blue", [{"text": "blue star"}, {"text": "small circle"}]),
        ("large square", mixed[::-1]),
    ]
    layers = READABLE.get(family, (1, 4))[:2]
    dense = list(Reranker(model, "dense").rank_many(lists))
    for keep in (1.0, 0.3):
        reranker = Reranker(model, RaDiCal(keep=keep, profile=PROFILE, layers=layers, alpha=0.5))
        alone = list(reranker.rank_many(lists))
        together = list(reranker.rank_many(lists, batch_size=3))
        for one, other in zip(alone, together, strict=True):
            assert one.order == other.order
            assert [r.score for r in one] == pytest.approx([r.score for r in other], abs=1e-4)
            assert one.report is not None
            assert [len(own) for own in one.report.images] in ([2, 0, 1, 1], [1, 1, 0, 2], [0, 0])
        if keep == 1:
            for one, other in zip(alone, dense, strict=True):
                assert [(r.index, r.score) for r in one] == [(r.index, r.score) for r in other]
        else:
            assert alone[0].report is not None
            assert alone[0].report.visual_tokens_left < alone[0].report.visual_tokens
