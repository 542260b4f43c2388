"""MkDocs hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill pages whose text is a file at the root of the repository (`source:` in the page's head).

    Tables of results are generated, without a head: they get the width of the contents list here.
    """
    if page.file.src_uri.startswith("results/") and page.file.name != "index":
        page.meta.setdefault("hide", ["toc"])
    source = page.meta.get("source")
    if source is None:
        return markdown
    # Links in that file start at the root; links of a page start in docs/.
    return (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
