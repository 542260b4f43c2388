"""Stage B: teaches the decoder to rank.

The loss is the cross-entropy of the right identifier among those of the prompt. Helper losses teach the
decoder where to look. They fade out towards the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from radical_rerank.backbones.view import project
from radical_rerank.embedded.packing import PhraseTarget, answer_loss, last_rows
from radical_rerank.embedded.scenes.training.batches import Batch

BOUND_TOKENS = 160
"""visual tokens per prompt that the binding loss reads"""


@dataclass(frozen=True)
class Helpers:
    """The weight of the helper losses and the layers (from 0) at which they act.

    Args:
        weight: from 0 to 1
        binding_layer: visual tokens know their image's identifier after it
        phrase_layer: the end of a phrase knows the phrase's words after it
        look_layers: the first, second and third phrase of a query look at the images in these
    """

    weight: float
    binding_layer: int
    phrase_layer: int
    look_layers: tuple[int, ...]

    @classmethod
    def at_depth(cls, layers: int, weight: float) -> Helpers:
        """Return the helpers of a decoder with this many layers. Phrases look in its second half, in turn."""
        first, second = int(0.5 * layers), int(0.7 * layers)
        return cls(weight, int(0.2 * layers), int(0.3 * layers), (first, second, second))


def forward(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """Return the hidden states that enter each layer, and last the normalized output."""
    output = model.model.language_model(
        inputs_embeds=batch.embeds,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        visual_pos_masks=batch.visual,
        deepstack_visual_embeds=batch.deepstack,
        use_cache=False,
        output_hidden_states=True,
    )
    return (*output.hidden_states[:-1], output.last_hidden_state)


def ranking_loss(model: Any, batch: Batch, helpers: Helpers) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a batch, and facts for the log.

    Args:
        model: the model that is trained
        batch: packed prompts
        helpers: the helper losses; with weight 0 they are not computed

    Returns:
        The loss, and by name: the loss of the answers, the fraction of right answers of each kind, and each
        helper loss.
    """
    states = forward(model, batch)
    loss, right = answer_loss(model.lm_head(last_rows(states[-1], batch.asks)), batch.asks)
    facts = {"loss": loss.item(), **right}
    if helpers.weight > 0:
        for name, weight, value in _helper_losses(model, batch, states, helpers):
            loss = loss + helpers.weight * weight * value
            facts[name] = value.item()
    return loss, facts


def _helper_losses(
    model: Any, batch: Batch, states: Sequence[Tensor], helpers: Helpers
) -> Iterator[tuple[str, float, Tensor]]:
    """Yield (name, weight, value) of each helper loss that the batch has."""
    binding = _binding_loss(model, batch, states[helpers.binding_layer + 1])
    if binding is not None:
        yield "binding", 0.2, binding
    yield "phrase", 0.1, _phrase_loss(model, batch, states[helpers.phrase_layer + 1])
    attention, bags = _look_losses(model, batch, states, helpers)
    if attention:
        yield "attention", 0.3, torch.stack(attention).mean()
    if bags:
        yield "bag", 0.6, torch.stack(bags).mean()


def _read(model: Any, states: Tensor) -> Tensor:
    """Return the logits of hidden states between layers, as if they were the decoder's output."""
    logits: Tensor = model.lm_head(model.model.language_model.norm(states))
    return logits


def _binding_loss(model: Any, batch: Batch, states: Tensor) -> Tensor | None:
    """Return how badly visual tokens know their image's identifier; None if no image has one."""
    rows, owners = [], []
    for b, (columns, owner) in enumerate(zip(batch.columns, batch.owners, strict=True)):
        known = (owner >= 0).nonzero()[:, 0]
        pick = known[torch.randperm(len(known))[:BOUND_TOKENS]]
        rows.append(states[b, columns[pick]])
        owners.append(owner[pick])
    if not sum(len(owner) for owner in owners):
        return None
    return cross_entropy(_read(model, torch.cat(rows)), torch.cat(owners))


def _phrase_loss(model: Any, batch: Batch, states: Tensor) -> Tensor:
    """Return how badly the last word of each phrase knows all of the phrase's attribute words."""
    asked = [(b, start + look.row, look) for b, start, ask in batch.asks for look in ask.looks]
    rows = torch.tensor([b for b, _, _ in asked])
    places = torch.tensor([place for _, place, _ in asked])
    logits = _read(model, states[rows, places]).log_softmax(-1)
    return torch.stack([-logits[i, look.words].mean() for i, (_, _, look) in enumerate(asked)]).mean()


def _look_losses(
    model: Any, batch: Batch, states: Sequence[Tensor], helpers: Helpers
) -> tuple[list[Tensor], list[Tensor]]:
    """Return two losses of each phrase.

    Returns:
        The attention losses: how little the phrase looks at the tokens that show it. The bag losses: how
        badly it then knows which candidates have it.
    """
    text = model.model.language_model
    rotary = text.rotary_emb(batch.embeds, batch.positions)
    attention, bags = [], []
    for layer, entries in _looks_by_layer(batch, helpers).items():
        for b in sorted({row for row, _, _ in entries}):
            looks = [look for row, _, look in entries if row == b]
            places = torch.tensor([place for row, place, _ in entries if row == b])
            weights = _attention(
                text.layers[layer], states[layer], b, places, (rotary[0][b], rotary[1][b]), batch.mask
            )
            after = _read(model, states[min(layer + 2, len(states) - 1)][b, places]).log_softmax(-1)
            for i, look in enumerate(looks):
                if look.tokens:
                    mass = weights[i, batch.columns[b][look.tokens]].sum()
                    attention.append(-(mass + 1e-6).log())
                if look.candidates:
                    bags.append(-after[i, look.candidates].mean() - math.log(len(look.candidates)))
    return attention, bags


def _looks_by_layer(batch: Batch, helpers: Helpers) -> dict[int, list[tuple[int, int, PhraseTarget]]]:
    """Return, per layer, (row of the batch, place in it, look)."""
    layers: dict[int, list[tuple[int, int, PhraseTarget]]] = {}
    for b, start, ask in batch.asks:
        for look in ask.reads:
            # Reading the reference is an attention loss only: it has no identifier.
            layers.setdefault(helpers.phrase_layer, []).append((b, start + look.row, look))
        for number, look in enumerate(ask.looks):
            layer = helpers.look_layers[min(number, len(helpers.look_layers) - 1)]
            layers.setdefault(layer, []).append((b, start + look.row, look))
    return layers


def _attention(
    layer: Any, states: Tensor, b: int, places: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """Return (places, length): the attention of these places of row b in a layer, mean over heads."""
    cos, sin = rotary
    query = project(layer, "q", states[b, places], cos[places], sin[places])
    key = project(layer, "k", states[b], cos, sin)
    groups = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(groups, 0).transpose(-1, -2) * layer.self_attn.scaling
    scores = scores.masked_fill(~mask[b, 0, places], -torch.inf)
    weights: Tensor = scores.softmax(-1).mean(0)
    return weights
