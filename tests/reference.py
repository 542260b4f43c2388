"""An independent, slow, obvious pruned decoder: layer by layer, full attention matrices, explicit gathers.

It shares no code with the package. From the model it takes weights (norms, projections, MLPs, the
rotary module) and vision features; attention, pruning, caching and the paper's formulas are written
out again here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.cases import Case


@dataclass
class Look:
    """What a scoring rule of the reference may see at a stage."""

    layer: int
    weights: torch.Tensor  # (heads, n, n) attention of the layer over the tokens alive
    rows: list[int]  # places of the text rows among them
    columns: list[int]  # places of the alive candidate tokens among them
    alive: list[int]  # their numbers among all candidate tokens
    vision: torch.Tensor  # (V, d)
    owner: list[int]  # (V,)
    query: torch.Tensor  # (d,)


Rule = Callable[[Look], list[tuple[float, ...]]]


@dataclass
class Reference:
    model: Any
    case: Case
    stages: Sequence[tuple[int, str, float]]
    rule: Rule
    survivors: list[list[int]] = field(default_factory=list)

    def run(self, steps: int) -> list[torch.Tensor]:
        """Logits after the prompt and after each of `steps` greedy tokens."""
        with torch.no_grad():
            return self._run(steps)

    def logits(self) -> torch.Tensor:
        """After the prompt, with gradients."""
        return self._run(0)[0]

    def _run(self, steps: int) -> list[torch.Tensor]:
        base, text = self.model.model, self.model.model.language_model
        inputs, layout = self.case.inputs, self.case.layout
        embeds = text.embed_tokens(inputs["input_ids"])[0].clone()
        visual = [i for i, token in enumerate(self.case.ids) if token == self.model.config.image_token_id]
        deepstack = []
        if "image_grid_thw" in inputs:
            output = base.get_image_features(
                inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
            )
            embeds[visual] = torch.cat(output.pooler_output)
            deepstack = [torch.cat(level) for level in getattr(output, "deepstack_features", None) or []]
            positions, _ = base.get_rope_index(
                inputs["input_ids"],
                mm_token_type_ids=inputs["mm_token_type_ids"],
                image_grid_thw=inputs["image_grid_thw"],
            )
        else:
            features = base.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True)
            embeds[visual] = features.pooler_output.flatten(0, 1)
            positions = torch.arange(len(embeds))[None]
        cos, sin = (part[0] for part in text.rotary_emb(embeds[None], positions))

        candidate_positions = [p for span in layout.candidates for p in span]
        owner = [k for k, span in enumerate(layout.candidates) for _ in span]
        number = {position: i for i, position in enumerate(candidate_positions)}
        vision = embeds[candidate_positions].detach()
        query = embeds[list(layout.query)].mean(0).detach()
        tokens = list(range(len(embeds)))  # original positions of the tokens alive
        hidden = embeds
        self.caches = []

        def prune(place: int, when: str, weights: torch.Tensor) -> list[int]:
            keep = next((k for where, w, k in self.stages if (where, w) == (place, when)), None)
            columns = [i for i, t in enumerate(tokens) if t in number]
            alive = [number[tokens[i]] for i in columns]
            if keep is None:
                return list(range(len(tokens)))
            rows = [i for i, t in enumerate(tokens) if t in layout.rows]
            look = Look(place, weights.detach(), rows, columns, alive, vision, owner, query)
            scores = self.rule(look)
            count = math.ceil(round(keep * len(alive), 9))
            best = sorted(range(len(alive)), key=lambda i: scores[i], reverse=True)[:count]
            self.survivors.append(sorted(alive[i] for i in best))
            kept = {columns[i] for i in best}
            return [i for i, t in enumerate(tokens) if t not in number or i in kept]

        for at, layer in enumerate(text.layers):
            weights, _, _ = self._attend(layer, hidden, cos[tokens], sin[tokens])
            stay = prune(at, "before", weights)
            tokens, hidden = [tokens[i] for i in stay], hidden[stay]
            weights, keys, values = self._attend(layer, hidden, cos[tokens], sin[tokens])
            self.caches.append([keys, values])
            hidden = self._finish(layer, hidden, weights @ values)
            if at < len(deepstack):
                added = [deepstack[at][visual.index(t)] if t in visual else 0 * hidden[0] for t in tokens]
                hidden = hidden + torch.stack(added)
            stay = prune(at, "after", weights)
            tokens, hidden = [tokens[i] for i in stay], hidden[stay]
        logits = [self.model.lm_head(text.norm(hidden[-1]))]

        next_position = int(positions.max()) + 1
        for step in range(steps):
            hidden = text.embed_tokens(logits[-1].argmax()[None])
            place = torch.full((*positions.shape[:-1], 1), next_position + step)
            c, s = (part[0] for part in text.rotary_emb(hidden[None], place))
            for layer, cache in zip(text.layers, self.caches, strict=True):
                q, k, v = self._project(layer, hidden, c, s)
                cache[0], cache[1] = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
                weights = self._softmax(layer, q, cache[0])
                hidden = self._finish(layer, hidden, weights @ cache[1])
            logits.append(self.model.lm_head(text.norm(hidden[-1])))
        return logits

    def _project(self, layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        attn, x = layer.self_attn, layer.input_layernorm(hidden)
        size = attn.head_dim

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.view(len(hidden), -1, size)

        q, k, v = split(attn.q_proj(x)), split(attn.k_proj(x)), split(attn.v_proj(x))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

        def turn(x: torch.Tensor) -> torch.Tensor:
            half = size // 2
            other = torch.cat([-x[..., half:], x[..., :half]], -1)
            return x * cos + other * sin

        groups = q.shape[0] // k.shape[0]
        return turn(q), turn(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)

    def _softmax(self, layer: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(1, 2) / math.sqrt(layer.self_attn.head_dim)
        rows, keys = scores.shape[1:]
        future = torch.arange(keys)[None, :] > torch.arange(keys - rows, keys)[:, None]
        return scores.masked_fill(future, -math.inf).softmax(-1)

    def _attend(self, layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k, v = self._project(layer, hidden, cos, sin)
        return self._softmax(layer, q, k), k, v

    def _finish(self, layer: Any, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        hidden = hidden + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def text_averaged(look: Look) -> list[float]:
    """p: mean over heads, each text row renormalised over the visual columns, mean over rows."""
    head_mean = look.weights.mean(0)
    total = [0.0] * len(look.columns)
    for row in look.rows:
        values = [float(head_mean[row, column]) for column in look.columns]
        for i, value in enumerate(values):
            total[i] += value / sum(values) / len(look.rows)
    return total


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0) / math.log(len(p))


def signed_dti(look: Look) -> list[float]:
    """CCU · cos of all V tokens, before QRel is cut at 0."""

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    prototype = look.vision.mean(0)
    return [(1 - cosine(t, prototype)) * cosine(t, look.query) for t in look.vision]


def normalised(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 0.0 for v in values]


def places(values: list[float]) -> list[float]:
    """Each value's place among the distinct ones, from 0 to 1."""
    distinct = sorted(set(values))
    return [distinct.index(value) / max(1, len(distinct) - 1) for value in values]


