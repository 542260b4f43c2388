"""A few rows of one layer's attention, without the matrix they belong to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALL = 1 << 16
"""values of which it does not pay to make fewer at a time"""


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


def all_keys(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`project` "k" of all tokens, so many at a time: what it needs on the way, some 3 d values per token,
    stays about 1% of the H × n × n attention matrix.

    hidden: (B, n, d); cos, sin: (B or 1, n, hd) -> (B, KV, n, hd).
    """
    keys = None
    (_, n, d), heads = hidden.shape, layer.self_attn.config.num_attention_heads
    step = max(1, SMALL // (2 * d), heads * n * n // (300 * d))
    for start in range(0, n, step):
        part = slice(start, start + step)
        found = project(layer, "k", hidden[:, part], cos[:, part], sin[:, part])
        if keys is None:
            keys = found.new_empty(*found.shape[:2], n, found.shape[-1])
        keys[:, :, part] = found
    assert keys is not None
    return keys


def row_attention(query: Tensor, key: Tensor, scaling: float, allowed: Tensor, columns: Tensor) -> Tensor:
    """Head-averaged attention of some rows, softmax over all keys, at some columns.

    query: (H, r, hd), key: (KV, n, hd), allowed: (r, n), columns: (c,) -> (r, c) in float32.
    Rows go in chunks of 0.5% of the keys, so that memory is about one such slice of the H × n × n matrix.
    """
    kv, length = key.shape[:2]
    heads, rows = query.shape[:2]
    # Scaled first and in float32: plain products overflow float16 where the model's own attention does not.
    key = key.float()
    grouped = (query.float() * scaling).view(kv, heads // kv, rows, -1)
    result = torch.empty(rows, len(columns), dtype=torch.float32, device=query.device)
    step = max(1, SMALL // (heads * length), length // 200)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        chunk = grouped[:, :, part]
        logits = (chunk.flatten(1, 2) @ key.transpose(-1, -2)).view(heads, -1, length)
        logits = logits.masked_fill_(~allowed[part], -torch.inf)
        # The softmax in place, and nothing left for the next chunk: one slice at a time is held.
        logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
        logits.div_(logits.sum(dim=-1, keepdim=True))
        result[part] = logits.mean(dim=0)[:, columns]
        del logits
    return result
