"""Prompts of random images on tiny models, made without our own prompt code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from PIL import Image

from radical_rerank.backbones import Backbone, Pixels
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.pruning import Layout, Profile
from tests.tiny import READABLE, TINY_FAMILIES, on_grid, tile_of, tiny_config, tiny_model

IMAGE, START, END, VOCABULARY = 255, 254, 253, 256
LAYERS = 8

# A curve with structure: no layer at exactly α = 0 or 1 except the sharpest.
PROFILE = Profile.measured("tiny", [0.95, 0.9, 0.97, 0.8, 0.7, 0.55, 0.75, 0.85], 1, "made up for tests")


def first_fast(values: Iterable[Any]) -> list[Any]:
    """Values to parametrise a test with: the first one runs always, the others only among the slow tests."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


def across(every: Sequence[tuple[Any, ...]], some: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters (family, *rest) for all families. All but the first family's are slow.

    The first six, and one decoder of each other kind, run with every rest. The others, which differ from them
    in their images, run with some.
    """
    return [
        pytest.param(family, *rest, marks=[pytest.mark.slow] if number else [])
        for number, family in enumerate(TINY_FAMILIES)
        for rest in (every if number < 6 or family in ("qwen3_5", "gemma3") else some)
    ]


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


MARK = 252
"""a row break, or a part of a tile's name"""
LLAVA = {1: ((24, 24), 4, 4), 2: ((12, 48), 2, 8)}
"""(height, width) of an image cut into this many tiles, and the rows and columns of their tokens; a half of
the second one's rows is padding"""


def rows_of(family: str, shape: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """How an image stands in a prompt: rows of (markup before, visual tokens, newlines, markup after)."""
    a, b = shape
    if family.startswith("llava"):
        _, height, width = LLAVA[min(a, 2)]
        return [(0, 16, 0, 0), *[(0, width, 1, 0)] * height]
    if family in ("smolvlm", "idefics3"):  # a name before each tile, and before the whole image
        return [(2, 16, 0, 1)] if a == 1 else [(2, 16, 0, 0), (2, 16, 0, 0), (3, 16, 0, 1)]
    if family == "mistral3":
        return [(0, b, 0, 1)] * a
    return [(0, a * b if on_grid(family) else 16 if family == "gemma3" else 16 * a, 0, 0)]


def pixels_of(family: str, images: list[tuple[int, int]], rng: torch.Generator) -> dict[str, Any]:
    """Random pixels for images of these shapes, as the model takes them."""
    side = tile_of(family)
    if family == "mistral3":
        sizes = torch.tensor([[16 * a, 16 * b] for a, b in images])
        pixels = torch.randn(len(images), 3, *sizes.amax(dim=0).tolist(), generator=rng)
        return {"pixel_values": pixels, "image_sizes": sizes}
    if on_grid(family):
        grid = torch.tensor([[1, 2 * a, 2 * b] for a, b in images])
        pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 8 * 8, generator=rng)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    if family.startswith("llava"):
        sizes = torch.tensor([LLAVA[min(a, 2)][0] for a, _ in images])
        return {
            "pixel_values": torch.randn(len(images), 3, 3, side, side, generator=rng),
            "image_sizes": sizes,
        }
    tiles = sum(a for a, _ in images)
    if family in ("smolvlm", "idefics3"):
        tiles = sum(len(rows_of(family, shape)) for shape in images)
        return {"pixel_values": torch.randn(1, tiles, 3, side, side, generator=rng)}
    tiles = len(images) if family == "gemma3" else tiles
    return {"pixel_values": torch.randn(tiles, 3, side, side, generator=rng)}


def make_case(
    family: str,
    shapes: list[tuple[int, int]],
    *,
    reference: tuple[int, int] | None = None,
    text: int = 9,
    seed: int = 0,
) -> Case:
    """shapes: per image its token grid, or (tiles, ignored) for families with tiles of 16 tokens."""
    rng = torch.Generator().manual_seed(seed)
    images = [*([reference] if reference else []), *shapes]
    ids = torch.randint(5, 50, (3,), generator=rng).tolist()
    spans, sizes, markup = [], [], list[tuple[int, range]]()
    for shape in images:
        ids += [*torch.randint(5, 50, (1,), generator=rng).tolist(), START]
        first = len(ids)
        for before, tokens, ends, after in rows_of(family, shape):
            ids += [MARK] * before
            row = range(len(ids), len(ids) + tokens)
            ids += [IMAGE] * (tokens + ends) + [MARK] * after
            places = [*range(row.start - before, row.start), *range(row.stop, row.stop + ends + after)]
            markup += [(place, row) for place in places]
        spans.append(range(first, len(ids)))
        sizes.append(sum(row[1] for row in rows_of(family, shape)))
        ids.append(END)
    after_images = len(ids)
    ids += torch.randint(5, 50, (text,), generator=rng).tolist()
    input_ids = torch.tensor([ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    inputs |= pixels_of(family, images, rng)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
    if family == "gemma3":
        inputs["token_type_ids"] = (input_ids == IMAGE).int()
    protected = (spans.pop(0),) if reference else ()
    # The query is the text but for its last two words; rows are all text after the images.
    query = tuple(range(after_images, len(ids) - 2))
    layout = Layout(len(ids), tuple(spans), query, protected, markup=tuple(markup))
    return Case(inputs, layout, sizes[len(protected) :])


def placed(family: str, stages: Iterable[tuple[int, str, float]]) -> list[tuple[int, str, float]]:
    """Where a family takes stages (layer, when, keep) that read attention; those that meet are one stage."""
    places: dict[tuple[int, str], float] = {}
    for layer, when, keep in stages:
        nearest = min(READABLE.get(family, range(LAYERS)), key=lambda other: abs(other - layer))
        places[nearest, when] = places.get((nearest, when), 1.0) * keep
    return [(layer, when, keep) for (layer, when), keep in places.items()]


def stack(cases: list[Case]) -> dict[str, Any]:
    """One batch of several prompts, padded on the left."""
    longest = max(case.layout.length for case in cases)
    batch: dict[str, Any] = {}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in cases[0].inputs:
            rows = [
                torch.nn.functional.pad(case.inputs[name], (longest - case.layout.length, 0))
                for case in cases
            ]
            batch[name] = torch.cat(rows)
    for name in ("pixel_values", "image_grid_thw", "image_sizes"):
        if name in cases[0].inputs:
            parts = [case.inputs[name] for case in cases]
            # Idefics has as many tiles for every prompt, and Pixtral one size: zeros fill them up.
            most = [max(part.shape[dim] for part in parts) for dim in range(1, parts[0].ndim)]
            fill = [[most[d - 1] - part.shape[d] for d in range(part.ndim - 1, 0, -1)] for part in parts]
            pads = [[n for size in own for n in (0, size)] for own in fill]
            batch[name] = torch.cat(
                [torch.nn.functional.pad(part, own) for part, own in zip(parts, pads, strict=True)]
            )
    return batch


def stock_pixels(family: str, pixels: Sequence[Pixels]) -> dict[str, Any]:
    """Preprocessed images as the stock model takes them."""
    values, grids = [p.values for p in pixels], torch.tensor([p.grid for p in pixels])
    if family in ("smolvlm", "idefics3"):
        return {"pixel_values": torch.cat(values)[None]}
    if not on_grid(family) and not family.startswith("llava"):
        return {"pixel_values": torch.cat(values)}
    if family.startswith("llava"):
        most = max(len(tiles) for tiles in values)
        padded = [torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 0, 0, most - len(v))) for v in values]
        return {"pixel_values": torch.stack(padded), "image_sizes": grids[:, 2:]}
    if family == "mistral3":
        height, width = grids.amax(dim=0).tolist()
        fill = [(0, width - v.shape[-1], 0, height - v.shape[-2]) for v in values]
        padded = [torch.nn.functional.pad(v, own) for v, own in zip(values, fill, strict=True)]
        return {"pixel_values": torch.cat(padded), "image_sizes": grids}
    return {"pixel_values": torch.cat(values), "image_grid_thw": grids}


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
