"""What to keep: tokens that fit the query and set their candidate apart.

Symbols: V visual tokens of all candidates together, d their width, N candidates,
T the tokens still alive, V_T = |T|.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Elements of the largest similarity block that `exact_uniqueness` keeps in memory.
_BLOCK = 1 << 22


def candidate_uniqueness(tokens: Tensor) -> Tensor:
    """CCU(t) = 1 − cos(t, v̄), v̄ the normalised mean of all candidate tokens.

    tokens: (V, d) -> (V,) in [0, 2]. Costs O(Vd).
    """
    return 1 - _cosines(tokens, tokens.float().mean(dim=0))


def exact_uniqueness(tokens: Tensor, candidate_of: Tensor) -> Tensor:
    """CCU_exact(t) = 1 − max cos(t, t') over the tokens t' of all *other* candidates.

    tokens: (V, d), candidate_of: (V,) -> (V,) in [0, 2]. Costs O(V²d) time, in blocks of rows.
    With a single candidate there is nothing to compare with: all tokens are equally unique (1).
    """
    unit = normalize(tokens.float(), dim=-1)
    count = len(unit)
    unique = torch.ones(count, device=unit.device)
    rows = max(1, _BLOCK // max(count, 1))
    for start in range(0, count, rows):
        block = slice(start, start + rows)
        cosine = unit[block] @ unit.T
        cosine.masked_fill_(candidate_of[block, None] == candidate_of, -torch.inf)
        nearest = cosine.amax(dim=-1)
        unique[block] = torch.where(nearest.isfinite(), 1 - nearest, unique[block])
    return unique


def query_relevance(tokens: Tensor, query: Tensor, *, signed: bool = False) -> Tensor:
    """QRel(t, q) = max(cos(t, q_emb), 0).

    tokens: (V, d), query: (d,) -> (V,) in [0, 1]. signed: the cosine itself, in [-1, 1]. If the query is
    (words, d), the largest of a token's cosines counts.
    """
    cosine = _cosines(tokens, query)
    return cosine if signed else cosine.clamp(min=0)


def _cosines(tokens: Tensor, direction: Tensor) -> Tensor:
    """(V, d), (d,) -> (V,). Divides by the lengths last, so that no second (V, d) is needed.

    direction: or (n, d), of which the nearest counts
    """
    tokens = tokens.float()
    unit = normalize(direction.float(), dim=-1)
    along = tokens @ unit if unit.ndim == 1 else (tokens @ unit.T).amax(dim=1)
    lengths: Tensor = torch.linalg.vector_norm(tokens, dim=-1)
    return along / lengths.clamp(min=1e-12)


def discriminative_importance(
    tokens: Tensor, query: Tensor, candidate_of: Tensor, *, exact: bool = False, signed: bool = False
) -> Tensor:
    """DTI(t) ∝ CCU(t) · QRel(t, q): fits the query *and* sets its candidate apart.

    tokens: (V, d), query: (d,) or (words, d), candidate_of: (V,) -> (V,), not yet normalised. signed: with
    the cosine itself for QRel, so that tokens that do not fit are ordered, too.
    """
    unique = uniqueness_of(tokens, candidate_of, exact=exact)
    return unique * query_relevance(tokens, query, signed=signed)


def signed_prior(
    kind: str, tokens: Tensor, query: Tensor, candidate_of: Tensor, *, exact: bool = False
) -> Tensor:
    """The prior "dti", "relevance" or "uniqueness" of every token, without the cut at zero.

    tokens: (V, d), query: (d,) or (words, d), candidate_of: (V,) -> (V,).
    """
    if kind == "relevance":
        return query_relevance(tokens, query, signed=True)
    if kind == "uniqueness":
        return uniqueness_of(tokens, candidate_of, exact=exact)
    return discriminative_importance(tokens, query, candidate_of, exact=exact, signed=True)


def uniqueness_of(tokens: Tensor, candidate_of: Tensor, *, exact: bool = False) -> Tensor:
    """CCU by the prototype, or `exact`: (V, d), (V,) -> (V,)."""
    return exact_uniqueness(tokens, candidate_of) if exact else candidate_uniqueness(tokens)


def text_averaged(attention: Tensor) -> Tensor:
    """p_i = mean over text rows r of A_{r,i} / Σ_j A_{r,j}.

    attention: (rows, V) head-averaged, restricted to visual columns -> (V,), summing to 1.
    Rows that see no visual token do not count; if no row sees any, p is uniform.
    """
    mass = attention.sum(dim=-1)
    seen = mass >= torch.finfo(mass.dtype).tiny  # below it, 1 / mass overflows
    weight = torch.where(seen, 1 / mass, 0) / seen.sum().clamp(min=1)
    uniform = attention.new_full(attention.shape[-1:], 1 / max(attention.shape[-1], 1))
    return torch.where(seen.any(), weight @ attention, uniform)


def attention_information(p: Tensor) -> Tensor:
    """AttInfo_i = max(p_i · log(V_T · p_i), 0): a token's share of KL(p ‖ uniform) where it is positive.

    p: (V_T,), summing to 1 -> (V_T,). Positive exactly where p_i > 1 / V_T.
    """
    information: Tensor = torch.special.xlogy(p, len(p) * p)
    return information.clamp(min=0)


def min_max(x: Tensor) -> Tensor:
    """(x − min x) / (max x − min x): (n,) -> (n,) in [0, 1]. A constant x gives zeros."""
    if x.numel() == 0:
        return x
    low, high = x.aminmax()
    return (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny)


def ranks(x: Tensor) -> Tensor:
    """(n,) -> (n,) in [0, 1]: the rank of each value among the distinct ones, the highest 1."""
    return min_max(x.unique(return_inverse=True)[1].float())


def saliency(information: Tensor) -> Tensor:
    """Sal = MinMaxNorm(information); uniform 1 / V_T where no token carries any (all zero).

    information: (V_T,), non-negative -> (V_T,) in [0, 1].
    """
    uniform = torch.full_like(information, 1 / max(len(information), 1))
    return torch.where((information == 0).all(), uniform, min_max(information))
