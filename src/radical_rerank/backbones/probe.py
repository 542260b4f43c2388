"""The row probe: a few rows of one layer's attention, without the matrix they belong to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves. x: (..., heads, n, hd); cos, sin: (..., n, hd)."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def project(layer: Any, which: str, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer's own queries ("q") or keys ("k"): its input norm, projection, head norm and rotation.

    hidden: (..., n, d); cos, sin: (..., n, hd) -> (..., heads, n, hd).
    """
    attention = layer.self_attn
    states = getattr(attention, f"{which}_proj")(layer.input_layernorm(hidden))
    states = states.unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{which}_norm", None)
    if norm is not None:
        states = norm(states)
    return rotate(states.transpose(-3, -2), cos, sin)


def row_attention(query: Tensor, key: Tensor, scaling: float, allowed: Tensor, columns: Tensor) -> Tensor:
    """Head-averaged attention of some rows, softmax over all keys, at some columns.

    query: (H, r, hd), key: (KV, n, hd), allowed: (r, n), columns: (c,) -> (r, c) in float32.
    Rows go in chunks of 1% of the keys, so memory is about two such slices of the H × n × n matrix.
    """
    kv, length = key.shape[:2]
    heads, rows = query.shape[:2]
    grouped = query.view(kv, heads // kv, rows, -1)
    result = torch.empty(rows, len(columns), dtype=torch.float32, device=query.device)
    step = max(16, length // 100)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        chunk = grouped[:, :, part]
        logits = (chunk.flatten(1, 2) @ key.transpose(-1, -2)).view(heads, -1, length)
        logits = logits.float().mul_(scaling).masked_fill_(~allowed[part], -torch.inf)
        result[part] = logits.softmax(dim=-1).mean(dim=0)[:, columns]
    return result
