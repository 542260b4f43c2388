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
        base = self.model.model
        text = base.text_model if hasattr(base, "text_model") else base.language_model
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
            given = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
            features = base.get_image_features(**given, return_dict=True).pooler_output
            embeds[visual] = torch.cat(list(features))
            positions = torch.arange(len(embeds))[None]
        turns = self._turns(text, embeds[None], positions)
        run = -1
        self.group = []  # of each token: its image, if its tokens see each other in both directions
        for here, before in zip(self.case.ids, [None, *self.case.ids], strict=False):
            run += here == self.model.config.image_token_id != before
            two_way = here == self.model.config.image_token_id and "token_type_ids" in inputs
            self.group.append(run if two_way else -1)

        marks = {position for position, _ in layout.markup}
        shown = [[p for p in span if p not in marks] for span in layout.candidates]
        candidate_positions = [p for own in shown for p in own]
        owner = [k for k, own in enumerate(shown) for _ in own]
        number = {position: i for i, position in enumerate(candidate_positions)}
        vision = embeds[candidate_positions].detach()
        query = embeds[list(layout.query)].mean(0).detach()
        tokens = list(range(len(embeds)))  # original positions of the tokens alive
        hidden = embeds
        self.caches: list[list[torch.Tensor]] = []
        self.places: list[list[int]] = []  # of each layer: the original positions of its keys

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
            kept = {tokens[columns[i]] for i in best}
            left = {p for p, row in layout.markup if set(row) <= set(number) and not kept & set(row)}
            return [i for i, t in enumerate(tokens) if t in kept or (t not in number and t not in left)]

        for at, layer in enumerate(text.layers):
            if hasattr(layer, "linear_attn"):
                cache: list[torch.Tensor] = []
                hidden = self._mlp(layer, hidden + self._recur(layer, hidden, cache))
                self.caches.append(cache)
                self.places.append([])
                continue
            weights, _, _ = self._attend(layer, hidden, turns[at][0][tokens], turns[at][1][tokens], tokens)
            stay = prune(at, "before", weights)
            tokens, hidden = [tokens[i] for i in stay], hidden[stay]
            weights, keys, values = self._attend(
                layer, hidden, turns[at][0][tokens], turns[at][1][tokens], tokens
            )
            self.caches.append([keys, values])
            self.places.append(list(tokens))
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
            turns = self._turns(text, hidden[None], place)
            self.group.append(-1)
            for at, (layer, cache) in enumerate(zip(text.layers, self.caches, strict=True)):
                if hasattr(layer, "linear_attn"):
                    hidden = self._mlp(layer, hidden + self._recur(layer, hidden, cache))
                    continue
                q, k, v = self._project(layer, hidden, *turns[at])
                cache[0], cache[1] = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
                self.places[at].append(len(self.case.ids) + step)
                weights = self._softmax(layer, q, cache[0], self.places[at])
                hidden = self._finish(layer, hidden, weights @ cache[1])
            logits.append(self.model.lm_head(text.norm(hidden[-1])))
        return logits

    def _turns(self, text: Any, states: torch.Tensor, positions: torch.Tensor) -> list[list[torch.Tensor]]:
        """Cosines and sines of every layer."""
        kinds = getattr(text.config, "layer_types", None)
        if kinds and "sliding_attention" in kinds:
            return [[part[0] for part in text.rotary_emb(states, positions, kind)] for kind in kinds]
        return [[part[0] for part in text.rotary_emb(states, positions)]] * len(text.layers)

    def _project(self, layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        attn, x = layer.self_attn, layer.input_layernorm(hidden)
        size = attn.head_dim

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.view(len(hidden), -1, size)

        q, k, v = split(self._queries(attn, x)[0]), split(attn.k_proj(x)), split(attn.v_proj(x))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

        def turn(x: torch.Tensor) -> torch.Tensor:
            turned, half = cos.shape[-1], cos.shape[-1] // 2
            x, rest = x[..., :turned], x[..., turned:]
            other = torch.cat([-x[..., half:], x[..., :half]], -1)
            if hasattr(layer, "post_self_attn_layernorm"):  # GLM turns neighbours
                other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return torch.cat([x * cos + other * sin, rest], -1)

        groups = q.shape[0] // k.shape[0]
        return turn(q), turn(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)

    def _softmax(self, layer: Any, q: torch.Tensor, k: torch.Tensor, places: list[int]) -> torch.Tensor:
        attn = layer.self_attn
        scale = getattr(attn.config, "query_pre_attn_scalar", attn.head_dim)
        scores = q @ k.transpose(1, 2) / math.sqrt(scale)
        rows, keys = scores.shape[1:]
        place, group = torch.tensor(places), torch.tensor([self.group[p] for p in places])
        back = place[keys - rows :, None] - place[None]
        seen = back >= 0
        if getattr(attn, "is_sliding", False):
            seen &= back < attn.sliding_window
        seen |= (group[keys - rows :, None] == group[None]) & (group[None] >= 0)
        return scores.masked_fill(~seen, -math.inf).softmax(-1)

    def _attend(
        self, layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: list[int]
    ) -> Any:
        q, k, v = self._project(layer, hidden, cos, sin)
        return self._softmax(layer, q, k, places), k, v

    def _queries(self, attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, and the gate of the output if the projection has twice as many rows."""
        q = attn.q_proj(x)
        if q.shape[-1] == attn.o_proj.in_features:
            return q, None
        heads = q.view(len(x), -1, 2, attn.head_dim)
        return heads[:, :, 0].flatten(1), heads[:, :, 1].flatten(1)

    def _finish(self, layer: Any, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        mixed = mixed.transpose(0, 1).flatten(1)
        _, gate = self._queries(layer.self_attn, layer.input_layernorm(hidden))
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        mixed = layer.self_attn.o_proj(mixed)
        if hasattr(layer, "post_self_attn_layernorm"):
            mixed = layer.post_self_attn_layernorm(mixed)
        elif hasattr(layer, "pre_feedforward_layernorm"):
            mixed = layer.post_attention_layernorm(mixed)
        return self._mlp(layer, hidden + mixed)

    def _mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        gemma = hasattr(layer, "pre_feedforward_layernorm")
        x = layer.pre_feedforward_layernorm(hidden) if gemma else layer.post_attention_layernorm(hidden)
        x = layer.mlp(x[None])[0]
        for name in ("post_mlp_layernorm", "post_feedforward_layernorm"):
            x = getattr(layer, name)(x) if hasattr(layer, name) else x
        return hidden + x

    def _recur(self, layer: Any, hidden: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """Gated DeltaNet, token by token. cache: the last inputs of the convolution, and the state."""
        net, x = layer.linear_attn, layer.input_layernorm(hidden)
        n, kernel = len(x), net.conv_kernel_size
        mixed = net.in_proj_qkv(x)
        past = cache[0] if cache else mixed.new_zeros(kernel - 1, mixed.shape[1])
        rows = torch.cat([past, mixed])
        taps = net.conv1d.weight[:, 0]
        mixed = torch.stack([(rows[t : t + kernel] * taps.T).sum(0) for t in range(n)])
        mixed = torch.nn.functional.silu(mixed)
        q, k, v = mixed.split([net.key_dim, net.key_dim, net.value_dim], -1)
        shared = net.num_v_heads // net.num_k_heads

        def unit(x: torch.Tensor) -> torch.Tensor:
            x = x.view(n, net.num_k_heads, -1).repeat_interleave(shared, 1)
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        q, k, v = unit(q) / math.sqrt(net.head_k_dim), unit(k), v.reshape(n, net.num_v_heads, -1)
        beta = net.in_proj_b(x).sigmoid()
        decay = (-net.A_log.exp() * torch.nn.functional.softplus(net.in_proj_a(x) + net.dt_bias)).exp()
        state = cache[1] if cache else v.new_zeros(net.num_v_heads, net.head_k_dim, net.head_v_dim)
        outputs = []
        for t in range(n):
            state = state * decay[t][:, None, None]
            told = (k[t][:, None] @ state)[:, 0]
            state = state + k[t][:, :, None] @ (beta[t][:, None] * (v[t] - told))[:, None]
            outputs.append((q[t][:, None] @ state)[:, 0])
        cache[:] = [rows[-(kernel - 1) :], state]
        gate = net.in_proj_z(x).view(-1, net.head_v_dim)
        return net.out_proj(net.norm(torch.stack(outputs).view(-1, net.head_v_dim), gate).view(n, -1))


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
        return [(float(f"{f:.6g}"), float(f"{tie:.9g}")) for f, tie in zip(fused, ties, strict=True)]

    return rule


def last_row_rule(look: Look) -> list[tuple[float, ...]]:
    """Attention of the last text row, mean over heads (what FastV reads)."""
    return [(float(look.weights.mean(0)[look.rows[-1], column]),) for column in look.columns]
