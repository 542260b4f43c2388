"""Overlays and pages."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from radical_rerank import Dense, Reranker
from radical_rerank.backbones import Backbone, Block
from radical_rerank.lab.overlay import overlay
from radical_rerank.lab.page import PageRow, Section, write_page
from tests.cases import draw_list


def test_overlays_grey_what_was_dropped() -> None:
    image = Image.new("RGB", (32, 16), (250, 0, 0))
    block = Block((0.0, 0.0, 1.0, 1.0), 1, 2)
    shown = overlay(image, [block], [1], scale=2)
    assert shown.size == (64, 32)
    left, right = shown.getpixel((10, 10)), shown.getpixel((50, 10))
    assert isinstance(left, tuple)
    assert left[0] == left[1] == left[2]
    assert right == (250, 0, 0)
    assert overlay(image, [block], None).getpixel((3, 3)) == (250, 0, 0)


def test_a_page_holds_everything_it_shows(backbone: Backbone, tmp_path: Path) -> None:
    query, images = draw_list(1, 3)
    ranking = Reranker(backbone, Dense()).rank(query, images)
    hostile = "</script><script>alert(1)</script>"
    row = PageRow("Dense", "facts", ranking)
    path = write_page(tmp_path / "page.html", "a & b", hostile, [Section(hostile, images, [1], [row])])
    text = path.read_text(encoding="utf-8")
    assert "a &amp; b" in text
    assert "<script>alert" not in text
    assert "{{" not in text
    start = text.index('id="data">') + len('id="data">')
    (section,) = json.loads(text[start : text.index("</script>", start)])
    assert section["query"] == hostile
    assert len(section["images"]) == 3
    assert section["rows"][0]["order"] == ranking.order
    assert "http" not in text.replace("http-equiv", "")  # nothing is fetched
