"""Where the parts of a model compute, and its weights, if it lies on several devices or partly on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def device_of(module: Any) -> torch.device:
    """Return the device that a module computes on.

    accelerate may keep its weights elsewhere (in memory, on disk) and move them there for each call.
    """
    weight = next(module.parameters())
    # Weights that lie elsewhere are on the meta device. The first hook in or on the module says where to.
    for part in module.modules() if weight.is_meta else (module,):
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            place = getattr(one, "execution_device", None)
            if place is not None:
                return torch.device(place)
    return torch.device(weight.device)


def plain_tensors(model: Any, *, read: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the plain tensors of every weight, in the order of their names.

    A quantized weight may consist of several tensors. One that lies on disk is read, if asked for; else it
    is an empty tensor of the meta device.
    """
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):  # what a quantizer keeps beside its weights
            continue
        if read and tensor.is_meta:
            from transformers.integrations.accelerate import load_offloaded_parameter

            tensor = load_offloaded_parameter(model, name)
        yield from ((name, part) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
