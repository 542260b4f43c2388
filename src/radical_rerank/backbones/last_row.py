"""The last layer for the one row that is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from radical_rerank.backbones.families import text_model, unwrapped
from radical_rerank.backbones.hooks import Hooks
from radical_rerank.backbones.probe import all_keys


@contextmanager
def last_row_only(model: Any) -> Iterator[None]:
    """Inside, the last of a decoder's layers works for the prompt's last row alone: no other row is read.

    Its keys and values are still made of all tokens. They go where the layer looks for the past: into the
    cache, or one for this call where there is none. The model's output then has this one row. Enter it
    inside a Pruner's context, so that it comes after the last stage. Where something reads the last layer's
    output, such as a stage after it, all rows are made.
    """
    text = text_model(model)

    def before(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from transformers import DynamicCache

        hidden = args[0] if args else kwargs.pop("hidden_states")
        mask = kwargs.get("attention_mask")
        read = layer._forward_hooks or text.norm._forward_pre_hooks
        if not read and (mask is None or isinstance(mask, Tensor)) and hidden.shape[1] > 1:
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

    with Hooks(unwrapped(model), text) as hooks:
        hooks.before(text.layers[-1], before)
        yield
