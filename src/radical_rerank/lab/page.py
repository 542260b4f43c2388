"""A page that shows rankings: candidates in order, live tokens bright, dropped ones grey, stage by stage."""

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
    """One method's ranking of a section's pictures."""

    title: str
    facts: str
    ranking: Ranking


@dataclass(frozen=True)
class Section:
    """One query: its pictures, which of them are relevant, and a row per method."""

    query: str
    images: Sequence[Image.Image]
    relevant: Sequence[int]
    rows: Sequence[PageRow]


def write_page(path: str | Path, title: str, intro: str, sections: Sequence[Section]) -> Path:
    """Write the page: one file, no other needed, no network."""
    path = Path(path)
    package = resources.files("radical_rerank")
    parts = ("lab/page.html", "service/page/paint.js")  # the service's page paints tokens in the same way
    template, paint = ((package / part).read_text(encoding="utf-8") for part in parts)
    # The data may hold any query, also one that would end the script.
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
            number: [asdict(block) for block in found]
            for number, found in zip(report.indices, report.blocks, strict=True)
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
