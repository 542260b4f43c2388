"""Slow and plain versions of what the engine does, made of the stock model alone.

Attention is the model's own, in full. Dropped tokens stay in the pass, but nobody may look at them; linear
layers run without them. There is no cache. This is what `radical check` compares the engine with, on any
checkpoint and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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
def pruned_logits(backbone: Backbone, inputs: dict[str, Any], unseen: Sequence[Sequence[int]]) -> Tensor:
    """Return (S, vocabulary) float32 logits of one prompt from which tokens were dropped.

    unseen: per layer, the positions that no token may look at
    """
    with eager(backbone), ExitStack() as hooks:
        for index, columns in enumerate(unseen):
            if len(columns):
                drop = _hide if index in backbone.family.attending else _leave_out
                for handle in drop(backbone.text.layers[index], list(columns)):
                    hooks.enter_context(handle)
        return stock_logits(backbone, inputs)[0]


def _hide(layer: Any, columns: list[int]) -> Iterator[RemovableHandle]:
    """Hide columns from a layer's attention, by its mask."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask: Tensor = kwargs["attention_mask"].clone()  # (1, 1, S, S), added to the products
        mask[..., columns] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    yield layer.register_forward_pre_hook(before, with_kwargs=True)


def _leave_out(layer: Any, columns: list[int]) -> Iterator[RemovableHandle]:
    """Run a linear layer without columns: no mask would hide them from its state. They pass it unchanged."""
    whole: list[Tensor] = []

    def rest() -> list[int]:
        return sorted(set(range(whole[0].shape[1])) - set(columns))

    def before(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        whole[:] = args[:1]
        return (args[0][:, rest()],), {**kwargs, "attention_mask": None}

    def after(module: Any, args: Any, output: Tensor) -> Tensor:
        passed = whole[0].to(output.device, copy=True)
        passed[:, rest()] = output
        return passed

    yield layer.register_forward_pre_hook(before, with_kwargs=True)
    yield layer.register_forward_hook(after)


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
