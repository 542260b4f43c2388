"""What a user of sentence-transformers or Hugging Face would expect of the objects that go in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import radical_rerank
from radical_rerank import Document, RankedDocument, Ranking, Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.reranking.results import Skipped
from tests.cases import PROFILE, draw_list


@pytest.fixture(scope="module")
def ranking(backbone: Backbone) -> Ranking:
    query, images = draw_list(2, 5)
    return Reranker(backbone, "radical", keep=0.3, profile=PROFILE).rank(query, images)


def test_a_ranking_is_a_sequence_of_documents(ranking: Ranking) -> None:
    first: RankedDocument = ranking[0]  # mypy checks the overloads
    two: tuple[RankedDocument, ...] = ranking[:2]
    assert first is two[0]
    assert first is next(iter(ranking))
    assert len(ranking) == 5
    assert [result.index for result in ranking] == ranking.order
    assert first in ranking


def test_its_repr_is_short(ranking: Ranking) -> None:
    text = repr(ranking)
    assert text.startswith(f"<Ranking of 5: {ranking[0].index} (")
    assert text.endswith(", …>")
    assert len(text) < 80
    assert repr(Ranking(())) == "<Ranking of 0>"


def test_to_dict_is_ready_for_json(ranking: Ranking) -> None:
    data = json.loads(json.dumps(ranking.to_dict()))
    assert [result["index"] for result in data["results"]] == ranking.order
    assert [result["rank"] for result in data["results"]] == [1, 2, 3, 4, 5]
    assert data["method"] == "RaDiCal"
    assert data["query"] == ranking.query
    assert data["totals"]["prompts"] == 1
    assert data["pruning"][0]["indices"] == [0, 1, 2, 3, 4]
    assert data["results"][0]["document"] is None  # a picture has no name


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ("a.jpg", "a.jpg"),
        (Path("b/c.png"), str(Path("b/c.png"))),
        ("data:image/png;base64,AAAA", None),
        (b"bytes", None),
        (Image.new("RGB", (2, 2)), None),
    ],
)
def test_documents_are_named_by_their_paths(document: Document, shown: str | None) -> None:
    ranking = Ranking((RankedDocument(0, 0.0, document),), skipped=(Skipped(1, "empty"),))
    data = ranking.to_dict()
    assert data["results"][0]["document"] == shown
    assert data["skipped"] == [{"index": 1, "reason": "empty"}]


def test_a_reranker_is_made_from_a_name_or_a_folder_or_a_backbone(
    backbone: Backbone, tiny_folders: dict[str, Path]
) -> None:
    query, images = draw_list(3, 4)
    folder = tiny_folders["qwen3_vl"]
    orders = [
        maker(folder, "dense").rank(query, images).order for maker in (Reranker, Reranker.from_pretrained)
    ]
    assert orders[0] == orders[1] == Reranker(backbone, "dense").rank(query, images).order
    with pytest.raises(InputError, match="in the Backbone that you pass"):
        Reranker(backbone, "dense", dtype="float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windw": 10}, "unknown option 'windw' of method 'radical'; did you mean 'window'"),
        ({"num_stage": 3}, "did you mean 'num_stages'"),
        ({"method": "radcal"}, "unknown method 'radcal'; did you mean 'radical'"),
        ({"method": "fastv", "layr": 2}, "unknown option 'layr' of method 'fastv'; did you mean 'layer'"),
    ],
)
def test_a_misspelt_option_names_the_nearest_one(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Reranker("no such model: options are checked first", **options)  # type: ignore[arg-type]


def test_everything_that_the_guides_mention_can_be_imported_from_the_top() -> None:
    for name in ("Stage", "StageView", "Pruner", "METHODS", "RankedDocument", "Merge", "Layout", "build"):
        assert name in radical_rerank.__all__
    for method in radical_rerank.METHODS.values():
        assert getattr(radical_rerank, method.__name__) is method
    assert radical_rerank.__version__
