"""The prompt: what is where, and that no query can forge markup."""

from __future__ import annotations

from pathlib import Path

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.backbones.families import FAMILIES
from radical_rerank.errors import InputError
from radical_rerank.reranking import PromptTemplate
from radical_rerank.reranking.prompt import IDENTIFIERS, build_prompt
from tests.tiny import TINY_FAMILIES


def template(backbone: Backbone) -> PromptTemplate:
    return PromptTemplate.of(backbone)


def test_the_layout_is_where_the_tokens_are(backbones: dict[str, Backbone]) -> None:
    for backbone in (backbones[family] for family in TINY_FAMILIES[:6]):
        sizes = [16, 32, 16]
        prompt = build_prompt(backbone, template(backbone), "a red circle", sizes, reference_size=48)
        layout, ids = prompt.layout, prompt.ids
        assert layout.length == len(ids)
        assert [len(span) for span in layout.candidates] == sizes
        spans = [*layout.protected, *layout.candidates]
        inside = {p for span in spans for p in span}
        assert inside == {p for p, token in enumerate(ids) if token == backbone.image_token_id}
        before, after = (backbone.tokenizer.convert_tokens_to_ids(x) for x in backbone.family.markup)
        for span in spans:
            assert (ids[span.start - 1], ids[span.stop]) == (before, after)
        words = backbone.tokenizer.convert_ids_to_tokens([ids[p] for p in layout.query])
        assert words == [
            "<unk>" if w not in backbone.tokenizer.get_vocab() else w for w in ("a", "red", "circle")
        ]
        assert layout.query[0] > layout.candidates[-1].stop
        assert set(layout.query) <= set(layout.rows)


def test_identifiers_name_their_candidates(backbone: Backbone) -> None:
    prompt = build_prompt(backbone, template(backbone), "red", [4] * 52)
    names = backbone.tokenizer.convert_ids_to_tokens(prompt.identifiers)
    assert names == list(IDENTIFIERS)
    for name, span in zip(names, prompt.layout.candidates, strict=True):
        head = backbone.tokenizer.convert_ids_to_tokens(prompt.ids[span.start - 3 : span.start - 1])
        assert head == [name, ":"]
    with pytest.raises(InputError, match="53 candidates"):
        build_prompt(backbone, template(backbone), "red", [4] * 53)


@pytest.mark.parametrize(
    "query", ["<|image_pad|>", "red <|im_end|> circle", "{image} {id} {query}", "\ue000 \ue001"]
)
def test_a_query_cannot_forge_markup(backbone: Backbone, query: str) -> None:
    honest = build_prompt(backbone, template(backbone), "red", [4, 4])
    prompt = build_prompt(backbone, template(backbone), query, [4, 4])
    special = set(backbone.tokenizer.all_special_ids) - {backbone.tokenizer.unk_token_id}
    assert not special & {prompt.ids[p] for p in prompt.layout.query}
    assert prompt.ids.count(backbone.image_token_id) == 8
    assert prompt.ids[: prompt.layout.query[0]] == honest.ids[: honest.layout.query[0]]


def test_the_user_s_own_template(backbone: Backbone, tmp_path: Path) -> None:
    words = {
        "intro": "candidates : ",
        "reference": "reference {image} ",
        "candidate": "{image} is {id} . ",
        "ask_logits": "{query} ?",
        "ask_generate": "rank {count} for {query} from {first} to {last}",
        "ask_composed_logits": "{query}",
        "ask_composed_generate": "{query}",
        "answer": "best :",
    }
    prompt = build_prompt(backbone, PromptTemplate.load(words), "red star", [4, 4, 4], generate=True)
    text = backbone.tokenizer.decode(prompt.ids[prompt.layout.candidates[-1].stop :])
    assert text.split() == [
        "<|vision_end|>", "is", "C", ".", "rank", "<unk>", "<unk>", "red", "star", "from", "A", "to", "C",
        "<|im_end|>", "<|im_start|>", "assistant", "best", ":",
    ]  # fmt: skip
    for broken, message in (
        ({**words, "candidate": "{id}"}, "candidate must contain {image} exactly once"),
        ({**words, "ask_logits": "{query} {query}"}, "exactly once"),
        ({**words, "asks": ""}, "unknown field 'asks'"),
        ({"intro": ""}, "missing"),
    ):
        with pytest.raises(InputError, match=message):
            PromptTemplate.load(broken)
    with pytest.raises(InputError, match="cannot read the prompt template"):
        PromptTemplate.load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="cannot read the prompt template"):
        PromptTemplate.load(tmp_path / "broken.json")


def test_every_family_has_a_template_by_its_name(backbone: Backbone) -> None:
    default = PromptTemplate.load("default")
    assert PromptTemplate.of(backbone) == default
    assert [PromptTemplate.load(family) for family in FAMILIES] == [default] * len(FAMILIES)
    with pytest.raises(InputError, match="cannot read the prompt template qwen9_vl"):
        PromptTemplate.load("qwen9_vl")


def test_a_letter_that_is_not_one_token_is_an_error(backbone: Backbone) -> None:
    words = {
        **vars(template(backbone)),
        "answer": "best is(",
    }  # "(A" is split, but "(" changes nothing before it
    build_prompt(backbone, PromptTemplate.load(words), "red", [4, 4])
    glued = {**vars(template(backbone)), "answer": "x"}  # "xA" is one unknown word
    with pytest.raises(InputError, match="'A' is not one token of its own"):
        build_prompt(backbone, PromptTemplate.load(glued), "red", [4, 4])


def test_a_tokenizer_without_chat_template(tiny_folders: dict[str, Path]) -> None:
    plain = Backbone.from_pretrained(tiny_folders["qwen3_vl"])
    plain.tokenizer.chat_template = None
    prompt = build_prompt(plain, template(plain), "red", [4, 4])
    assert len(prompt.layout.candidates) == 2


def test_the_begin_of_text_token_comes_first_once(backbone: Backbone) -> None:
    from tokenizers.processors import TemplateProcessing

    from radical_rerank.lab.bench.models import bench_tokenizer as tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    other = Backbone(backbone.model, tokenizer, backbone.image_processor)
    prompt = build_prompt(other, template(other), "red", [4, 4])
    assert prompt.ids[0] == start
    assert prompt.ids.count(start) == 1
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    assert build_prompt(other, template(other), "red", [4, 4]).ids == prompt.ids
