"""A few rows of one layer: its attention without the matrix they belong to, or all of its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    grouped = query.view(kv, heads // kv, rows, -1)
    result = torch.empty(rows, len(columns), dtype=torch.float32, device=query.device)
    step = max(1, SMALL // (heads * length), length // 200)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        chunk = grouped[:, :, part]
        logits = (chunk.flatten(1, 2) @ key.transpose(-1, -2)).view(heads, -1, length)
        logits = logits.float().mul_(scaling).masked_fill_(~allowed[part], -torch.inf)
        # The softmax in place, and nothing left for the next chunk: one slice at a time is held.
        logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
        logits.div_(logits.sum(dim=-1, keepdim=True))
        result[part] = logits.mean(dim=0)[:, columns]
        del logits
    return result


@contextmanager
def last_row_only(layers: Any) -> Iterator[None]:
    """Inside, the last of a decoder's layers works for the prompt's last row alone: no other row is read.

    Its keys and values are still made of all tokens. They go where the layer looks for the past: into the
    cache, or one for this call where there is none. The model's output then has this one row. Enter it
    inside a Pruner's context, so that it comes after the last stage. Where something reads the last layer's
    output, such as a stage after it, all rows are made.
    """

    def before(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from transformers import DynamicCache

        hidden = args[0] if args else kwargs.pop("hidden_states")
        mask = kwargs.get("attention_mask")
        unread = not layer._forward_hooks and (mask is None or isinstance(mask, Tensor))
        if unread and hidden.shape[1] > 1:
            cos, sin = kwargs["position_embeddings"]
            earlier = hidden[:, :-1]
            keys = all_keys(layer, earlier, cos[:, :-1], sin[:, :-1])
            values = layer.self_attn.v_proj(layer.input_layernorm(earlier))
            values = values.unflatten(-1, (-1, layer.self_attn.head_dim)).transpose(-3, -2)
            if kwargs.get("past_key_values") is None:
                kwargs["past_key_values"] = DynamicCache()
            kwargs["past_key_values"].update(keys, values, layer.self_attn.layer_idx)
            kwargs["position_embeddings"] = cos[:, -1:], sin[:, -1:]
            if mask is not None and mask.ndim == 4:
                kwargs["attention_mask"] = mask[:, :, -1:]
            hidden = hidden[:, -1:]
        return (hidden, *args[1:]), kwargs

    handle = layers[-1].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
