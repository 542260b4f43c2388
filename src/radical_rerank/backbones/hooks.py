"""Hooks on a model that act for whoever set them, and for nobody else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import nn

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(module, args, kwargs) -> the new (args, kwargs), or None to leave them"""

_entered: ContextVar[tuple[Hooks, ...]] = ContextVar("entered", default=())


class Hooks:
    """Forward pre-hooks that act only in the thread and asyncio task that entered. Leaving removes them.

    A model may be shared: another thread's pass through it runs as if the hooks were not there.

    `torch.compile` of a whole model records it once, with or without hooks, and does not look again. So while
    hooks are in, the model's own forward runs uncompiled. Layers that were compiled one by one stay compiled.
    """

    def __init__(self, *models: nn.Module, owner: object = None) -> None:
        """models: those whose forward must see the hooks, the outermost first."""
        self.owner = owner
        self.elsewhere = 0
        """calls of hooked modules by other threads and tasks"""
        self._models = models
        self._handles: list[Any] = []

    @property
    def here(self) -> bool:
        return self in _entered.get()

    def before(self, module: nn.Module, act: Before) -> None:
        """`act` before every call of the module from here."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.here:
                return act(module, args, kwargs)
            self.elsewhere += 1
            return None

        # A layer that is compiled calls its hooks from inside: they are not to be recorded with it.
        hook = torch.compiler.disable(hook)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __enter__(self) -> Hooks:
        _entered.set((*_entered.get(), self))
        for model in self._models:
            _uncompiled.add(model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not by a token: a generator may leave in another context than it entered in.
        _entered.set(tuple(hooks for hooks in _entered.get() if hooks is not self))
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for model in self._models:
            _uncompiled.remove(model)


def entered_for(owner: object) -> bool:
    """Whether hooks of this owner are in, here."""
    return any(hooks.owner is owner for hooks in _entered.get())


@contextmanager
def watching(module: Any, wanted: bool) -> Iterator[dict[str, Any]]:
    """Record the arguments that `module` is called with inside the block, if `wanted`."""
    seen: dict[str, Any] = {}

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, **({"hidden_states": args[0]} if args else {}))

    if not wanted:
        yield seen
        return
    with Hooks() as hooks:
        hooks.before(module, note)
        yield seen


class _Uncompiled:
    """Modules whose forward must not be taken from torch.compile's cache, and for how many hooks each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._own: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        """what stood in the module's own `forward` before, where anything did"""

    def add(self, module: nn.Module) -> None:
        with self._lock:
            self._uses[module] = self._uses.get(module, 0) + 1
            if self._uses[module] == 1:
                if "forward" in module.__dict__:
                    self._own[module] = module.__dict__["forward"]
                module.forward = torch.compiler.disable(module.forward)

    def remove(self, module: nn.Module) -> None:
        with self._lock:
            self._uses[module] -= 1
            if not self._uses[module]:
                del self._uses[module]
                del module.forward
                if module in self._own:
                    module.forward = self._own.pop(module)


_uncompiled = _Uncompiled()
