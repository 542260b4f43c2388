"""The data of the third stage: lists of photographs, each with several captions to answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radical_rerank.embedded.packing import Ask, Packed, Rows, lay_out
from radical_rerank.embedded.photos.training.model import CELLS
from radical_rerank.reranking.prompt import IDENTIFIERS


class Packer:
    """Turns lists of pictures with captions into packed prompts.

    Args:
        tokenizer: of the model
    """

    def __init__(self, tokenizer: Any) -> None:
        token = tokenizer.convert_tokens_to_ids
        self.image, self.open, self.close = token("<IMG_CONTEXT>"), token("<img>"), token("</img>")
        self.query, self.answer = token("<query>"), token("<answer>")
        self.letters = [token(letter) for letter in IDENTIFIERS]

    def pack(
        self, images: Sequence[int], names: list[int], queries: Sequence[tuple[Sequence[int], int]]
    ) -> Packed:
        """Pack one list.

        Args:
            images: the numbers of its pictures
            names: the tokens of their identifiers
            queries: (token ids, the place of the right picture)
        """
        ids: list[int] = []
        for name in names:
            ids += [name, self.open, *[self.image] * CELLS, self.close]
        asks = [Ask([self.query, *words, self.answer], names[place], names) for words, place in queries]
        return Packed(ids, list(images), names, asks)

    def rows(self, prompts: Sequence[Packed]) -> Rows:
        """Lay out prompts with one-dimensional positions."""
        return lay_out(prompts, lambda prompt: (torch.arange(len(prompt.ids))[None], len(prompt.ids)))


def draw_list(
    rng: np.random.Generator, near: Tensor, captions: Sequence[Sequence[Sequence[int]]], *, count: int,
    alike: int, queries: int,
) -> tuple[list[int], list[tuple[Sequence[int], int]]]:  # fmt: skip
    """Draw a list of pictures and queries about them.

    Args:
        rng: what decides
        near: (pictures, n) the pictures most alike to each, as the first stage sees them
        captions: token ids of each picture's captions
        count: pictures in the list
        alike: how many of them are alike
        queries: how many queries, at most all captions

    Returns:
        The pictures, and (token ids, place of the right picture) of each query.
    """
    seed = int(rng.integers(len(near)))
    close = [int(n) for n in rng.permutation(near[seed].numpy()) if n != seed]
    chosen = [seed, *close[: max(0, alike - 1)]]
    taken = set(chosen)
    chosen += [int(n) for n in rng.permutation(len(near)) if n not in taken][: count - len(chosen)]
    pictures = [chosen[place] for place in rng.permutation(count)]
    asked = [(words, place) for place, picture in enumerate(pictures) for words in captions[picture]]
    return pictures, [asked[n] for n in rng.permutation(len(asked))[:queries]]
