"""An HTML page of rankings. It shows the candidates in order, and which of their tokens each stage keeps."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from radical_rerank.files import replacing
from radical_rerank.reranking import Ranking
from radical_rerank.reranking.encoding import data_uri


@dataclass(frozen=True)
class PageRow:
    """One method's ranking of the pictures of a section.

    Args:
        title: the name of the method
        facts: a line of text under it
        ranking: the ranking
    """

    title: str
    facts: str
    ranking: Ranking


@dataclass(frozen=True)
class Section:
    """One query with its rankings.

    Args:
        query: the query
        images: the candidates
        relevant: the indices of the relevant candidates
        rows: one ranking per method
    """

    query: str
    images: Sequence[Image.Image]
    relevant: Sequence[int]
    rows: Sequence[PageRow]


def write_page(path: str | Path, title: str, intro: str, sections: Sequence[Section]) -> Path:
    """Write a page. It is one file that needs no other files and no network.

    Args:
        path: the HTML file to write
        title: the page's title
        intro: a paragraph under the title
        sections: the queries

    Returns:
        The path.
    """
    path = Path(path)
    package = resources.files("radical_rerank")
    parts = ("lab/page.html", "service/page/paint.js")  # shared with the service's page
    template, paint = ((package / part).read_text(encoding="utf-8") for part in parts)
    # A query may contain any text, such as </script>.
    data = json.dumps([_section(section) for section in sections]).replace("<", "\\u003c")
    page = template.replace("{{title}}", html.escape(title)).replace("{{intro}}", html.escape(intro))
    page = page.replace("{{paint}}", paint)
    with replacing(path) as file:
        file.write(page.replace("{{data}}", data))
    return path


def _section(section: Section) -> dict[str, Any]:
    return {
        "query": section.query,
        "relevant": list(section.relevant),
        "images": [data_uri(image, "WEBP", quality=90) for image in section.images],
        "rows": [_row(row) for row in section.rows],
    }


def _row(row: PageRow) -> dict[str, Any]:
    ranking, report = row.ranking, row.ranking.report
    stages: list[dict[str, Any]] = [{"label": "all tokens", "alive": None}]
    blocks: dict[int, list[Any]] = {}
    if report is not None:
        blocks = {
            index: [asdict(block) for block in own]
            for index, own in zip(report.indices, report.blocks, strict=True)
        }
        for stage in report.stages:
            trust = "" if stage.alpha is None else f", trust in the prior α = {stage.alpha:.2f}"
            label = f"{stage.when} layer {stage.layer}: {stage.before} → {stage.after} tokens{trust}"
            alive = dict(zip(report.indices, stage.survivors, strict=True))
            stages.append({"label": label, "alive": alive})
    return {
        "title": row.title,
        "facts": row.facts,
        "order": ranking.order,
        "scores": [round(result.score, 3) for result in ranking],
        "blocks": blocks,
        "stages": stages,
    }
