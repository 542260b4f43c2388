"""Stage A: teaches the vision encoder to describe each cell in the space of the word embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from radical_rerank.embedded.scenes.drawing import Scene, random_background, render, shrink
from radical_rerank.embedded.scenes.lists import compose_scene, place_things, stream
from radical_rerank.embedded.scenes.training.batches import (
    GROUPS,
    OTHER_WORDS,
    SHRINK,
    encode_images,
    label_cells,
)
from radical_rerank.embedded.scenes.training.model import word_ids
from radical_rerank.embedded.scenes.world import ATTRIBUTE_WORDS, COLOURS, SHAPES, Thing

TOKEN_NORM = 1.5
"""the mean norm of visual tokens after stage A; words have about 1"""


def crowded_scene(split: str, seed: int) -> Scene:
    """Draw a scene of many small things and perhaps a large one, to learn much from one picture."""
    rng = stream(split, 9, seed)
    large = []
    if rng.random() < 0.6:
        slot = (int(rng.integers(3)), int(rng.integers(3)))
        large = [Thing(str(rng.choice(SHAPES)), str(rng.choice(COLOURS)), "large", slot)]
    small = [
        Thing(str(rng.choice(SHAPES)), str(rng.choice(COLOURS)), "small", (0, 0))
        for _ in range(int(rng.integers(4, 9)))
    ]
    return compose_scene(
        rng, split, place_things(rng, large, small, same_layout=True), random_background(rng)
    )


def alignment_loss(
    tokens: Tensor, embedding: Tensor, labels: Tensor, dominant: Tensor, kinds: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of the visual tokens of M cells, and the accuracy of each kind of attribute.

    The cosine with words that a cell shows is pulled to 0.42 (five orthogonal words can have 0.447 each). The
    cosine with words that it does not show is pulled to just above 0: relevance is max(cos, 0) and should not
    vanish.

    Args:
        tokens: (M, d)
        embedding: (words, d)
        labels: (M, words) 1 if the cell shows it, 0 if not, -1 if unclear
        dominant: (M,) the thing that the cell shows most, -1 for none
        kinds: (M, 3) the numbers of that thing's colour, shape and size
    """
    cosine = normalize(tokens, dim=-1) @ normalize(embedding, dim=-1).T
    shown, absent = labels == 1, labels == 0
    positive = ((0.42 - cosine[shown]).clamp(min=0) ** 2).mean()
    negative = ((cosine[absent] - 0.04) ** 2).mean()
    has = dominant >= 0
    loss = 4 * positive + 6 * negative
    facts = {}
    for column, (name, group) in enumerate(GROUPS.items()):
        logits = 12 * cosine[has][:, group]
        loss = loss + cross_entropy(logits, kinds[has, column])
        facts[name] = float((logits.argmax(-1) == kinds[has, column]).float().mean())
    return loss, facts


def alignment_batch(model: Any, tokenizer: Any, scenes: Sequence[Scene]) -> tuple[Tensor, dict[str, float]]:
    """Return the alignment loss of these scenes, and facts for the log.

    Every eighth picture is scaled down, so that the encoder learns to read small pictures, too.
    """
    pictures = [render(scene) for scene in scenes]
    for number in range(0, len(pictures), 8):
        pictures[number] = shrink(*pictures[number], SHRINK[number // 8 % len(SHRINK)])
    tokens, _, _ = encode_images(model, [image for image, _ in pictures])
    labels, dominant, kinds = [], [], []
    for scene, (_, cover) in zip(scenes, pictures, strict=True):
        cells = label_cells(scene.things, cover)
        labels.append(cells.words)
        dominant.append(cells.dominant)
        numbers = torch.tensor(
            [(COLOURS.index(t.colour), SHAPES.index(t.shape), int(t.size == "large")) for t in scene.things]
        )
        kinds.append(numbers[cells.dominant.clamp(min=0)])
    embedding = model.get_input_embeddings()(word_ids(tokenizer, [*ATTRIBUTE_WORDS, *OTHER_WORDS]))
    shown = torch.nn.functional.pad(torch.cat(labels), (0, len(OTHER_WORDS)))
    return alignment_loss(torch.cat(list(tokens)), embedding, shown, torch.cat(dominant), torch.cat(kinds))


def rescale_tokens(model: Any, scenes: Sequence[Scene]) -> None:
    """Scale the encoder's last layer so that the visual tokens of these scenes have a mean norm of 1.5."""
    with torch.no_grad():
        tokens, _, _ = encode_images(model, [render(scene)[0] for scene in scenes])
        factor = TOKEN_NORM / float(torch.cat(list(tokens)).norm(dim=-1).mean())
        last = model.model.visual.merger.linear_fc2
        last.weight.mul_(factor)
        last.bias.mul_(factor)
