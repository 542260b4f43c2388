"""Hooks on a model that act only for the thread and task that set them, and what is built on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from radical_rerank.backbones.view import all_keys
from radical_rerank.errors import StoppedError

if TYPE_CHECKING:
    from radical_rerank.backbones.families.base import Family

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(module, args, kwargs) -> the new (args, kwargs), or None to leave them"""

_entered: ContextVar[tuple[Hooks, ...]] = ContextVar("entered", default=())


class Hooks:
    """Forward pre-hooks that act only in the thread and asyncio task that entered. Exit removes them.

    A model may be shared: another thread's forward pass runs as if there were no hooks.

    `torch.compile` traces a whole model once, with or without hooks, and does not check again. So while hooks
    are set, the model's own forward runs uncompiled. Layers that were compiled one by one stay compiled.
    """

    def __init__(self, *models: nn.Module, owner: object = None) -> None:
        """Prepare. models: those whose forward must see the hooks, the outermost first"""
        self.owner = owner
        self.elsewhere = 0
        """calls of hooked modules by other threads and tasks"""
        self._models = models
        self._handles: list[Any] = []

    @property
    def here(self) -> bool:
        """Whether these hooks act in the current thread and task."""
        return self in _entered.get()

    def before(self, module: nn.Module, act: Before) -> None:
        """Call `act` before every call of the module, in this thread and task."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            # While another thread adds or removes its hooks, torch may call them here without kwargs.
            if self.here and kwargs is not None:
                return act(module, args, kwargs)
            self.elsewhere += 1
            return None

        # A compiled layer calls its hooks from inside: they must not be traced with it.
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
        # Not by a token: a generator may exit in another context than it entered in.
        _entered.set(tuple(hooks for hooks in _entered.get() if hooks is not self))
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for model in self._models:
            _uncompiled.remove(model)


def entered_for(owner: object) -> bool:
    """Return whether hooks of this owner are set in this thread and task."""
    return any(hooks.owner is owner for hooks in _entered.get())


@contextmanager
def watching(module: Any) -> Iterator[dict[str, Any]]:
    """Record the arguments that `module` is called with inside the block."""
    seen: dict[str, Any] = {}

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, **({"hidden_states": args[0]} if args else {}))

    with Hooks() as hooks:
        hooks.before(module, note)
        yield seen


@contextmanager
def one_row(model: nn.Module, text: Any, device: torch.device, family: Family) -> Iterator[None]:
    """Run the last decoder layer for the prompt's last row alone: see `last_row_only`.

    Its keys and values are still computed for all tokens. They go into the cache, or into one made for this
    call. If something reads the last layer's output, such as a stage after it, all rows are computed.

    model: the Hugging Face model; text: its decoder; device: of the last layer
    family: what is declared of the decoder. Only full attention can leave out rows: the state of a linear
        layer needs all of them, and a window's cache would lose its first keys
    """

    def before(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from transformers import DynamicCache

        hidden = args[0] if args else kwargs.pop("hidden_states")
        mask = kwargs.get("attention_mask")
        read = layer._forward_hooks or text.norm._forward_pre_hooks or family.kinds[-1] != "full_attention"
        if not read and (mask is None or isinstance(mask, Tensor)) and hidden.shape[1] > 1:
            hidden = hidden.to(device)
            cos, sin = (part.to(device) for part in kwargs["position_embeddings"])
            earlier = hidden[:, :-1]
            keys = all_keys(family, layer, earlier, (cos[:, :-1], sin[:, :-1]))
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

    with Hooks(model, text) as hooks:
        hooks.before(text.layers[-1], before)
        yield


@contextmanager
def stopping(
    models: Sequence[nn.Module], modules: Iterable[nn.Module], stop: Callable[[], bool]
) -> Iterator[None]:
    """Raise a StoppedError before a call of one of `modules`, once `stop` returns True.

    Other threads and tasks that use the model at the same time are not affected.
    models: those whose forward must see the hooks, the outermost first
    """

    def check(*_: Any) -> None:
        if stop():
            raise StoppedError("the ranking was stopped")

    with Hooks(*models) as hooks:
        for module in modules:
            hooks.before(module, check)
        yield


class _Uncompiled:
    """Modules whose forward must run uncompiled, with the number of hooks that need it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._own: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        """the module's own `forward` attribute before, if it had one"""

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
