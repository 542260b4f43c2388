"""Exact search."""

from __future__ import annotations

import torch
from torch import Tensor

FAISS_FROM = 100_000
"""galleries of at least this many pictures are searched with FAISS, if it is installed"""


def nearest(queries: Tensor, gallery: Tensor, k: int, *, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """Return (scores, numbers) of the k nearest, each (queries, k), best first, by dot product.

    Ties go to the lower number.

    Example:
        >>> scores, numbers = nearest(torch.eye(2), torch.eye(3, 2), k=1)
        >>> numbers.tolist()
        [[0], [1]]
    """
    k = min(k, len(gallery))
    if len(gallery) >= FAISS_FROM:
        result = _with_faiss(queries, gallery, k)
        if result is not None:
            return result
    scores, numbers = [], []
    for part in queries.split(chunk):
        similarity = part @ gallery.T
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        numbers.append(order)
        scores.append(similarity.gather(1, order))
    return torch.cat(scores), torch.cat(numbers)


def _with_faiss(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Search with a flat (exact) FAISS index; None if FAISS is not installed."""
    try:
        import faiss
    except ImportError:
        return None
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery.float().contiguous().numpy())
    scores, numbers = index.search(queries.float().contiguous().numpy(), k)
    return torch.from_numpy(scores), torch.from_numpy(numbers)
