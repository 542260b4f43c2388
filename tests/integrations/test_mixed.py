"""Documents with texts and pictures: every adapter, with its real library, gives our ranking."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from radical_rerank import Backbone, Query, Reranker
from radical_rerank.errors import InputError
from radical_rerank.integrations.documents import shown, shown_string
from tests.cases import PROFILE, draw_list
from tests.service.helpers import encoded, plain

QUERY = "small red star"
PICTURES = draw_list(5, 7)[1]
Mixed = tuple[list[Image.Image], str]
DOCUMENTS: list[Mixed] = [
    (PICTURES[:2], "blue circle"),
    (PICTURES[2:3], "red"),
    ([], "large green square"),
    (PICTURES[3:4], ""),
    (PICTURES[4:6], "a small red star"),
]
Ranked = list[tuple[int, float]]
"""indices and probabilities, best first"""
Adapter = Callable[[Reranker, Any, list[Mixed]], Ranked]


@pytest.fixture(scope="module")
def reader(backbone: Backbone) -> Reranker:
    """Ranks with a model that reads texts."""
    reranker = Reranker(backbone, "radical", keep=0.4, profile=PROFILE)
    assert reranker.template.texts
    return reranker


@pytest.fixture(scope="module")
def shipped() -> Reranker:
    """Ranks with a model that reads no texts."""
    reranker = Reranker("scenes", keep=0.4)
    assert not reranker.template.texts
    return reranker


def by_library(reranker: Reranker, query: Any, documents: list[Mixed]) -> Ranked:
    ranking = reranker.rank(query, [{"images": images, "text": text} for images, text in documents])
    return [(result.index, result.probability) for result in ranking]


def by_langchain(reranker: Reranker, text: Any, documents: list[Mixed]) -> Ranked:
    pytest.importorskip("langchain_core", reason="an extra")
    from langchain_core.documents import Document

    from radical_rerank.integrations.langchain import RadicalCompressor

    # One picture stands in the metadata as it is, several are a list, none is no field.
    fields: list[Any] = [
        {"image": images if len(images) > 1 else images[0]} if images else {} for images, _ in documents
    ]
    given = [
        Document(words, metadata={**own, "k": k})
        for k, (own, (_, words)) in enumerate(zip(fields, documents, strict=True))
    ]
    best = RadicalCompressor(reranker=reranker, text=text).compress_documents(given, QUERY)
    return [(document.metadata["k"], document.metadata["relevance_score"]) for document in best]


def by_llamaindex(reranker: Reranker, text: Any, documents: list[Mixed]) -> Ranked:
    pytest.importorskip("llama_index.core", reason="an extra")
    from llama_index.core.schema import ImageNode, NodeWithScore, TextNode

    from radical_rerank.integrations.llamaindex import RadicalPostprocessor

    nodes = [
        ImageNode(text=words, image=plain(images[0])) if images else TextNode(text=words)
        for images, words in documents
    ]
    given = [NodeWithScore(node=node) for node in nodes]
    best = RadicalPostprocessor(reranker=reranker, text=text).postprocess_nodes(given, query_str=QUERY)
    ids = [node.node_id for node in nodes]
    return [(ids.index(one.node.node_id), one.score or 0.0) for one in best]


def by_rerankers(reranker: Reranker, text: Any, documents: list[Mixed]) -> Ranked:
    pytest.importorskip("rerankers", reason="an extra")
    from rerankers.documents import Document

    from radical_rerank.integrations.rerankers import RadicalRanker

    given = [
        Document(text=words, document_type="image", base64=plain(images[0])) if images else Document(words)
        for images, words in documents
    ]
    ranked = RadicalRanker(reranker=reranker, text=text).rank(QUERY, given)
    return [(result.doc_id, result.score) for result in ranked]


def by_cross_encoder(reranker: Reranker, text: Any, documents: list[Mixed]) -> Ranked:
    from radical_rerank.integrations.cross_encoder import ImageCrossEncoder

    model = ImageCrossEncoder(reranker=reranker, text=text)
    given = [{"text": words, "image": images} for images, words in documents]
    hits = [(hit["corpus_id"], hit["score"]) for hit in model.rank(QUERY, given)]
    scores = model.predict([(QUERY, document) for document in given])
    assert np.allclose(scores[[index for index, _ in hits]], [score for _, score in hits], atol=1e-6)
    return hits


def by_mteb(reranker: Reranker, text: Any, documents: list[Mixed]) -> Ranked:
    pytest.importorskip("mteb", reason="an extra")
    from datasets import Dataset

    from radical_rerank.integrations.mteb import RadicalSearch

    names = [f"d{k}" for k in range(len(documents))]
    rows = {
        "id": names,
        "image": [encoded(images[0]) if images else None for images, _ in documents],
        "text": [words for _, words in documents],
    }
    model = RadicalSearch(reranker=reranker, text=text)
    model.index(Dataset.from_dict(rows))
    scores = model.search([{"id": "q", "text": QUERY}], top_k=9, top_ranked={"q": names})["q"]
    # MTEB gets places, not probabilities.
    return [(int(name[1:]), math.nan) for name in sorted(scores, key=lambda name: -scores[name])]


ADAPTERS: dict[str, tuple[Adapter, int]] = {
    "langchain": (by_langchain, 2),
    "llamaindex": (by_llamaindex, 1),
    "rerankers": (by_rerankers, 1),
    "cross_encoder": (by_cross_encoder, 2),
    "mteb": (by_mteb, 1),
}
"""an adapter, and how many pictures a document of its library can hold"""
SLOW = ("llamaindex", "mteb")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ADAPTERS]
"""two libraries take seconds to import"""


def same(found: Ranked, expected: Ranked) -> bool:
    assert [index for index, _ in found] == [index for index, _ in expected]
    return math.isnan(found[0][1]) or np.allclose(
        [score for _, score in found], [score for _, score in expected], atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_gives_the_library_s_ranking(reader: Reranker, name: str) -> None:
    adapter, most = ADAPTERS[name]
    given = [(images[:most], text) for images, text in DOCUMENTS]
    expected = by_library(reader, QUERY, given)
    assert same(adapter(reader, None, given), expected)
    assert same(adapter(reader, True, given), expected)
    # Without texts the ranking is another one: the adapter passed them on.
    shown = [(images, text) for images, text in given if images]
    silent = by_library(reader, QUERY, [(images, "") for images, _ in shown])
    assert silent != by_library(reader, QUERY, shown)
    assert same(adapter(reader, False, shown), silent)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_texts_is_shown_pictures_alone(shipped: Reranker, name: str) -> None:
    adapter, most = ADAPTERS[name]
    given = [(images[:most], text) for images, text in DOCUMENTS]
    shown = [(images, text) for images, text in given if images]
    assert same(
        adapter(shipped, None, shown), by_library(shipped, QUERY, [(images, "") for images, _ in shown])
    )
    with pytest.raises(InputError, match=r"(document|node) '?d?2'? has no picture, and the model reads no"):
        adapter(shipped, None, given)
    with pytest.raises(InputError, match="text=True, but the model reads no texts"):
        adapter(shipped, True, shown)


def test_what_is_left_of_a_document(reader: Reranker, shipped: Reranker) -> None:
    assert shown(reader, None, "x", ["a.jpg"], " a mug ") == {"images": ["a.jpg"], "text": "a mug"}
    assert shown(reader, None, "x", ["a.jpg"], None) == {"images": ["a.jpg"]}
    assert shown(shipped, None, "x", ["a.jpg"], "a mug") == {"images": ["a.jpg"]}
    for reranker, text, words, message in (
        (reader, None, "  ", "x has no picture and no text"),
        (reader, False, "a mug", "x has no picture, and text is False"),
        (shipped, None, "a mug", "x has no picture, and the model reads no texts"),
    ):
        with pytest.raises(InputError, match=message):
            shown(reranker, text, "x", [], words)
    # A plain string is a path unless it has several words, or the caller says that it is a text.
    assert shown_string(reader, None, "x", "a mug") == {"images": [], "text": "a mug"}
    assert shown_string(reader, None, "x", "mug.jpg") == {"images": ["mug.jpg"]}
    assert shown_string(reader, True, "x", "mug.jpg") == {"images": [], "text": "mug.jpg"}
    assert shown_string(shipped, None, "x", "mug.jpg") == {"images": ["mug.jpg"]}


def test_plain_strings(reader: Reranker, tmp_path: Path) -> None:
    pytest.importorskip("rerankers", reason="an extra")
    pytest.importorskip("langchain_core", reason="an extra")
    from langchain_core.documents import Document

    from radical_rerank.integrations.cross_encoder import ImageCrossEncoder
    from radical_rerank.integrations.langchain import RadicalCompressor
    from radical_rerank.integrations.rerankers import RadicalRanker

    path = str(tmp_path / "a.png")
    PICTURES[0].save(path)
    strings = ["large green square", path, "a small red star"]
    expected = reader.rank(QUERY, strings).order
    ranked = RadicalRanker(reranker=reader).rank(QUERY, strings, metadata=[{"k": k} for k in range(3)])
    assert [result.doc_id for result in ranked] == expected
    assert [result.document.document_type for result in ranked] == [
        "image" if index == 1 else "text" for index in expected
    ]
    assert [result.document.metadata["k"] for result in ranked] == expected
    hits = ImageCrossEncoder(reranker=reader).rank(QUERY, strings, return_documents=True)
    assert [hit["corpus_id"] for hit in hits] == expected
    assert [hit["image" if hit["corpus_id"] == 1 else "text"] for hit in hits] == [
        strings[i] for i in expected
    ]
    best = RadicalCompressor(reranker=reader).compress_documents([Document(s) for s in strings], QUERY)
    assert [document.page_content for document in best] == [strings[i] for i in expected]


@pytest.mark.slow
def test_the_file_of_a_text_is_no_picture(reader: Reranker, tmp_path: Path) -> None:
    """LlamaIndex's readers name the file of every node; a model that reads texts gets the text alone."""
    pytest.importorskip("llama_index.core", reason="an extra")
    from llama_index.core.schema import ImageDocument, NodeWithScore, TextNode

    from radical_rerank.integrations.llamaindex import RadicalPostprocessor

    picture = tmp_path / "a.png"
    PICTURES[0].save(picture)
    (tmp_path / "notes.txt").write_text("red star")
    nodes = [
        TextNode(text="red star", metadata={"file_path": str(tmp_path / "notes.txt")}),
        TextNode(text="blue circle", metadata={"file_path": str(picture)}),
        ImageDocument(text="small square", image_path=str(picture)),
    ]
    expected = reader.rank(
        QUERY,
        [
            {"text": "red star"},
            {"text": "blue circle", "image": picture},
            {"text": "small square", "image": picture},
        ],
    )
    best = RadicalPostprocessor(reranker=reader).postprocess_nodes(
        [NodeWithScore(node=node) for node in nodes], query_str=QUERY
    )
    ids = [node.node_id for node in nodes]
    assert [ids.index(one.node.node_id) for one in best] == expected.order
    assert np.allclose([one.score or 0 for one in best], [r.probability for r in expected], atol=1e-5)


