"""What a method sees at a stage: `StageView` for one list, and the attention rows it may read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radical_rerank.errors import ScoringError, UnsupportedModelError
from radical_rerank.pruning import Stage, StageView, VisionSignals

if TYPE_CHECKING:
    from radical_rerank.backbones.engine import BatchState
    from radical_rerank.backbones.families.base import Family


class View(StageView):
    """`StageView` of one list at one stage. Nothing is computed before a method reads it."""

    def __init__(
        self,
        state: BatchState,
        row: int,
        stage: Stage,
        layer: Any,
        entering: Tensor,
        hidden: Tensor,
        keys: LazyTensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._state, self._row, self._module = state, row, layer
        self._entering, self._hidden, self._keys, self._rotary = entering, hidden, keys, rotary
        layout = state.layouts[row]
        self.layer, self.rows, self.key = stage.layer, layout.rows, layout.key
        self.alive = state.alive[row]
        self.candidate_of = state.candidate_of[row]
        self.image_of = layout.image_of.to(self.alive.device)
        self.facts: dict[str, float] = {}

    @property
    def vision(self) -> Tensor:
        return self._embedded(self._state.layouts[self._row].positions)

    @property
    def query_embedding(self) -> Tensor:
        return self.query_words.float().mean(dim=0)

    @property
    def query_words(self) -> Tensor:
        return self._embedded(self._state.layouts[self._row].query)

    @property
    def text_embeddings(self) -> Tensor:
        return self._embedded(self._state.layouts[self._row].rows)

    @property
    def hidden(self) -> Tensor:
        return self._hidden[self._row, self._state.slots[self._row]]

    @property
    def entering(self) -> Tensor:
        return self._entering[self._row, self._state.slots[self._row]]

    @property
    def keys(self) -> Tensor:
        return self._read_keys()[self._row, :, self._state.slots[self._row]].transpose(0, 1)

    @property
    def text_hidden(self) -> Tensor:
        return self._hidden[self._row, self._slots_of(self.rows)]

    @property
    def text_keys(self) -> Tensor:
        return self._read_keys()[self._row, :, self._slots_of(self.rows)].transpose(0, 1)

    @property
    def signals(self) -> VisionSignals:
        own, device = self._state.signals[self._row], self.alive.device
        return VisionSignals(own.attention.to(device), own.keys.to(device))

    def normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self._state.text.norm(hidden)
        return normed.to(hidden.device)

    def attention(self, rows: Sequence[int] | None = None) -> Tensor:
        state, row = self._state, self._row
        keys = self._read_keys()
        slots = self._slots_of(self.rows if rows is None else rows)
        allowed = state.index[row] <= state.index[row, slots][:, None]
        if state.valid is not None:
            allowed = allowed & state.valid[row]
        assert self._rotary is not None
        cos, sin = (part[row if len(part) > 1 else 0, slots] for part in self._rotary)
        query = state.family.project(self._module, "q", self._entering[row, slots], cos, sin)
        scaling = self._module.self_attn.scaling
        attention = row_attention(query, keys[row], scaling, allowed, state.slots[row])
        if not attention.sum().isfinite():
            raise ScoringError(
                f"the attention of layer {self.layer} is not finite; check the weights, or use bfloat16 or "
                "float32 if the model does not fit float16"
            )
        return attention

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        memory = self._state.memory[self._row]
        if name not in memory:
            start = time.perf_counter()
            memory[name] = compute()
            self._state.seconds["prior"] += time.perf_counter() - start
        return memory[name]

    def note(self, **facts: float) -> None:
        self.facts.update(facts)

    def _read_keys(self) -> Tensor:
        """Return (B, KV, n, hd) the layer's keys, or raise an error if its attention cannot be read."""
        if self.layer not in self._state.family.readable:
            raise UnsupportedModelError(
                f"layer {self.layer} has no attention over the whole prompt to read; a method that reads "
                "attention says so by `reads_attention`, and its stages then go to layers that have it"
            )
        return self._keys()

    def _slots_of(self, rows: Sequence[int]) -> Tensor:
        """Return where text rows are among the tokens alive."""
        state, row = self._state, self._row
        index = state.index[row]
        wanted = torch.as_tensor(rows, device=index.device) + state.offsets[row]
        # Survivors keep their order, so a binary search finds a row by its position. Padding in front
        # repeats dropped positions, so only the real part is searched.
        pads = 0 if state.valid is None else int((~state.valid[row]).sum())
        return torch.searchsorted(index[pads:].contiguous(), wanted) + pads

    def _embedded(self, positions: Sequence[int] | Tensor) -> Tensor:
        """Return input embeddings at positions of this list; at visual tokens, the encoder's outputs."""
        embeddings = self._state.embeddings
        where = torch.as_tensor(positions, device=embeddings.device) + self._state.offsets[self._row]
        return embeddings[self._row, where].to(self.alive.device)


