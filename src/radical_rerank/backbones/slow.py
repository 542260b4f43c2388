"""Slow and plain versions of what the engine does, made of the stock model alone.

Attention is the model's own, in full. Dropped tokens stay in the pass, but nobody may look at them. There is
no cache. This is what `radical check` compares the engine with, on any checkpoint and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from radical_rerank.backbones.model import Backbone


@contextmanager
def eager(backbone: Backbone) -> Iterator[None]:
    """Inside, the decoder runs the attention that is written out in the model's own code.

    The weights stay where they are: a second copy of a large model would not fit.
    """
    before = backbone.text.config._attn_implementation
    backbone.text.set_attn_implementation("eager")
    try:
        yield
    finally:
        backbone.text.set_attn_implementation(before)


def attending(backbone: Backbone) -> list[int]:
    """Return the layers of the decoder whose attention can be read."""
    return list(backbone.family.readable)


def maskable(backbone: Backbone) -> list[int]:
    """Return the layers before which tokens can be dropped by a mask: attention alone follows."""
    every, own = range(len(backbone.text.layers)), set(backbone.family.attending)
    return [index for index in attending(backbone) if own.issuperset(every[index:])]


@contextmanager
def attention_of(
    backbone: Backbone, rows: Sequence[int], columns: Sequence[int]
) -> Iterator[dict[int, Tensor]]:
    """Collect each layer's attention in a pass over one prompt, inside `eager`.

    Gives, by layer, the (rows, columns) attention, mean over heads, in float32.
    """
    seen: dict[int, Tensor] = {}

    def record(index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            weights = output[1][0]  # (heads, S, S)
            seen[index] = weights[:, list(rows)][:, :, list(columns)].float().mean(dim=0)

        return hook

    handles = [
        backbone.text.layers[index].self_attn.register_forward_hook(record(index))
        for index in attending(backbone)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def stock_logits(backbone: Backbone, inputs: dict[str, Any]) -> Tensor:
    """Return (B, S, vocabulary) float32 logits of the model as it is, without a hook of ours."""
    logits: Tensor = backbone.model(**inputs, use_cache=False).logits.float()
    return logits


@torch.inference_mode()
def masked_logits(backbone: Backbone, inputs: dict[str, Any], unseen: Sequence[Sequence[int]]) -> Tensor:
    """Return (S, vocabulary) float32 logits of one prompt from which tokens were dropped, by masks alone.

    unseen: per layer, the positions that no token may look at
    """

    def hide(columns: Sequence[int]) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            mask: Tensor = kwargs["attention_mask"].clone()  # (1, 1, S, S), added to the products
            mask[..., list(columns)] = torch.finfo(mask.dtype).min
            return args, {**kwargs, "attention_mask": mask}

        return hook

    layers = zip(backbone.text.layers, unseen, strict=True)
    handles = [
        layer.register_forward_pre_hook(hide(columns), with_kwargs=True)
        for layer, columns in layers
        if len(columns)
    ]
    try:
        with eager(backbone):
            return stock_logits(backbone, inputs)[0]
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def greedy(backbone: Backbone, inputs: dict[str, Any], steps: int) -> tuple[list[int], Tensor]:
    """Let the model write. Returns its tokens, and the (steps, vocabulary) float32 logits of each one."""
    output = backbone.model.generate(
        **inputs,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=backbone.tokenizer.pad_token_id or 0,
        suppress_tokens=[backbone.image_token_id],  # it would stand for an image that there is not
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, torch.stack([logits[0] for logits in output.logits]).float()
