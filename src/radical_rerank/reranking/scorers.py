"""From the model's answer to scores: the next token's logits, or a written permutation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radical_rerank.errors import ScoringError

SCORERS = ("logits", "generate")


def identifier_scores(logits: Tensor, identifiers: Sequence[int]) -> list[float]:
    """Log-probability of each candidate's identifier among all identifiers of the list.

    logits: (vocabulary,) of the token that follows the prompt.
    """
    chosen = logits[torch.as_tensor(identifiers, device=logits.device)]
    if not chosen.isfinite().all():
        raise ScoringError("the model gave logits that are not finite: no ranking can be read from them")
    return chosen.log_softmax(dim=-1).tolist()


@dataclass(frozen=True)
class Permutation:
    """A parsed ranking: candidate numbers, best first, and how often it had to be mended."""

    order: list[int]
    repeated: int = 0
    unknown: int = 0
    missing: int = 0

    @property
    def repairs(self) -> int:
        return self.repeated + self.unknown + self.missing


def parse_permutation(text: str, names: str) -> Permutation:
    """Read "B > A > C", also with brackets, commas or line breaks between the identifiers.

    A repeated identifier counts once, one that names no candidate is dropped, those that are missing
    follow in their original order; each is counted. Text without any identifier is an error.
    """
    order: list[int] = []
    repeated = unknown = 0
    for word in re.findall(r"[^\W_]+", text):
        if len(word) != 1 or word not in names:
            unknown += 1
        elif names.index(word) in order:
            repeated += 1
        else:
            order.append(names.index(word))
    if not order:
        raise ScoringError(f"the model wrote no identifier of {names[0]} to {names[-1]}: {text[:80]!r}")
    rest = [number for number in range(len(names)) if number not in order]
    return Permutation(order + rest, repeated, unknown, len(rest))


def permutation_scores(order: Sequence[int]) -> list[float]:
    """Reciprocal rank of each candidate: a written order carries no probabilities."""
    scores = [0.0] * len(order)
    for rank, number in enumerate(order, start=1):
        scores[number] = 1 / rank
    return scores