class LazyTensor:
    """A tensor that is computed when first called for."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._compute()
        return self._value


# Attention rows, without the (tokens × tokens) matrix.

SMALL = 1 << 16
"""a chunk of this many values is small enough"""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves. x: (..., heads, n, hd); cos, sin: (..., n, hd or less: the rest stays)."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = x.chunk(2, dim=-1)
    turned = x * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def project(
    layer: Any,
    which: str,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    parts: int = 1,
    turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate,
) -> Tensor:
    """The layer's own queries ("q") or keys ("k"): its input norm, projection, head norm and rotation.

    hidden: (..., n, d); cos, sin: (..., n, hd) -> (..., heads, n, hd).
    parts: how many vectors the projection gives each head; the first is the query or key
    turn: the rotation
    """
    attention = layer.self_attn
    states = getattr(attention, f"{which}_proj")(layer.input_layernorm(hidden))
    states = states.unflatten(-1, (-1, parts * attention.head_dim))[..., : attention.head_dim]
    norm = getattr(attention, f"{which}_norm", None)
    if norm is not None:
        states = norm(states)
    return turn(states.transpose(-3, -2), cos, sin)


def all_keys(family: Family, layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """The family's `project` "k" of all tokens, in chunks.

    Intermediate values, about 3 d per token, stay near 1% of the H × n × n attention matrix.

    hidden: (B, n, d); rotary: cos and sin, (B or 1, n, hd) -> (B, KV, n, hd).
    """
    assert rotary is not None
    cos, sin = rotary
    keys = None
    (_, n, d), heads = hidden.shape, layer.self_attn.config.num_attention_heads
    step = max(1, SMALL // (2 * d), heads * n * n // (300 * d))
    for start in range(0, n, step):
        part = slice(start, start + step)
        chunk = family.project(layer, "k", hidden[:, part], cos[:, part], sin[:, part])
        if keys is None:
            keys = chunk.new_empty(*chunk.shape[:2], n, chunk.shape[-1])
        keys[:, :, part] = chunk
    assert keys is not None
    return keys


def row_attention(query: Tensor, key: Tensor, scaling: float, allowed: Tensor, columns: Tensor) -> Tensor:
    """Head-averaged attention of some rows at some columns; the softmax runs over all keys.

    query: (H, r, hd), key: (KV, n, hd), allowed: (r, n), columns: (c,) -> (r, c) in float32.
    Rows go in chunks of 0.5% of the keys, so that memory is about one such slice of the H × n × n matrix.
    """
    kv, length = key.shape[:2]
    heads, rows = query.shape[:2]
    # Scaled first and in float32: plain products overflow float16 where the model's own attention does not.
    key = key.float()
    grouped = (query.float() * scaling).view(kv, heads // kv, rows, -1)
    result = torch.empty(rows, len(columns), dtype=torch.float32, device=query.device)
    step = max(1, SMALL // (heads * length), length // 200)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        chunk = grouped[:, :, part]
        logits = (chunk.flatten(1, 2) @ key.transpose(-1, -2)).view(heads, -1, length)
        logits = logits.masked_fill_(~allowed[part], -torch.inf)
        # The softmax in place, so that only one slice is in memory at a time.
        logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
        logits.div_(logits.sum(dim=-1, keepdim=True))
        result[part] = logits.mean(dim=0)[:, columns]
        del logits
    return result


def column_means(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """(heads, n, hd) each -> (n,) attention received, mean over heads and rows, row chunk by row chunk."""
    total = q.new_zeros(q.shape[1])
    for rows in q.split(256, dim=1):
        total += (rows @ k.transpose(-1, -2) * scaling).softmax(-1).sum(dim=1).mean(dim=0)
    return total / q.shape[1]
