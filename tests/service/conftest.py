from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.reranking import Ranking
from tests.service.helpers import PICTURES, QUERY, serving
from tests.tiny import pair_tokenizer, write_tiny

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


@pytest.fixture(scope="session")
def embedded() -> Backbone:
    """The model that ships with the package."""
    return Backbone.from_pretrained("scenes")


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A tiny model that reads texts."""
    folder = write_tiny(tmp_path_factory.mktemp("reader"), tokenizer=pair_tokenizer())
    return Backbone.from_pretrained(folder)


@pytest.fixture(scope="module")
def client(embedded: Backbone) -> Iterator[TestClient]:
    """A client of a service that never refuses for load."""
    with serving(embedded, patience=100.0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(embedded: Backbone) -> Ranking:
    """The library's own ranking of `helpers.body()`."""
    return Reranker(embedded, "radical", keep=0.2).rank(QUERY, PICTURES)
