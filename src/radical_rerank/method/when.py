"""When to believe attention: only in layers where it is concentrated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-6


def normalized_entropy(p: Tensor) -> Tensor:
    """H_norm = −Σ p_i log p_i / log V: 1 for uniform attention, 0 for a single token.

    p: (V,), summing to 1 -> scalar. A single token has nothing to choose between: 0.
    """
    if len(p) < 2:
        return p.new_zeros(())
    entropy: Tensor = torch.special.entr(p).sum()
    return entropy / math.log(len(p))


def trust(h_norm: Tensor, h_min: Tensor | float | None = None) -> Tensor:
    """α(l) = (H_norm(l) − H_min) / (1 − H_min), H_min the model's smallest H_norm.

    h_norm: (L,) -> (L,) in [0, 1]. 0: the sharpest layer, attention decides. 1: uniform attention,
    the prior decides; also where every layer is uniform (H_min = 1).
    """
    low = h_norm.min() if h_min is None else torch.as_tensor(h_min, dtype=h_norm.dtype)
    if low >= 1:
        return torch.ones_like(h_norm)
    return ((h_norm - low) / (1 - low)).clamp(0, 1)


def geometric_fusion(prior: Tensor, salience: Tensor, alpha: float) -> Tensor:
    """f_i = max(d̂_i, ε)^α · max(ŝ_i, ε)^(1−α): a near-zero in either channel is a veto.

    prior, salience: (V_T,) in [0, 1] -> (V_T,).
    """
    # In double precision: vector and scalar powers differ in the last bit, and tokens at the floor
    # of both channels, often most of them, must tie exactly.
    wide = torch.float32 if prior.device.type == "mps" else torch.float64
    d, s = prior.to(wide).clamp(min=EPSILON), salience.to(wide).clamp(min=EPSILON)
    return (d**alpha * s ** (1 - alpha)).to(prior.dtype)


def arithmetic_fusion(prior: Tensor, salience: Tensor, alpha: float) -> Tensor:
    """f_i = α d̂_i + (1−α) ŝ_i: the ablation's additive mix, without a veto.

    prior, salience: (V_T,) in [0, 1] -> (V_T,).
    """
    return alpha * prior + (1 - alpha) * salience
