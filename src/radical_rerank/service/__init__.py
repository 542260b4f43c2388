"""The HTTP service: rerank endpoints, a web page, metrics. It needs the extra `serve`.

This file itself needs no extra: the command line reads the defaults here.
"""

from __future__ import annotations

from typing import Any

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_METHOD = "radical"
DEFAULT_KEEP = 0.2
DEFAULT_QUEUE = 32
DEFAULT_PATIENCE = 0.7
DEFAULT_DEADLINE = 60.0
DEFAULT_UPSCALE_DELAY = 10.0
DEFAULT_DOWNSCALE_DELAY = 300.0


def __getattr__(name: str) -> Any:
    if name == "Settings":
        from radical_rerank.service.settings import Settings

        return Settings
    if name == "create_app":
        from radical_rerank.service.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
