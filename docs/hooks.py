"""MkDocs hook: pages whose text is a file at the root of the repository (`source:` in the page's head)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.meta.get("source")
    if source is None:
        return markdown
    # Links in that file start at the root; links of a page start in docs/.
    return (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
