"""Every adapter with its real library, and the examples as a user runs them."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from radical_rerank import RaDiCal, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import composed_lists, scene_gallery, scene_lists
from radical_rerank.errors import InputError
from radical_rerank.lab.bench.service import listening
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.metrics import measure
from radical_rerank.reranking import Query, RankedDocument, Ranking
from tests.cases import PROFILE, draw_list
from tests.service.helpers import encoded, plain, uri

QUERY, PICTURES = draw_list(3, 5)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def reranker() -> Reranker:
    return Reranker.from_pretrained("scenes", keep=0.3)


@pytest.fixture(scope="module")
def expected(reranker: Reranker) -> Ranking:
    return reranker.rank(QUERY, PICTURES)


@pytest.fixture
def url() -> Iterator[str]:
    with listening(Backbone.from_pretrained("scenes"), patience=100.0) as url:
        yield url


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"{i}.png") for i in range(len(PICTURES))]
    for path, image in zip(names, PICTURES, strict=True):
        image.save(path)
    return names


def close(scores: Any, expected: Iterable[RankedDocument]) -> bool:
    return np.allclose(list(scores), [result.probability for result in expected], atol=1e-4)


def test_langchain(reranker: Reranker, expected: Ranking, paths: list[str]) -> None:
    pytest.importorskip("langchain_core", reason="an extra")
    from langchain_core.documents import Document

    from radical_rerank.integrations.langchain import RadicalCompressor

    compressor = RadicalCompressor(reranker=reranker, top_n=3)
    by_metadata = [Document(str(i), metadata={"image": p, "k": i}) for i, p in enumerate(PICTURES)]
    best = compressor.compress_documents(by_metadata, QUERY)
    assert [document.metadata["k"] for document in best] == expected.order[:3]
    assert close((d.metadata["relevance_score"] for d in best), expected[:3])
    assert "relevance_score" not in by_metadata[0].metadata
    by_path = [Document(path) for path in paths]
    again = asyncio.run(compressor.acompress_documents(by_path, QUERY))
    assert [document.page_content for document in again] == [paths[i] for i in expected.order[:3]]
    with pytest.raises(InputError, match="document 1"):
        compressor.compress_documents([by_path[0], Document("no picture")], QUERY)


@pytest.mark.slow
def test_llamaindex(reranker: Reranker, expected: Ranking, paths: list[str]) -> None:
    pytest.importorskip("llama_index.core", reason="an extra")
    from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle, TextNode

    from radical_rerank.integrations.llamaindex import RadicalPostprocessor

    postprocessor = RadicalPostprocessor(reranker=reranker, top_n=2)
    kinds: tuple[list[Any], ...] = (
        [ImageNode(image=plain(image)) for image in PICTURES],
        [ImageNode(image_path=path) for path in paths],
        [TextNode(text="scene", metadata={"file_path": path}) for path in paths],
    )
    for nodes in kinds:
        given = [NodeWithScore(node=node, score=0.5) for node in nodes]
        best = postprocessor.postprocess_nodes(given, query_str=QUERY)
        assert [nodes.index(node.node) for node in best] == expected.order[:2]
        assert close((node.score for node in best), expected[:2])
    bundle = QueryBundle(QUERY)
    best = asyncio.run(postprocessor.apostprocess_nodes(given, query_bundle=bundle))
    assert [nodes.index(node.node) for node in best] == expected.order[:2]
    with pytest.raises(InputError, match="query"):
        postprocessor.postprocess_nodes(given)
    with pytest.raises(InputError, match="node 0"):
        postprocessor.postprocess_nodes([NodeWithScore(node=TextNode(text="a"))], query_str=QUERY)


def test_rerankers(reranker: Reranker, expected: Ranking, paths: list[str]) -> None:
    pytest.importorskip("rerankers", reason="an extra")
    from rerankers.documents import Document

    from radical_rerank.integrations.rerankers import RadicalRanker

    ranker = RadicalRanker(reranker=reranker)
    documents = [
        Document(document_type="image", base64=plain(image), doc_id=f"d{i}")
        for i, image in enumerate(PICTURES)
    ]
    ranked = ranker.rank(QUERY, documents)
    assert [result.doc_id for result in ranked] == [f"d{i}" for i in expected.order]
    assert close((result.score for result in ranked), expected)
    assert [result.rank for result in ranked] == [1, 2, 3, 4, 5]
    assert ranked.get_score_by_docid(f"d{expected.order[0]}") == ranked[0].score
    ids = [f"p{i}" for i in range(5)]
    by_path = ranker.rank(QUERY, paths, doc_ids=ids, metadata=[{"k": i} for i in range(5)])
    assert [result.doc_id for result in by_path.top_k(2)] == [f"p{i}" for i in expected.order[:2]]
    assert by_path[0].document.metadata == {"k": expected.order[0]}
    uris = ranker.rank(QUERY, [uri(image) for image in PICTURES])
    assert [result.doc_id for result in uris] == expected.order
    assert asyncio.run(ranker.rank_async(QUERY, paths, ids))[0].doc_id == f"p{expected.order[0]}"
    with pytest.raises(InputError, match="document 0"):
        ranker.rank(QUERY, [Document(text="words")])


def test_cross_encoder(reranker: Reranker, expected: Ranking, paths: list[str]) -> None:
    from radical_rerank.integrations.cross_encoder import ImageCrossEncoder

    model = ImageCrossEncoder(reranker=reranker)
    for documents in (
        PICTURES,
        paths,
        [{"image": image} for image in PICTURES],
        [encoded(p) for p in PICTURES],
    ):
        hits = model.rank(QUERY, documents, top_k=3, return_documents=True)
        assert [hit["corpus_id"] for hit in hits] == expected.order[:3]
        assert close((hit["score"] for hit in hits), expected[:3])
    other, more = draw_list(8, 3)
    pairs = [(QUERY, PICTURES[0]), (other, more[0]), *((QUERY, p) for p in PICTURES[1:]), (other, more[1])]
    scores = model.predict(pairs)
    mine = [scores[i] for i in (0, 2, 3, 4, 5)]
    assert [int(i) for i in np.argsort(mine)[::-1]] == expected.order
    theirs = reranker.rank(other, more[:2])
    assert scores[[1, 6][theirs.order[0]]] == pytest.approx(theirs[0].probability, abs=1e-4)
    # A single document is judged, too: this model may say that nothing fits.
    (alone,) = reranker.rank(QUERY, PICTURES[:1])
    assert model.predict((QUERY, PICTURES[0])) == pytest.approx(alone.probability, abs=1e-6)
    assert alone.probability < 0.5


@pytest.mark.slow
def test_mteb(reranker: Reranker, expected: Ranking) -> None:
    pytest.importorskip("mteb", reason="an extra")
    from datasets import Dataset
    from mteb.models.models_protocols import SearchProtocol

    from radical_rerank.integrations.mteb import RadicalSearch

    model = RadicalSearch(reranker=reranker)
    assert isinstance(model, SearchProtocol)
    assert model.mteb_model_meta.name == "radical-rerank/scenes"
    corpus = Dataset.from_dict({"id": [f"d{i}" for i in range(5)], "image": [encoded(p) for p in PICTURES]})
    queries = Dataset.from_dict({"id": ["q"], "text": [QUERY]})
    model.index(corpus, task_metadata=None, hf_split="test", hf_subset="default", encode_kwargs={})
    scores = model.search(queries, top_k=5, top_ranked={"q": [f"d{i}" for i in range(5)]}, encode_kwargs={})
    assert sorted(scores["q"], key=lambda name: -scores["q"][name]) == [f"d{i}" for i in expected.order]
    with pytest.raises(InputError, match="convert_to_reranking"):
        model.search(queries, top_k=5)


class Alphabet:
    """A first stage for MTEB that ignores the query: the gallery sorted by name."""

    mteb_model_meta: Any = None

    def index(self, corpus: Any, **_: Any) -> None:
        self.names = sorted(corpus["id"])

    def search(self, queries: Any, *, top_k: int, **_: Any) -> dict[str, dict[str, float]]:
        return {query["id"]: {name: 1 / (1 + i) for i, name in enumerate(self.names)} for query in queries}


@pytest.mark.slow
def test_mteb_evaluates_its_tasks(reranker: Reranker, tmp_path: Path) -> None:
    """Its own evaluation of lists, composed lists and of the candidates of a first stage equals ours."""
    mteb = pytest.importorskip("mteb", reason="an extra")
    from mteb.models.model_meta import ModelMeta

    from radical_rerank.integrations.mteb import RadicalSearch
    from radical_rerank.lab.mteb_task import task_of

    model = RadicalSearch(reranker=reranker)

    def evaluated(search: Any, task: Any, **options: Any) -> dict[str, float]:
        results = mteb.evaluate(search, task, cache=None, show_progress_bar=False, **options)
        return results[0].scores["test"][0]

    def by_hand(data: Dataset, lists: dict[str, list[str]]) -> dict[str, dict[str, float]]:
        runs = {}
        for task in data.tasks:
            reference = None if task.reference is None else data.picture(task.reference)
            names = lists[task.id]
            ranking = reranker.rank(Query(task.text, reference), [data.picture(name) for name in names])
            runs[task.id] = [names[i] for i in ranking.order]
        return measure(runs, {task.id: task.relevant for task in data.tasks})

    for data in (scene_lists(lists=4, count=6), composed_lists(lists=3, count=6)):
        ours = by_hand(data, {task.id: list(task.candidates or ()) for task in data.tasks})
        theirs = evaluated(model, task_of(data))
        assert theirs["mrr_at_10"] == pytest.approx(np.mean([v["MRR@10"] for v in ours.values()]), abs=1e-5)
        assert theirs["ndcg_at_10"] == pytest.approx(np.mean([v["nDCG@10"] for v in ours.values()]), abs=1e-5)

    gallery = scene_gallery(size=12, queries=4)
    task = task_of(gallery)
    first = Alphabet()
    about = {"name": "test/alphabet", "revision": "1", "modalities": ["text", "image"]}
    first.mteb_model_meta = ModelMeta.create_empty(overwrites=about)
    before = evaluated(first, task, prediction_folder=tmp_path)
    after = evaluated(model, task.convert_to_reranking(tmp_path, top_k=12))
    ours = by_hand(gallery, {task.id: sorted(gallery.gallery) for task in gallery.tasks})
    assert after["mrr_at_10"] == pytest.approx(np.mean([v["MRR@10"] for v in ours.values()]), abs=1e-5)
    assert after["mrr_at_10"] > before["mrr_at_10"]


@pytest.mark.slow
def test_mteb_keeps_the_results_of_settings_apart(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mteb = pytest.importorskip("mteb", reason="an extra")
    from mteb.cache import ResultCache

    from radical_rerank.integrations.mteb import RadicalSearch
    from radical_rerank.lab.mteb_task import task_of

    task, cache = task_of(scene_lists(lists=2, count=4)), ResultCache(tmp_path)
    ranked = []
    for keep in (0.5, 0.25, 0.5):
        model = RadicalSearch(reranker=Reranker(backbone, "fastv", keep=keep, max_image_tokens=48))

        def rank(*args: Any, keep: float = keep, rank: Any = model.reranker.rank) -> Ranking:
            ranked.append(keep)
            return rank(*args)

        monkeypatch.setattr(model.reranker, "rank", rank)
        mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
    assert ranked == [0.5, 0.5, 0.25, 0.25]  # the third is answered from the cache
    for other in (
        Reranker(backbone, "fastv", keep=0.5, max_image_tokens=24),
        Reranker(backbone, "fastv", keep=0.5, max_image_tokens=48, scorer="generate"),
        Reranker(backbone, "fastv", keep=0.5, max_image_tokens=48, window=3),
    ):
        settings = RadicalSearch(reranker=other).mteb_model_meta.experiment_kwargs
        assert settings != model.mteb_model_meta.experiment_kwargs


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    if path.stem == "lmms_eval_model":
        pytest.importorskip("lmms_eval.api.model", reason="a large extra: make test-all")
    if path.stem == "http_client":
        monkeypatch.setattr("sys.argv", [str(path), request.getfixturevalue("url")])
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= (1 if path.stem == "lmms_eval_model" else 3)


@pytest.mark.slow
def test_lmms_eval(backbone: Backbone, tmp_path: Path) -> None:
    pytest.importorskip("lmms_eval.api.model", reason="a large extra: make test-all")
    from lmms_eval.api.instance import Instance
    from lmms_eval.models.registry_v2 import ModelRegistryV2

    from radical_rerank.backbones import layout_of
    from radical_rerank.integrations.lmms_eval import RadicalLmms

    registry = ModelRegistryV2()
    registry.load_entrypoint_manifests()
    assert registry.get_manifest("radical").chat_class_path.endswith("RadicalLmms")
    model = RadicalLmms(backbone=backbone, keep=cast(float, "0.3"), profile=PROFILE, max_image_tokens=48)
    PICTURES[0].save(tmp_path / "a.png")
    docs = [{"picture": PICTURES[0]}, {"picture": str(tmp_path / "a.png")}, {"picture": b"none"}]
    model.task_dict = {"ask": {"test": docs}}

    def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
        asked = {"type": "text", "text": "which best matches the query ?"}
        return [{"role": "user", "content": [{"type": "image", "url": doc["picture"]}, asked]}]

    def request(number: int, **options: Any) -> Instance:
        arguments = ("", messages, {"max_new_tokens": 6, **options}, number, "ask", "test")
        meta = {"task": "ask", "doc_id": number, "repeats": 1}
        return Instance(request_type="generate_until", arguments=arguments, idx=0, metadata=meta)

    first, second = model.generate_until([request(0), request(1)])
    assert first == second
    # The same by hand.
    features = backbone.encode([backbone.preprocess(PICTURES[0], 48)])
    image = "<|vision_start|>" + "<|image_pad|>" * len(features[0].tokens) + "<|vision_end|>"
    turns = [{"role": "user", "content": image + "which best matches the query ?"}]
    text = backbone.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    pruner = RaDiCal(keep=0.3, profile=PROFILE, prior="relevance")
    with pruner.on(backbone.model, layout_of(backbone.model, ids)):
        expected = backbone.write(backbone.inputs([ids], features), 6)[0]
    assert first == expected
    word = expected.split()[1]
    assert model.generate_until([request(0, until=[word])])[0] == expected.split(word)[0]
    with pytest.raises(InputError, match="image 0"):
        model.generate_until([request(2)])
    with pytest.raises(InputError, match="log-likelihood"):
        model.loglikelihood([])
