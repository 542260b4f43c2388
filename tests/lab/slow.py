"""The paper's diagnosis written out: whole attention matrices of the stock model, masks, loops.

Shares no code with the package but for the words of the prompt and the vision features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from PIL import Image

from radical_rerank.backbones import Backbone
from radical_rerank.reranking.prompt import Prompt, PromptTemplate, build_prompt


@dataclass
class SlowList:
    """One list on a model that was loaded with eager attention."""

    backbone: Backbone
    query: str
    images: Sequence[Image.Image]
    template: PromptTemplate
    max_image_tokens: int

    def __post_init__(self) -> None:
        pixels = [self.backbone.preprocess(image, self.max_image_tokens) for image in self.images]
        self.features = self.backbone.encode(pixels)
        sizes = [len(feature.tokens) for feature in self.features]
        self.prompt: Prompt = build_prompt(self.backbone, self.template, self.query, sizes)
        self.inputs = self.backbone.inputs([self.prompt.ids], self.features)
        if "image_grid_thw" in self.inputs:
            self.inputs["position_ids"], _ = self.backbone.model.model.get_rope_index(
                self.inputs["input_ids"],
                mm_token_type_ids=self.inputs["mm_token_type_ids"],
                image_grid_thw=self.inputs["image_grid_thw"],
            )

    def _run(self, hidden: range = range(0)) -> Any:
        """The stock model, with these places hidden from all others."""
        length = len(self.prompt.ids)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        for row in range(length):
            for column in hidden:
                if row != column:
                    allowed[row, column] = False
        mask = torch.zeros(1, 1, length, length).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            return self.backbone.model(**{**self.inputs, "attention_mask": mask}, output_attentions=True)

    def _answer(self, hidden: range = range(0)) -> list[float]:
        """The probability of every candidate's letter, among these letters."""
        logits = self._run(hidden).logits[0, -1]
        raw = [math.exp(float(logits[token])) for token in self.prompt.identifiers]
        return [value / sum(raw) for value in raw]

    def contribution(self) -> list[float]:
        """Per candidate, the total variation between the answers with and without its tokens."""
        base = self._answer()
        changes = []
        for candidate in self.prompt.layout.candidates:
            other = self._answer(candidate)
            changes.append(sum(abs(a - b) for a, b in zip(base, other, strict=True)) / 2)
        return changes

    def attention(self) -> list[list[float]]:
        """p of every layer: heads averaged, every text row renormalised over the visual tokens, averaged."""
        columns = [place for candidate in self.prompt.layout.candidates for place in candidate]
        rows = list(range(max(columns) + 1, len(self.prompt.ids)))
        layers = []
        for weights in self._run().attentions:
            total = [0.0] * len(columns)
            for row in rows:
                values = [float(weights[0, :, row, column].mean()) for column in columns]
                for i, value in enumerate(values):
                    total[i] += value / sum(values) / len(rows)
            layers.append(total)
        return layers

    def h_norm(self) -> list[float]:
        return [-sum(x * math.log(x) for x in p) / math.log(len(p)) for p in self.attention()]

    def priors(self) -> dict[str, list[float]]:
        """U, Q and their product per visual token."""
        tokens = [token for feature in self.features for token in feature.tokens]
        table = self.backbone.model.get_input_embeddings().weight.detach()
        words = [table[self.prompt.ids[place]] for place in self.prompt.layout.query]
        query, prototype = sum(words) / len(words), sum(tokens) / len(tokens)

        def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
            return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))

        unique = [1 - cosine(token, prototype) for token in tokens]
        relevant = [max(0.0, cosine(token, query)) for token in tokens]
        both = [u * q for u, q in zip(unique, relevant, strict=True)]
        return {"U": unique, "Q": relevant, "U×Q": both}

    def means(self, values: Sequence[float]) -> list[float]:
        """Per candidate the mean over its tokens."""
        means, start = [], 0
        for candidate in self.prompt.layout.candidates:
            part = values[start : start + len(candidate)]
            means.append(sum(part) / len(part))
            start += len(candidate)
        return means


def slow_spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    x, y = ranks(a), ranks(b)
    mx, my = sum(x) / len(x), sum(y) / len(y)
    above = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    below = math.sqrt(sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y))
    return above / below if below else 0.0


def slow_z(saliency: Sequence[float], contribution: Sequence[float]) -> float:
    """Against the null of all permutations, not of some."""
    null = [slow_spearman(saliency, shuffled) for shuffled in permutations(contribution)]
    mean = sum(null) / len(null)
    spread = math.sqrt(sum((value - mean) ** 2 for value in null) / len(null))
    return (slow_spearman(saliency, contribution) - mean) / spread if spread else 0.0
