"""Decode steps after a pruned prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radical_rerank.backbones.families.base import LINEAR, Tokens
from radical_rerank.errors import LayoutError

if TYPE_CHECKING:
    from radical_rerank.backbones.engine import BatchState


class Decoding:
    """Gives each layer the mask (and, if renumbered, the rotary embeddings) of its own survivors.

    Layers keep different parts of the prompt in their caches: each one's mask covers its survivors and the
    tokens decoded since.
    """

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._new: Tensor | None = None
        self._masks: dict[tuple[int, int, str], Any] = {}

    def begin_step(self, mask: Tensor | None) -> None:
        """Begin a decode step. mask: (B, prompt + new tokens) or None"""
        state = self._state
        decoded = {state.cache.get_seq_length(i) - state.lengths[i] for i in state.family.attending}
        if len(decoded) > 1 or min(decoded) < 0:
            raise LayoutError(
                "since the last step, the cache was cropped to one length for all layers, or into the "
                "prompt. After pruning, remove the same number of decoded tokens from every layer"
            )
        self._new = None if mask is None else mask[:, state.length :].bool()
        self._masks = {}

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of layer `index`. hidden: (B, new tokens, d)"""
        state = self._state
        if state.family.kinds[index] == LINEAR:  # its state holds no token that could be masked
            return kwargs
        if state.pruned:
            kwargs["attention_mask"] = self._mask(index, hidden)
        if state.compact and state.layer_pruned[index]:
            kwargs["position_embeddings"] = self._rotary(index, hidden)
        return kwargs

    def _rotary(self, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Positions that follow the renumbered prompt of layer `index`."""
        state = self._state
        valid, length = state.layer_valid[index], state.lengths[index]
        first = torch.full((len(hidden), 1), length, device=hidden.device)
        if valid is not None:
            first = valid.sum(dim=1, keepdim=True)
        decoded = state.cache.get_seq_length(index) - length
        steps = torch.arange(hidden.shape[1], device=hidden.device)
        kind = state.family.kinds[index]
        cos, sin = state.family.rotary(state.text, hidden, first + decoded + steps, kind)
        return cos.to(hidden.device), sin.to(hidden.device)

    def _mask(self, index: int, hidden: Tensor) -> Any:
        state = self._state
        valid, length = state.layer_valid[index], state.lengths[index]
        kind = state.family.kinds[index]
        group = length, id(valid), kind  # layers of a kind between two stages share one mask
        if group not in self._masks:
            new = state.cache.get_seq_length(index) + hidden.shape[1] - length
            if valid is not None:
                later = valid.new_ones(len(valid), new) if self._new is None else self._new[:, -new:]
                valid = torch.cat((valid, later.to(valid.device)), dim=1)
            tokens = Tokens(valid, state.layer_index[index], state.length, new, state.groups)
            self._masks[group] = state.mask(index, hidden, tokens)
        return self._masks[group]
