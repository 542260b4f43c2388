"""Reading the order that a model generated (scorer "generate")."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from radical_rerank.errors import UnreadableAnswerError


@dataclass(frozen=True)
class Permutation:
    """A parsed order: candidate numbers, best first, and the corrections that were needed."""

    order: list[int]
    repeated: int = 0
    unknown: int = 0
    missing: int = 0

    @property
    def repairs(self) -> int:
        """The number of corrections."""
        return self.repeated + self.unknown + self.missing


_THOUGHT = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL | re.IGNORECASE)
_LINKS = {"then", "and", "followed", "by"}
"""words that may stand between two identifiers of a ranking"""


def parse_permutation(text: str, names: str) -> Permutation:
    """Read "B > A > C" or, if the identifiers are digits, "[2] > [1] > [3]".

    There may be brackets, commas or line breaks between the identifiers, numbers between letters, and prose
    around it all. Text in a think block is not read.

    A repeated identifier counts once, an unknown one is dropped, missing ones follow in their original order.
    Each correction is counted, and so is every word of prose. Text without any identifier is an error.
    """
    answer = _THOUGHT.sub("", text)
    words, known = re.findall(r"[^\W_]+", answer), set(names)
    if not names.isdigit():
        words = [word for word in words if not word.isdigit()]
    chains = [chain for chain in (*_chains(words, names), _parts(answer, names)) if set(chain) & known]
    if not chains:
        raise UnreadableAnswerError(
            f"the model's answer contains none of the identifiers {names[0]} to {names[-1]}: {text[:80]!r}"
        )
    # The order is the chain that names the most candidates; of several, the last.
    ranking = max(reversed(chains), key=lambda chain: len(set(chain) & known))
    order = [names.index(word) for word in dict.fromkeys(ranking) if word in known]
    named = sum(word in known for word in ranking)
    prose = [word for word in words if word not in _LINKS]
    rest = [number for number in range(len(names)) if number not in order]
    return Permutation(order + rest, named - len(order), len(prose) - named, len(rest))


def _chains(words: Sequence[str], names: str) -> list[list[str]]:
    """Return runs of single letters, or of numbers; linking words do not end a run."""
    chains: list[list[str]] = [[]]
    for word in words:
        if word.isdigit() if names.isdigit() else len(word) == 1 and word.isalpha():
            chains[-1].append(word)
        elif word not in _LINKS:
            chains.append([])
    return chains


def _parts(answer: str, names: str) -> list[str]:
    """Return the identifiers of "B (a dog) > A (a cat)": last of the first part, first of the others."""
    first, *others = (re.findall(r"[^\W_]+", part) for part in answer.split(">"))
    head = [word for word in first if word in names and len(word) == 1][-1:]
    return head + [part[0] for part in others if part and len(part[0]) == 1]


def permutation_scores(order: Sequence[int]) -> list[float]:
    """Return the log of each candidate's share of Σ 1 / rank: a generated order has no probabilities."""
    total = sum(1 / rank for rank in range(1, len(order) + 1))
    scores = [0.0] * len(order)
    for rank, number in enumerate(order, start=1):
        scores[number] = -math.log(rank * total)
    return scores
