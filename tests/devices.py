"""Tensors that pretend to lie on several devices, on a machine that has one.

Inside `Pretending`, every tensor carries the name of a device. An operation on tensors of different devices
is an error, as it is on real ones. Numbers, and indices that are on the CPU, are allowed, as torch allows
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")
INDEXING = ("__getitem__", "__setitem__")


def device_tag(tensor: Tensor) -> torch.device:
    """Where a tensor says that it is."""
    return getattr(tensor, "_pretended", CPU)


def tag(tensor: Tensor, device: torch.device) -> Tensor:
    tensor._pretended = device  # type: ignore[attr-defined]
    return tensor


class Pretending(TorchFunctionMode):
    """Inside, tensors can be on devices that are not there, and must be where the others are."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: set[tuple[str, str]] = set()
        """from where to where tensors were moved"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return device_tag(args[0])
        if name in ("to", "cpu"):
            return self._move(func, name, args, kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        places = {device_tag(x) for x in tensors if x.ndim}
        if name in INDEXING:
            places -= {CPU} if device_tag(args[0]) != CPU else set()
        if len(places) > 1:
            raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, places)))}")
        asked = kwargs.pop("device", None)
        result = func(*args, **kwargs)
        device = next(iter(places or {device_tag(x) for x in tensors}), CPU)
        if asked is not None:
            device = torch.device(asked)
        return tree_map(lambda x: tag(x, device) if isinstance(x, Tensor) else x, result)

    def _move(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        own, *rest = args
        target = device_tag(own)
        asked = CPU if name == "cpu" else kwargs.pop("device", None)
        for value in list(rest):
            if isinstance(value, (str, torch.device)):
                asked = value
                rest.remove(value)
            elif isinstance(value, Tensor):
                asked = device_tag(value)
        target = target if asked is None else torch.device(asked)
        result: Tensor = func(own, *rest, **kwargs) if rest or kwargs else own
        if target != device_tag(own):
            self.moves.add((str(device_tag(own)), str(target)))
            result = result.clone() if result is own else result
        return tag(result, target)


def place(module: torch.nn.Module, device: str) -> None:
    """Put a module there, as accelerate does, with accelerate's own hook that moves its arguments."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for weight in [*module.parameters(), *module.buffers()]:
        tag(weight, torch.device(device))
    for part in module.modules():
        hook = AlignDevicesHook(skip_keys=["past_key_values"])
        hook.execution_device = torch.device(device)
        hook.init_hook = lambda own: own
        add_hook_to_module(part, hook)
