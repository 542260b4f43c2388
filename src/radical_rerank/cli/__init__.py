"""The command line."""

from radical_rerank.cli.entry import app, main, spread

__all__ = ["app", "main", "spread"]