def radical_rule(alpha: dict[int, float]) -> Rule:
    """The paper's fusion at a layer of trust α.

    α = 0, "pure saliency": AttentionInfo grows with attention above the uniform baseline, and says nothing
    below, where attention itself goes on. So the tokens with the most attention survive.
    α = 1, "pure DTI": the tokens with the highest CCU · cos survive; where it is negative DTI is 0 for all.
    Between: f = max(d, ε)^α · max(s, ε)^(1 − α). The paper is silent on equal f. Ours then weighs the ranks
    in both channels, without their cuts at zero, by the same α.
    """

    def rule(look: Look) -> list[tuple[float, ...]]:
        a, raw, p = alpha[look.layer], signed_dti(look), text_averaged(look)
        if a == 0:
            return [(x,) for x in p]
        if a == 1:
            return [(raw[t],) for t in look.alive]
        d = normalised([max(x, 0) for x in raw])
        info = [max(x * math.log(len(p) * x), 0) if x > 0 else 0.0 for x in p]
        s = normalised(info) if max(info) > 0 else [1 / len(p)] * len(p)
        fused = [max(d[t], 1e-6) ** a * max(s[i], 1e-6) ** (1 - a) for i, t in enumerate(look.alive)]
        pairs = zip(places([raw[t] for t in look.alive]), places(p), strict=True)
        ties = [a * x + (1 - a) * y for x, y in pairs]
        return [(float(f"{f:.6g}"), tie) for f, tie in zip(fused, ties, strict=True)]

    return rule


def last_row_rule(look: Look) -> list[tuple[float, ...]]:
    """Attention of the last text row, mean over heads (what FastV reads)."""
    return [(float(look.weights.mean(0)[look.rows[-1], column]),) for column in look.columns]
