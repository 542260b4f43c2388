"""A forward pass that can be stopped on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from radical_rerank.backbones.families import encoder_blocks, text_model, unwrapped
from radical_rerank.backbones.hooks import Hooks
from radical_rerank.errors import StoppedError


@contextmanager
def stopping(model: Any, stop: Callable[[], bool]) -> Iterator[None]:
    """Inside, forward passes end with a StoppedError once `stop` says so.

    It is asked before each block of the encoder and each layer of the decoder. Other threads and tasks that
    use the model meanwhile are left alone.
    """

    def check(*_: Any) -> None:
        if stop():
            raise StoppedError("the ranking was stopped")

    text = text_model(model)
    with Hooks(unwrapped(model), text) as hooks:
        for module in (*encoder_blocks(model), *text.layers):
            hooks.before(module, check)
        yield
