from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.pruning.base import EarlyPruner, StageView
from radical_rerank.pruning.images import apportion, greedily, kept_tokens, unit_vectors


@dataclass(kw_only=True)
class CDPruner(EarlyPruner):
    """CDPruner keeps tokens that fit the query and differ from each other, picture by picture.

    "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs",
    arXiv:2506.10967.

    The tokens of a picture are the greedy most probable set of a determinantal point process with the kernel
    L_ij = r_i cos(t_i, t_j) r_j, where r is a token's cosine with the query, scaled to [0, 1] within its
    picture. A step adds the token that increases det L the most.

    Args:
        keep: the fraction of each picture's visual tokens

    Example:
        >>> CDPruner(keep=0.25).stages(num_layers=36)
        [Stage(layer=0, keep=0.25, when='before', of_all=False)]
    """

    summary: ClassVar[str] = "before the decoder: of each picture, tokens that fit the query and differ"

    def select(self, view: StageView, count: int) -> Tensor:
        unit, inside = unit_vectors(view)
        query = normalize(view.query_embedding.float(), dim=-1)
        relevance = _scaled(unit @ query, inside)
        kernel = relevance[:, :, None] * (unit @ unit.transpose(1, 2)) * relevance[:, None]
        budgets = apportion(inside.sum(dim=1).tolist(), count)
        return kept_tokens(greedily(inside, budgets, most_probable(kernel, max(budgets)))[0], inside)


def _scaled(values: Tensor, inside: Tensor) -> Tensor:
    """Scale values to [0, 1] within each row."""
    low = values.masked_fill(~inside, torch.inf).amin(dim=1, keepdim=True)
    high = values.masked_fill(~inside, -torch.inf).amax(dim=1, keepdim=True)
    return (values - low) / (high - low).clamp(min=1e-6)


def most_probable(kernel: Tensor, steps: int) -> Callable[[Tensor | None], Tensor]:
    """A gain for `greedily`: by how much a token multiplies det L, from an incremental Cholesky factor.

    kernel: (N, M, M)
    """
    rows = torch.arange(len(kernel), device=kernel.device)
    gain_of = kernel.diagonal(dim1=1, dim2=2).clone()
    factor = kernel.new_zeros(steps, *gain_of.shape)
    done = 0

    def gain(last: Tensor | None) -> Tensor:
        nonlocal done
        if last is not None:
            earlier = factor[:done]
            known = (earlier * earlier[:, rows, last][..., None]).sum(dim=0)
            scale = gain_of[rows, last].clamp(min=1e-10).sqrt()[:, None]
            factor[done] = (kernel[rows, last] - known) / scale
            gain_of.sub_(factor[done].square())
            done += 1
        return gain_of

    return gain
