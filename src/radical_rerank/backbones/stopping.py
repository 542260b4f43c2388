"""A forward pass that can be stopped on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from radical_rerank.backbones.families import encoder_blocks, text_model
from radical_rerank.errors import StoppedError


@contextmanager
def stopping(model: Any, stop: Callable[[], bool]) -> Iterator[None]:
    """Inside, this thread's forward passes end with a StoppedError once `stop` says so.

    It is asked before each block of the encoder and each layer of the decoder. Other threads that use the
    model meanwhile are left alone.
    """
    owner = threading.get_ident()

    def check(*_: Any) -> None:
        if threading.get_ident() == owner and stop():
            raise StoppedError("the ranking was stopped")

    handles = [
        module.register_forward_pre_hook(check)
        for module in (*encoder_blocks(model), *text_model(model).layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
