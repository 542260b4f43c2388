"""The HTTP service: rerank endpoints, a page, metrics."""

from radical_rerank.service.settings import Settings

__all__ = ["Settings"]
