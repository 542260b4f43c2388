"""For methods that work picture by picture: shares of the budget, greedy selection in all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from radical_rerank.pruning.base import StageView


def apportion(sizes: Sequence[int], count: int, weights: Sequence[float] | None = None) -> list[int]:
    """Share `count` tokens among images in proportion to their sizes, by largest remainders.

    weights: shares are in proportion to these instead; no image gets more than its size

    Example:
        >>> apportion([4, 4, 8], 5), apportion([4, 4, 8], 6, weights=[9, 0, 1])
        ([1, 1, 3], [4, 0, 2])
    """
    value = torch.tensor(sizes if weights is None else weights, dtype=torch.float64)
    size = torch.tensor(sizes, dtype=torch.float64)
    exact = torch.zeros_like(size)
    while bool((room := size - exact > 1e-9).any()) and (left := count - float(exact.sum())) > 1e-9:
        open_ = value * room if bool((value * room).any()) else size * room
        exact = torch.minimum(exact + left * open_ / open_.sum(), size)
    shares = (exact + 1e-9).floor()
    missing = count - int(shares.sum())
    for i in (shares - exact).argsort(stable=True).tolist():
        if missing > 0 and shares[i] < size[i]:
            shares[i] += 1
            missing -= 1
    return [int(share) for share in shares.tolist()]


def by_image(values: Tensor, view: StageView) -> tuple[Tensor, Tensor]:
    """(V, …) -> (N, M, …) the values of each of N pictures, padded with zeros, and (N, M) where they are."""
    sizes = view.image_of.bincount().tolist()
    padded = pad_sequence(values.split(sizes), batch_first=True)
    inside = pad_sequence([torch.ones(size, dtype=torch.bool) for size in sizes], batch_first=True)
    return padded, inside.to(values.device)


def unit_vectors(view: StageView) -> tuple[Tensor, Tensor]:
    """(N, M, d) the normalised tokens of each picture, and (N, M) where they are."""
    return by_image(normalize(view.vision.float(), dim=-1), view)


def greedily(
    inside: Tensor, budgets: Sequence[int], gain: Callable[[Tensor | None], Tensor]
) -> tuple[Tensor, Tensor]:
    """Add one token at a time in all pictures together, each time the one with the largest gain.

    inside: (N, M) where pictures have tokens
    budgets: how many tokens of each picture are chosen
    gain: gets (N,) the tokens that were added last (None at first), and returns (N, M) the gain of each

    Returns:
        (N, M) which tokens are chosen, and (N, M) the gain that each had when it was chosen.
    """
    chosen = torch.zeros_like(inside)
    gains = torch.zeros(inside.shape, device=inside.device)
    left = torch.tensor(budgets, device=inside.device)
    rows = torch.arange(len(inside), device=inside.device)
    last: Tensor | None = None
    for _ in range(max(budgets, default=0)):
        value = gain(last).masked_fill(~inside | chosen, -torch.inf)
        best, last = value.max(dim=1)
        open_ = left > 0
        chosen[rows[open_], last[open_]] = True
        gains[rows[open_], last[open_]] = best[open_]
        left = left - 1
    return chosen, gains


def kept_tokens(chosen: Tensor, inside: Tensor) -> Tensor:
    """(N, M) which tokens of each picture are chosen -> their indices among all V, ascending."""
    return chosen[inside].nonzero()[:, 0]


def farthest(unit: Tensor) -> Callable[[Tensor | None], Tensor]:
    """A gain for `greedily`: the cosine distance to the nearest token that was chosen.

    The first is the token whose nearest neighbour is farthest. unit: (N, M, d)
    """
    nearest: Tensor | None = None

    def gain(last: Tensor | None) -> Tensor:
        nonlocal nearest
        if last is None:
            alike = unit @ unit.transpose(1, 2)
            alike.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
            return 1 - alike.amax(dim=2)
        distance = 1 - (unit @ unit[torch.arange(len(unit)), last][..., None])[..., 0]
        nearest = distance if nearest is None else torch.minimum(nearest, distance)
        return nearest

    return gain