def test_queries_with_pictures_in_a_cross_encoder(reader: Reranker) -> None:
    from radical_rerank.integrations.cross_encoder import ImageCrossEncoder

    model, own, shown = ImageCrossEncoder(reranker=reader), PICTURES[6], PICTURES[:4]
    for query, expected in (
        ({"text": "red star", "image": own}, Query("red star", images=[own])),
        ({"image": [own, PICTURES[5]]}, Query(images=[own, PICTURES[5]])),
        (own, Query(images=[own])),
    ):
        ranking = reader.rank(expected, shown)
        hits = model.rank(query, shown)
        assert [hit["corpus_id"] for hit in hits] == ranking.order
        # Equal queries are one list, whether or not they are one object.
        pairs = [(dict(query) if isinstance(query, dict) else query, image) for image in shown]
        scores = model.predict([*pairs, ("red star", shown[0])])
        assert np.allclose(scores[[*ranking.order, 4]], [*(r.probability for r in ranking), 1.0], atol=1e-5)
    assert model.predict((own, shown[0])) == 1.0
    assert model.predict([]).shape == (0,)


@pytest.mark.slow
def test_queries_of_mteb(reader: Reranker) -> None:
    pytest.importorskip("mteb", reason="an extra")
    from datasets import Dataset

    from radical_rerank.integrations.mteb import RadicalSearch

    names = [f"d{k}" for k in range(4)]
    texts = ["red star", "blue circle", "green square", "small star"]
    rows: dict[str, list[Any]] = {"id": names, "title": ["large", "", "small", ""], "text": texts,
            "image": [encoded(image) for image in PICTURES[:4]]}  # fmt: skip
    documents = [
        {"text": f"{title} {text}".strip(), "image": image}
        for title, text, image in zip(rows["title"], texts, PICTURES, strict=False)
    ]
    own = PICTURES[6]
    queries: list[dict[str, Any]] = [
        {"id": "words", "text": QUERY, "instruction": "small", "image": None},
        {"id": "both", "text": QUERY, "image": own},
        {"id": "picture", "text": None, "image": own},
    ]
    for composed, expected in (
        (True, [Query(f"{QUERY} small"), Query(QUERY, own), Query(images=[own])]),
        (False, [Query(f"{QUERY} small"), Query(QUERY, images=[own]), Query(images=[own])]),
    ):
        model = RadicalSearch(reranker=reader, composed=composed)
        model.index(Dataset.from_dict(rows))
        found = model.search(queries, top_k=4, top_ranked={query["id"]: names for query in queries})
        for row, query in zip(queries, expected, strict=True):
            scores = found[row["id"]]
            order = [f"d{i}" for i in reader.rank(query, documents).order]
            assert sorted(scores, key=lambda name: -scores[name]) == order
    settings = [
        RadicalSearch(reranker=reader, text=text, composed=composed).mteb_model_meta.experiment_kwargs
        for text, composed in ((None, True), (False, True), (None, False))
    ]
    assert settings[0] != settings[1] != settings[2] != settings[0]
