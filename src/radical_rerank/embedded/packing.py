"""Packed prompts: a head of images, then many queries that do not see each other.

One pass over the images serves all their queries. A packed query gets the same answer as one that is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class PhraseTarget(NamedTuple):
    """What a phrase of a query should look at.

    Args:
        row: where in the query's ids the phrase ends
        tokens: the visual tokens that show it, counted over all images of the prompt
        candidates: the identifiers of the candidates that have it
        words: the ids of its attribute words
    """

    row: int
    tokens: list[int]
    candidates: list[int]
    words: list[int]


@dataclass
class Ask:
    """One query behind the images.

    Args:
        ids: its tokens
        answer: the right next token
        choices: the tokens that could be the answer
        looks: per phrase, what it should look at
        kind: "list", "composed", "yes-no", "colour", or "none" if nothing matches
        reads: what to look at in the reference, in an early layer
    """

    ids: list[int]
    answer: int
    choices: list[int]
    looks: list[PhraseTarget] = field(default_factory=list)
    kind: str = "list"
    reads: list[PhraseTarget] = field(default_factory=list)


@dataclass
class Packed:
    """One prompt: a head of images, then queries that do not see each other.

    Args:
        ids: the tokens of the head
        images: the numbers of its images in the batch, in order
        identifier_of: per image, the token that names it, -1 for none
        asks: the queries
    """

    ids: list[int]
    images: list[int]
    identifier_of: list[int]
    asks: list[Ask]


Placed = tuple[int, int, Ask]
"""the row of the batch, where in it the query's ids start, the query"""


class Rows(NamedTuple):
    """Prompts as rows of a batch, padded on the right.

    Args:
        ids: (B, S)
        positions: (axes, B, S)
        mask: (B, 1, S, S), true where a token may look
        asks: the queries, with their places
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    asks: list[Placed]


def lay_out(prompts: Sequence[Packed], place_head: Callable[[Packed], tuple[Tensor, int]]) -> Rows:
    """Lay out prompts of any lengths as a batch.

    place_head: returns the (axes, n) positions of a prompt's head, and the position after it, at which each
        of its queries starts
    """
    length = max(len(p.ids) + sum(len(a.ids) for a in p.asks) for p in prompts)
    heads = [place_head(prompt) for prompt in prompts]
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    positions = torch.zeros(len(heads[0][0]), len(prompts), length, dtype=torch.long)
    mask = torch.zeros(len(prompts), 1, length, length, dtype=torch.bool)
    asks: list[Placed] = []
    for b, (prompt, (spots, after)) in enumerate(zip(prompts, heads, strict=True)):
        head = len(prompt.ids)
        ids[b, :head] = torch.tensor(prompt.ids)
        positions[:, b, :head] = spots
        mask[b, 0, :head, :head] = torch.ones(head, head, dtype=torch.bool).tril_()
        start = head
        for ask in prompt.asks:
            end = start + len(ask.ids)
            ids[b, start:end] = torch.tensor(ask.ids)
            positions[:, b, start:end] = torch.arange(after, after + len(ask.ids))
            mask[b, 0, start:end, :head] = True
            mask[b, 0, start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril_()
            asks.append((b, start, ask))
            start = end
        mask[b, 0, start:, 0] = True  # padding attends to one token, so that its softmax is defined
    return Rows(ids, positions, mask, asks)


def draw_identifiers(rng: np.random.Generator, letters: Sequence[int], count: int) -> list[int]:
    """Draw identifiers from these tokens: half the time the first ones, as at inference, else any."""
    if rng.random() < 0.5:
        return list(letters[:count])
    return [letters[i] for i in rng.permutation(len(letters))[:count]]


def last_rows(states: Tensor, asks: Sequence[Placed]) -> Tensor:
    """Return (queries, d): the state of each query's last token. states: (B, S, d)"""
    return torch.stack([states[b, start + len(ask.ids) - 1] for b, start, ask in asks])


def answer_loss(logits: Tensor, asks: Sequence[Placed]) -> tuple[Tensor, dict[str, float]]:
    """Return the cross-entropy of the answers, and the fraction of right answers of each kind.

    The right answer among the choices, and a fifth for any of the choices among all tokens.

    logits: (queries, vocabulary) of the token that follows each query
    """
    loss = logits.new_zeros(())
    count = len(asks)
    right: dict[str, list[float]] = {}
    for row, (_, _, ask) in enumerate(asks):
        among = logits[row, ask.choices]
        loss = loss + cross_entropy(among[None], torch.tensor([ask.choices.index(ask.answer)])) / count
        loss = loss + 0.2 * (logits[row].logsumexp(-1) - among.logsumexp(-1)) / count
        right.setdefault(ask.kind, []).append(float(ask.choices[int(among.argmax())] == ask.answer))
    return loss, {kind: sum(values) / len(values) for kind, values in right.items()}
