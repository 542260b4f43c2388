"""The second stage of training: teaches the tower to describe cells and pictures by word embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from radical_rerank.embedded.photos import WORD_DIMS

LATE, POOLED = 4.2, 21.0
"""inverse temperatures of the two scores"""


def encode_cells(model: Any, last: Tensor, fine: Tensor, names: Tensor | None = None) -> Tensor:
    """Return (n, 1 + M, d): the picture, then its visual tokens, of which the first is the picture again.

    Arguments: see `LiteCells.describe`
    """
    base = model.model
    tokens: Tensor = base.multi_modal_projector(base.vision_tower.describe(last, fine, names))
    return tokens


def scores(model: Any, tokens: Tensor, queries: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return two (queries, pictures) scores of bags of words.

    late: Σ_w |e_w| · max_t cos(e_w, x_t), over the words of the query and the cells of the picture. Its token
        of the whole picture does not count: where it does, the cells learn nothing besides it
    pooled: cos(Σ_w e_w, x), x the embedding of the picture

    Args:
        model: whose word embeddings are used
        tokens: (pictures, 1 + M, d), see `encode_cells`
        queries: token ids
    """
    words = sorted({word for query in queries for word in query})
    column = {word: number for number, word in enumerate(words)}
    counts = torch.zeros(len(queries), len(words))
    for row, query in enumerate(queries):
        for word, count in Counter(query).items():
            counts[row, column[word]] = count
    embedded = model.get_input_embeddings().weight[torch.tensor(words), :WORD_DIMS]
    weight = embedded.norm(dim=-1)
    direction = embedded / weight.clamp(min=1e-6)[:, None]
    unit = normalize(tokens[..., :WORD_DIMS], dim=-1)
    best = (unit[:, 2:] @ direction.T).amax(dim=1)
    late = (counts * weight) @ best.T
    pooled = normalize(counts @ embedded, dim=-1) @ unit[:, 0].T
    return late, pooled


def contrast(score: Tensor, owner: Tensor) -> Tensor:
    """Return how badly queries find their pictures, plus how badly pictures find their queries.

    Args:
        score: (queries, pictures)
        owner: (queries,) the picture of each query
    """
    own = score.gather(1, owner[:, None])[:, 0]
    others = score.masked_fill(owner[:, None] == torch.arange(score.shape[1]), -torch.inf).logsumexp(dim=0)
    found = torch.logaddexp(own, others[owner]) - own
    return cross_entropy(score, owner) + found.mean()


def alignment_loss(
    model: Any, tokens: Tensor, queries: Sequence[Sequence[int]], owner: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a batch of pictures and their captions, and facts for the log.

    tokens: (pictures, 1 + M, d); queries: token ids; owner: (queries,) the picture of each query
    """
    late, pooled = scores(model, tokens, queries)
    loss = contrast(LATE * late, owner) + contrast(POOLED * pooled, owner)
    right = {name: (score.argmax(dim=1) == owner).float().mean().item() for name, score in
             (("late", late), ("pooled", pooled))}  # fmt: skip
    return loss, right


def recall(score: Tensor, at: Sequence[int]) -> dict[str, float]:
    """Return R@k of queries whose picture is on the diagonal. score: (n, n)"""
    rank = (score > score.diagonal()[:, None]).sum(dim=1)
    return {f"R@{k}": (rank < k).float().mean().item() for k in at}
