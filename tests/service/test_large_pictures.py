"""The service decodes large pictures as the library does."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is an extra")

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.embedded.photos.pictures import sample_pictures
from radical_rerank.reranking import load_image
from tests.service.helpers import serving


def test_the_librarys_ranking_of_large_photographs() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    photographs = []
    for file in sample_pictures()[:3]:
        buffer = io.BytesIO()
        load_image(file).resize((4000, 3000)).save(buffer, "JPEG", quality=90, exif=exif)
        photographs.append(buffer.getvalue())
    backbone = Backbone.from_pretrained("photos")
    reranker = Reranker(backbone, "radical", keep=0.2)
    expected = [result.probability for result in reranker.rank("a woman", photographs)]
    with serving(backbone, model="photos", patience=100.0) as client:
        documents = [base64.b64encode(data).decode() for data in photographs]
        answer = client.post("/v1/rerank", json={"query": "a woman", "documents": documents})
        assert answer.status_code == 200, answer.text
        scores = [result["relevance_score"] for result in answer.json()["results"]]
    assert scores == pytest.approx(expected, abs=1e-7)
    # Pictures at their full size would have given other scores.
    whole = reranker.rank("a woman", [load_image(data) for data in photographs])
    assert [result.probability for result in whole] != pytest.approx(expected, abs=1e-7)
