"""The prompt before the query: what its first layers compute is the same for every query.

A decoder is causal, and the query comes after the pictures. So the layers before the first cut can run in two
parts: the tokens before the query, which see nothing of it, and the rest, which sees the keys and values of
the first part. The first part is kept for the next query over the same candidates.

Prompts run in these two parts whether or not the first one is known, so a ranking is the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from radical_rerank.backbones.families.base import FULL
from radical_rerank.backbones.model import device_of

if TYPE_CHECKING:
    from radical_rerank.backbones.engine import BatchState
    from radical_rerank.pruning import Layout


@dataclass(frozen=True)
class PrefixState:
    """What the first layers made of P tokens.

    entering: by D, (1, P, d) what enters layer D, for each D at which a prompt was cut
    keys, values: of all layers before the largest D, (1, KV, P, hd)
    pictures: the vision features among the tokens
    """

    entering: Mapping[int, Tensor]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    pictures: tuple[Tensor, ...]

    def before(self, depth: int) -> int:
        """The largest D up to `depth` from which a prompt can go on; 0 if there is none."""
        return max((known for known in self.entering if known <= depth), default=0)

    @property
    def nbytes(self) -> int:
        """The memory that it takes. The pictures are those of the vision cache."""
        return sum(tensor.nbytes for tensor in (*self.entering.values(), *self.keys, *self.values))


class KnownStates(Protocol):
    """Where states are kept."""

    def get(self, key: Hashable) -> PrefixState | None:
        """Return the state of this key, or None."""

    def put(self, key: Hashable, value: PrefixState) -> object:
        """Keep a state, instead of an earlier one of this key."""


@dataclass(frozen=True)
class Prefix:
    """The part of a prompt that may be known, and where it is kept.

    ids: the P tokens before the query
    pictures: the vision features among them
    known: the states that are kept
    """

    ids: tuple[int, ...]
    pictures: tuple[Tensor, ...]
    known: KnownStates

    @property
    def length(self) -> int:
        """P, the number of tokens."""
        return len(self.ids)

    @property
    def key(self) -> Hashable:
        """The same for the same tokens and pictures. A state keeps its pictures, so no other has their id."""
        return self.ids, tuple(map(id, self.pictures))


class SplitRun:
    """One prompt that runs in two parts up to layer `depth`, where the first cut is."""

    def __init__(self, prefix: Prefix, depth: int, layers: Sequence[Any]) -> None:
        self._prefix, self._layers, self.depth = prefix, layers, depth
        self._cache: Any = None
        self._mask: Any = None
        self._joined: Tensor | None = None
        self.known = 0
        """how many layers were known before"""
        self.inside = False
        """whether a layer runs for the first part"""

    @property
    def length(self) -> int:
        """P, the number of tokens in the first part."""
        return self._prefix.length

    def start(self, state: BatchState, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Find or compute the first part. hidden: (1, S, d) -> (1, S − P, d) the second part"""
        from transformers import DynamicCache

        known, first = self._prefix.known.get(self._prefix.key), hidden[:, : self.length]
        if known is None:
            known = PrefixState({}, (), (), self._prefix.pictures)
        self.known = known.before(self.depth)
        if self.known < self.depth:
            known = self._run_on(known, first, state, kwargs)
            self._prefix.known.put(self._prefix.key, known)
        self._joined, self._cache = known.entering[self.depth], DynamicCache()
        for index in range(self.depth):
            self._cache.update(known.keys[index], known.values[index], index)
        return hidden[:, self.length :]

    def _run_on(
        self, known: PrefixState, hidden: Tensor, state: BatchState, kwargs: dict[str, Any]
    ) -> PrefixState:
        """Run the first part on to layer `depth`. hidden: (1, P, d) what enters the first layer"""
        from transformers import DynamicCache

        hidden, cache = known.entering.get(self.known, hidden), DynamicCache()
        for index in range(self.known):  # a cache has no gaps
            cache.update(known.keys[index][:, :, :0], known.values[index][:, :, :0], index)
        self.inside = True
        try:
            for index in range(self.known, self.depth):
                layer = self._layers[index]
                hidden = hidden.to(device_of(layer))
                own = self._cut(kwargs, slice(0, self.length), hidden.device)
                own |= {"past_key_values": cache, "attention_mask": None}
                hidden = layer(hidden, **own)
                if index < len(state.deepstack):
                    hidden = state.add_deepstack(index, hidden, watched=True)
        finally:
            self.inside = False
        new = cache.layers[self.known : self.depth]
        keys = (*known.keys[: self.known], *(one.keys for one in new), *known.keys[self.depth :])
        values = (*known.values[: self.known], *(one.values for one in new), *known.values[self.depth :])
        return PrefixState({**known.entering, self.depth: hidden}, keys, values, known.pictures)

    def enter(self, state: BatchState, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a layer for the second part. hidden: (1, S − P, d)"""
        from transformers.masking_utils import create_causal_mask

        if self._mask is None:
            self._mask = create_causal_mask(
                config=state.text.config,
                inputs_embeds=hidden,
                attention_mask=None,
                past_key_values=self._cache,
            )
        own = self._cut(kwargs, slice(self.length, None), hidden.device)
        return own | {"past_key_values": self._cache, "attention_mask": self._mask}

    def join(self, hidden: Tensor) -> Tensor:
        """Return (1, S, d) both parts. hidden: (1, S − P, d)"""
        assert self._joined is not None
        return torch.cat([self._joined.to(hidden.device), hidden], dim=1)

    def _cut(self, kwargs: dict[str, Any], part: slice, device: torch.device) -> dict[str, Any]:
        cos, sin = kwargs["position_embeddings"]
        rotary = cos[:, part].to(device), sin[:, part].to(device)
        return {**kwargs, "position_embeddings": rotary, "position_ids": None}


def can_split(state: BatchState, prefix: Prefix, depth: int) -> bool:
    """Return whether a prompt can run in two parts up to layer `depth`.

    It must run alone and without a cache of its own, on layers with full attention, and all its pictures must
    be in the first part.
    """
    return (
        depth > 0
        and state.cache is None
        and len(state.layouts) == 1
        and last_picture(state.layouts[0]) <= prefix.length < state.length
        and not state.family.own_masks
        and set(state.family.kinds[:depth]) == {FULL}
        and not torch.is_grad_enabled()
    )


def last_picture(layout: Layout) -> int:
    """Return where the last picture of a prompt ends."""
    return max((span.stop for span in (*layout.candidates, *layout.protected)), default=0)
