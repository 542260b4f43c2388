"""The tokenizer, the patches and the packed prompts of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from radical_rerank import Reranker
from radical_rerank.embedded.packing import Packed
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.embedded.scenes.training.batches import (
    collate,
    encode_images,
    label_cells,
    patchify,
)
from radical_rerank.embedded.scenes.training.losses import forward
from radical_rerank.embedded.scenes.training.model import (
    TEMPLATE,
    make_config,
    make_image_processor,
    make_model,
    make_tokenizer,
)
from radical_rerank.embedded.scenes.training.prompts import Packer
from radical_rerank.embedded.scenes.world import ATTRIBUTE_WORDS, Thing
from radical_rerank.embedded.training import save_model


def test_cell_labels() -> None:
    things = (Thing("star", "red", "small", (0, 0)), Thing("ring", "blue", "large", (2, 2)))
    cover = np.zeros((2, 2, 2), dtype=np.float32)
    cover[0, 0] = [0.5, 0.08]
    cover[1, 1] = [0.0, 0.9]
    labels = label_cells(things, cover)
    assert labels.dominant.tolist() == [0, -1, -1, 1]

    def shown(cell: int, value: int) -> set[str]:
        return {ATTRIBUTE_WORDS[i] for i in (labels.words[cell] == value).nonzero()[:, 0].tolist()}

    assert shown(0, 1) == {"red", "star", "small", "left", "top"}
    assert shown(1, -1) == {"red", "star", "small", "left", "top"}
    assert shown(2, 1) == shown(2, -1) == set()
    assert shown(3, 1) == {"blue", "ring", "large", "right", "bottom"}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    model = make_model(make_config(tokenizer), seed=3)
    with torch.no_grad():  # the first weights are zero where layers write: give them something to say
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=0.05)
    folder = tmp_path_factory.mktemp("embedded")
    save_model(folder, model, tokenizer, make_image_processor(), TEMPLATE)
    return folder


def test_words_and_identifiers_are_different_tokens(untrained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(untrained)
    tokens = tokenizer.convert_ids_to_tokens
    assert tokens(tokenizer("query: A small Red star left of a ring answer:a")["input_ids"]) == [
        "query", ":", "▁a", "▁small", "▁red", "▁star", "▁left", "▁of", "▁a", "▁ring", "▁answer", ":", "a",
    ]  # fmt: skip
    assert tokens(tokenizer(" a zebra")["input_ids"]) == ["▁a", "<unk>"]
    for seed in range(40):
        text = " " + make_list("train", seed, 4).descriptions[0].text()
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_patches_are_the_image_processor_s(untrained: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(untrained)
    for image in make_list("train", 2, 8).images:
        patches, grid = patchify(image)
        batch = processor([image], return_tensors="np")
        assert batch["image_grid_thw"][0].tolist() == list(grid)
        np.testing.assert_allclose(batch["pixel_values"], patches, atol=1e-5)


def test_packed_queries_score_as_single_prompts_do(untrained: Path) -> None:
    """Many queries behind one set of images, under the block mask, against the Reranker."""
    reranker = Reranker.from_pretrained(untrained, "dense")
    model, tokenizer = reranker.backbone.model, reranker.backbone.tokenizer
    lists = [make_list("test", 3, 5, queries=4), make_list("test", 4, 3, queries=2)]
    packer = Packer(model, tokenizer)
    rng_in_order = type("InOrder", (), {"random": lambda self: 0.0})()
    prompts: list[Packed] = []
    images: list[Image.Image] = []
    for item in lists:
        prompts.append(packer.pack_list(item, len(images), rng_in_order))
        images += item.images
    with torch.no_grad():
        batch = collate(model, prompts, *encode_images(model, images))
        states = forward(model, batch)
    asked = [(item, d) for item in lists for d in item.descriptions]
    for (item, description), (b, start, ask) in zip(asked, batch.asks, strict=True):
        ours = model.lm_head(states[-1][b, start + len(ask.ids) - 1])[ask.choices].log_softmax(-1)
        ranking = reranker.rank(description.text(), item.images)
        theirs = torch.tensor([score for _, score in sorted((r.index, r.score) for r in ranking)])
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        for row, tokens, has, words in ask.looks:
            assert tokenizer.convert_ids_to_tokens(ask.ids[row])[1:] in description.text().split()
            assert tokens
            assert ask.answer in has
            assert words


def test_the_answer_may_be_that_nothing_matches(untrained: Path) -> None:
    """A list with gaps asks for the token that the Reranker reads as `none`."""
    reranker = Reranker.from_pretrained(untrained, "dense")
    model, tokenizer = reranker.backbone.model, reranker.backbone.tokenizer
    packer = Packer(model, tokenizer)
    whole = make_list("test", 3, 6, queries=4)
    item = whole.without([whole.targets[0]])
    rng_in_order = type("InOrder", (), {"random": lambda self: 0.0})()
    packed = packer.pack_list(item, 0, rng_in_order, none=True)
    assert [ask.kind for ask in packed.asks] == ["none" if t < 0 else "list" for t in item.targets]
    assert all(ask.choices[-1] == packer.none for ask in packed.asks)
    assert all((ask.answer == packer.none) == (ask.kind == "none") for ask in packed.asks)
    with torch.no_grad():
        batch = collate(model, [packed], *encode_images(model, item.images))
        b, start, ask = batch.asks[0]
        logits = model.lm_head(forward(model, batch)[-1][b, start + len(ask.ids) - 1])
    ours = logits[ask.choices[:-1]].logsumexp(-1) - logits[packer.none]
    ranking = reranker.rank(item.descriptions[0].text(), item.images)
    assert ranking.signals["match"] == pytest.approx(float(ours), abs=1e-4)
