"""From the model's answer to scores: the next token's logits, or a written permutation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radical_rerank.errors import ScoringError, UnreadableAnswerError

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


_THOUGHT = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL | re.IGNORECASE)
_LINKS = {"then", "and", "followed", "by"}
"""words that may stand between two identifiers of a ranking, as numbers may"""


def parse_permutation(text: str, names: str) -> Permutation:
    """Read "B > A > C", also with brackets, commas, numbers or line breaks between the identifiers, and with
    prose around it. What was written in a think block is not read.

    A repeated identifier counts once, one that names no candidate is dropped, those that are missing
    follow in their original order; each is counted, and so is every word of prose. Text without any
    identifier is an error.
    """
    answer = _THOUGHT.sub("", text)
    words = re.findall(r"[^\W_]+", answer)
    chains = [chain for chain in (*_chains(words), _parts(answer, names)) if set(chain) & set(names)]
    if not chains:
        raise UnreadableAnswerError(
            f"the model wrote no identifier of {names[0]} to {names[-1]}: {text[:80]!r}"
        )
    # Of several, the ranking is the one that names the most candidates; of equals, the last.
    ranking = max(reversed(chains), key=lambda chain: len(set(chain) & set(names)))
    order = [names.index(word) for word in dict.fromkeys(ranking) if word in names]
    known = sum(word in names for word in ranking)
    prose = [word for word in words if not word.isdigit() and word not in _LINKS]
    rest = [number for number in range(len(names)) if number not in order]
    return Permutation(order + rest, known - len(order), len(prose) - known, len(rest))


def _chains(words: Sequence[str]) -> list[list[str]]:
    """Runs of single letters; numbers and links do not end one."""
    chains: list[list[str]] = [[]]
    for word in words:
        if len(word) == 1 and word.isalpha():
            chains[-1].append(word)
        elif not word.isdigit() and word not in _LINKS:
            chains.append([])
    return chains


def _parts(answer: str, names: str) -> list[str]:
    """The identifiers of "B (a dog) > A (a cat)": what each part begins with, after the first anywhere."""
    first, *others = (re.findall(r"[^\W_]+", part) for part in answer.split(">"))
    head = [word for word in first if word in names and len(word) == 1][-1:]
    return head + [part[0] for part in others if part and len(part[0]) == 1]


def permutation_scores(order: Sequence[int]) -> list[float]:
    """Log of each candidate's share of Σ 1 / rank: a written order carries no probabilities of its own."""
    total = sum(1 / rank for rank in range(1, len(order) + 1))
    scores = [0.0] * len(order)
    for rank, number in enumerate(order, start=1):
        scores[number] = -math.log(rank * total)
    return scores
