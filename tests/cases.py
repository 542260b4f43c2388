"""Prompts of random images on tiny models, made without our own prompt code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from PIL import Image

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.pruning import Layout, Profile
from tests.tiny import tile_of, tiny_config, tiny_model

IMAGE, START, END, VOCABULARY = 255, 254, 253, 256
LAYERS = 8

# A curve with structure: no layer at exactly α = 0 or 1 except the sharpest.
PROFILE = Profile.measured("tiny", [0.95, 0.9, 0.97, 0.8, 0.7, 0.55, 0.75, 0.85], 1, "made up for tests")


def first_fast(values: Iterable[Any]) -> list[Any]:
    """Values to parametrise a test with: the first one runs always, the others only among the slow tests."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


def keep_profile(backbone: Backbone, profile: Profile = PROFILE) -> Profile:
    """Put a profile of this model into the cache, as if it had been measured."""
    profile = replace(profile, model=backbone.name, fingerprint=backbone.fingerprint)
    profile.save(Profile.cache_path(backbone.identity))
    return profile


@lru_cache(maxsize=32)
def model_of(family: str, attention: str = "sdpa", num_layers: int = LAYERS) -> Any:
    return tiny_model(
        tiny_config(family, num_layers=num_layers, vocabulary=VOCABULARY),
        seed=1,
        attn_implementation=attention,
    )


@dataclass
class Case:
    """Inputs of one prompt and where things are in it."""

    inputs: dict[str, Any]
    layout: Layout
    sizes: list[int]

    @property
    def ids(self) -> list[int]:
        return self.inputs["input_ids"][0].tolist()


def make_case(
    family: str,
    shapes: list[tuple[int, int]],
    *,
    reference: tuple[int, int] | None = None,
    text: int = 9,
    seed: int = 0,
) -> Case:
    """shapes: per image its token grid (Qwen), or (tiles, ignored) for InternVL, 16 tokens a tile."""
    rng = torch.Generator().manual_seed(seed)
    images = [*([reference] if reference else []), *shapes]
    intern = family.startswith("internvl")
    sizes = [16 * a if intern else a * b for a, b in images]
    ids = torch.randint(5, 50, (3,), generator=rng).tolist()
    spans = []
    for size in sizes:
        ids += [*torch.randint(5, 50, (1,), generator=rng).tolist(), START]
        spans.append(range(len(ids), len(ids) + size))
        ids += [IMAGE] * size + [END]
    after = len(ids)
    ids += torch.randint(5, 50, (text,), generator=rng).tolist()
    input_ids = torch.tensor([ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if intern:
        tiles = sum(a for a, _ in images)
        inputs["pixel_values"] = torch.randn(tiles, 3, tile_of(family), tile_of(family), generator=rng)
    else:
        grid = torch.tensor([[1, 2 * a, 2 * b] for a, b in images])
        inputs["pixel_values"] = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 8 * 8, generator=rng)
        inputs["image_grid_thw"] = grid
        inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
    protected = (spans.pop(0),) if reference else ()
    # The query is the text but for its last two words; rows are all text after the images.
    layout = Layout(len(ids), tuple(spans), tuple(range(after, len(ids) - 2)), protected)
    return Case(inputs, layout, [len(span) for span in spans])


def stack(cases: list[Case]) -> dict[str, Any]:
    """One batch of several prompts, padded on the left."""
    longest = max(case.layout.length for case in cases)
    batch: dict[str, Any] = {}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in cases[0].inputs:
            rows = [
                torch.nn.functional.pad(case.inputs[name], (longest - case.layout.length, 0))
                for case in cases
            ]
            batch[name] = torch.cat(rows)
    for name in ("pixel_values", "image_grid_thw"):
        if name in cases[0].inputs:
            batch[name] = torch.cat([case.inputs[name] for case in cases])
    return batch


def draw_list(seed: int, count: int) -> tuple[str, list[Image.Image]]:
    """A query and generated scenes."""
    item = make_list("train", seed, count, similarity=0.3)
    return item.descriptions[0].text(), item.images


def hooks_on(model: torch.nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@torch.no_grad()
def greedy(model: Any, inputs: dict[str, Any], steps: int) -> list[torch.Tensor]:
    """Logits after the prompt and each greedy token, by the model's own generate()."""
    output = model.generate(
        **inputs,
        max_new_tokens=steps + 1,
        min_new_tokens=steps + 1,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [logits[0] for logits in output.logits]
