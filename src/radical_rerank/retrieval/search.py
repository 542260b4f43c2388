"""Exact search."""

from __future__ import annotations

import torch
from torch import Tensor

FAISS_FROM = 100_000
"""Galleries of so many pictures are searched with FAISS where it is installed"""


def nearest(queries: Tensor, gallery: Tensor, k: int, *, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """(scores, numbers), each (queries, k), best first, by dot product; ties go to the lower number."""
    k = min(k, len(gallery))
    if len(gallery) >= FAISS_FROM:
        found = _with_faiss(queries, gallery, k)
        if found is not None:
            return found
    scores, numbers = [], []
    for part in queries.split(chunk):
        similarity = part @ gallery.T
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        numbers.append(order)
        scores.append(similarity.gather(1, order))
    return torch.cat(scores), torch.cat(numbers)


def _with_faiss(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The same by a flat FAISS index (exact too); None where FAISS is not installed."""
    try:
        import faiss
    except ImportError:
        return None
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery.float().contiguous().numpy())
    scores, numbers = index.search(queries.float().contiguous().numpy(), k)
    return torch.from_numpy(scores), torch.from_numpy(numbers)
