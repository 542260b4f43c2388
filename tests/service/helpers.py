"""Requests and services that the tests of this folder share."""

from __future__ import annotations

import base64
import contextlib
import io
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from PIL import Image

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.reranking import RankedDocument, Ranking
from radical_rerank.reranking.encoding import data_uri as uri
from tests.cases import draw_list

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

__all__ = ["PICTURES", "QUERY", "Slow", "body", "encoded", "plain", "serving", "uri"]

QUERY, PICTURES = draw_list(3, 5)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def plain(image: Image.Image) -> str:
    """An image as base64 without the head of a data URI."""
    return base64.b64encode(encoded(image)).decode()


def body(count: int = 5, **fields: Any) -> dict[str, Any]:
    """A request that ranks the first pictures."""
    return {"query": QUERY, "documents": [{"image": uri(image)} for image in PICTURES[:count]], **fields}


@contextlib.contextmanager
def serving(backbone: Backbone, **settings: Any) -> Iterator[TestClient]:
    """A client of a service of this model, without a socket."""
    from fastapi.testclient import TestClient

    from radical_rerank.service.app import create_app
    from radical_rerank.service.backend import Local
    from radical_rerank.service.settings import Settings

    chosen = Settings(**{"model": "scenes"} | settings)
    app = create_app(chosen, Local(chosen, load=lambda: backbone))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


class Slow:
    """A stand-in for the model whose rankings take a known time and repeat the query."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.batches: list[list[str]] = []

    def __call__(self, method: str, keep: float | None) -> Any:
        return self

    def rank_many(self, lists: Any, batch_size: int, stop: Any = None) -> Iterator[Ranking]:
        self.batches.append([query.text for query, _ in lists])
        if any("bad" in query.text for query, _ in lists):
            raise InputError("bad query")
        time.sleep(self.seconds * len(lists))
        return iter([Ranking((RankedDocument(0, -1.0, query.text),)) for query, _ in lists])
