"""What a schedule costs, counted as the paper counts.

The paper's "TFLOPs" are multiply-accumulates of the decoder's prefill: attention in full rather
than causal, without the vision encoder and the output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderShape:
    """A decoder: layers of width d, H query and KV key-value heads of size hd, MLP width I."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


def tokens_per_layer(total: int, stages: Sequence[tuple[int, str, int]], num_layers: int) -> list[int]:
    """n_l for every layer: `total` tokens enter, and each stage (layer, "before" | "after", n) leaves n.

    Tokens that leave before a layer do not run through it; those that leave after it do.
    """
    counts = [total] * num_layers
    for layer, when, left in stages:
        first = layer if when == "before" else layer + 1
        counts[first:] = [left] * (num_layers - first)
    return counts


def macs(counts: Sequence[int], shape: DecoderShape) -> int:
    """Σ_l n_l (2·d·H·hd + 2·d·KV·hd + 3·d·I) + 2·n_l²·H·hd."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = 2 * shape.hidden * query + 2 * shape.hidden * key + 3 * shape.hidden * shape.mlp
    return sum(n * linear + 2 * n * n * query for n in counts)


def kv_bytes(counts: Sequence[int], shape: DecoderShape, bytes_per_value: int = 2) -> int:
    """Σ_l 2·n_l·KV·hd values of the key-value cache, in bytes."""
    return sum(2 * n * shape.kv_heads * shape.head_dim * bytes_per_value for n in counts)


def saving(part: float, whole: float) -> float:
    """1 − part / whole: the fraction saved; 0 where there is nothing to save."""
    return 1 - part / whole if whole else 0.0
