"""Qwen3.5: Qwen3-VL's images on a hybrid decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from radical_rerank.backbones.families.base import FULL, LINEAR
from radical_rerank.backbones.families.qwen_vl import QwenVL
from radical_rerank.backbones.view import project
from radical_rerank.method import DecoderShape, LayerCost


class Qwen35(QwenVL):
    """Qwen3.5, dense and mixture of experts: every fourth layer has softmax attention, with a gated output
    and rotary embeddings on a part of each head. The others are gated DeltaNets."""

    text_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text")
    known_kinds: ClassVar[tuple[str, ...]] = (FULL, LINEAR)

    @staticmethod
    def project(layer: Any, which: str, hidden: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        # Beside each query, the projection gives the gate of the head's output.
        return project(layer, which, hidden, cos, sin, parts=2 if which == "q" else 1, **options)

    def layer_cost(self, layer: int, shape: DecoderShape) -> LayerCost:
        text, d, mlp = self.config.text_config, shape.hidden, self.mlp_macs(layer)
        if self.kinds[layer] == FULL:
            query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            return LayerCost(3 * d * query + 2 * d * key + mlp, per_pair=2 * query, cached=2 * key)
        heads, kernel = text.linear_num_value_heads, text.linear_conv_kernel_dim
        values = heads * text.linear_value_head_dim
        mixed = 2 * text.linear_num_key_heads * text.linear_key_head_dim + values
        state = values * text.linear_key_head_dim
        # Projections in (q, k, v; gate; decay and write strength) and out, convolution, and three products
        # with the state: read, write, answer.
        per_token = d * (mixed + values + 2 * heads) + values * d + kernel * mixed + 3 * state
        return LayerCost(per_token + mlp, state=state + (kernel - 1) * mixed)
