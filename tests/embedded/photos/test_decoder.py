"""The decoder ranks before any training: its first weights are a circuit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.embedded.packing import last_rows
from radical_rerank.embedded.photos import PICTURE, SCALE, WORD_DIMS
from radical_rerank.embedded.photos.training.decoder import (
    FLAG,
    VISUAL,
    in_decoder_units,
    start_decoder,
    step_of,
)
from radical_rerank.embedded.photos.training.lists import Packer
from radical_rerank.embedded.photos.training.model import (
    CELLS,
    SPECIAL,
    TOWER,
    make_config,
    make_model,
    make_tokenizer,
)
from radical_rerank.embedded.photos.training.sources import START, Words, class_names, minilm_words

COUNT = 20


class World:
    """A model whose words are random directions, and pictures whose cells are words or noise."""

    def __init__(self) -> None:
        names = sorted({token for name in class_names() for token in name.lower().split() if token.isalpha()})
        draw = torch.Generator().manual_seed(0)
        vectors = normalize(torch.randn(len(names), WORD_DIMS, generator=draw), dim=-1)
        self.words = Words(
            ["##a", "▁the", *(START + name for name in names)], torch.cat([vectors[:2].flip(1), vectors])
        )
        weights = [0.05, 0.05, *[1.0] * len(names)]
        self.tokenizer = make_tokenizer(self.words)
        self.model: Any = make_model(make_config(self.tokenizer), self.words, weights, seed=0)
        start_decoder(self.model, self.tokenizer, torch.ones(len(self.tokenizer)), norm=1.0)
        self.packer = Packer(self.tokenizer)

    def picture(self, rng: np.random.Generator, shown: list[int]) -> Tensor:
        noise = torch.from_numpy(rng.standard_normal((CELLS, WORD_DIMS))).float()
        tokens = torch.zeros(CELLS, 256)
        tokens[:, :WORD_DIMS] = SCALE * normalize(noise, dim=-1)
        for cell, word in zip(1 + rng.permutation(CELLS - 1), shown, strict=False):
            tokens[cell, :WORD_DIMS] = SCALE * self.words.vectors[word]
        tokens[:, VISUAL] = FLAG
        tokens[0, PICTURE] = SCALE / 2
        return tokens

    def logits(self, tokens: Tensor, queries: list[tuple[list[int], int]], names: list[int]) -> Tensor:
        ids, positions, mask, asks = self.packer.rows([self.packer.pack(range(len(tokens)), names, queries)])
        embeds = self.model.get_input_embeddings()(ids)
        embeds = embeds.masked_scatter((ids == self.packer.image)[..., None], tokens)
        with torch.inference_mode():
            states = self.model.model.language_model(
                inputs_embeds=embeds, position_ids=positions[0], attention_mask=mask, use_cache=False
            ).last_hidden_state
            logits: Tensor = self.model.lm_head(last_rows(states, asks))
        return logits


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def drawn(world: World, seed: int) -> tuple[Tensor, list[int], int]:
    """One list: the match shows all three words of the query, every other candidate shows two of them."""
    rng = np.random.default_rng(seed)
    wanted = [int(n) for n in rng.permutation(np.arange(2, len(world.words.tokens)))[:3]]
    target = int(rng.integers(COUNT))
    pictures = [
        world.picture(rng, wanted if place == target else [wanted[n] for n in rng.permutation(3)[:2]])
        for place in range(COUNT)
    ]
    return torch.stack(pictures), [len(SPECIAL) + word for word in wanted], target


def test_the_candidate_that_has_all_words_comes_first(world: World) -> None:
    right = 0
    for seed in range(6):
        tokens, query, target = drawn(world, seed)
        names = world.packer.letters[seed : seed + COUNT]
        logits = world.logits(tokens, [(query, target)], names)[0]
        right += int(logits[names].argmax()) == target
        assert int(logits.argmax()) in names, "the answer is an identifier of the list"
    assert right >= 5


def test_the_picture_that_is_like_the_whole_query_comes_first(world: World) -> None:
    """The candidates differ in nothing but the token of the whole picture."""
    right = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        wanted = [int(n) for n in rng.permutation(np.arange(2, len(world.words.tokens)))[:3]]
        target = int(rng.integers(COUNT))
        tokens = world.picture(rng, []).repeat(COUNT, 1, 1)
        noise = torch.from_numpy(rng.standard_normal((COUNT, WORD_DIMS))).float()
        pictures = normalize(noise, dim=-1)
        pictures[target] = normalize(pictures[target] + world.words.vectors[wanted].sum(dim=0), dim=-1)
        tokens[:, 0, :WORD_DIMS] = SCALE * pictures
        names = world.packer.letters[:COUNT]
        query = [len(SPECIAL) + word for word in wanted]
        right += int(world.logits(tokens, [(query, target)], names)[0, names].argmax()) == target
    assert right >= 5


def test_a_packed_query_gets_the_answer_of_one_that_is_alone(world: World) -> None:
    tokens, query, target = drawn(world, 9)
    names = world.packer.letters[:COUNT]
    other = [query[0], len(SPECIAL) + 1]
    packed = world.logits(tokens, [(other, 0), (query, target)], names)
    alone = world.logits(tokens, [(query, target)], names)
    torch.testing.assert_close(packed[1], alone[0], atol=1e-3, rtol=1e-3)


def test_tokens_of_the_alignment_are_scaled_as_the_projector_is(world: World) -> None:
    config = make_config(world.tokenizer, num_layers=6)
    model = make_model(config, world.words, [1.0] * len(world.words.tokens), seed=1)
    states = torch.randn(1, 5, TOWER, generator=torch.Generator().manual_seed(2))
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        before = projector(states)
        start_decoder(model, world.tokenizer, torch.ones(len(world.tokenizer)), norm=2.5)
        after = projector(states)
    torch.testing.assert_close(in_decoder_units(before, 2.5), after, atol=1e-4, rtol=1e-4)


def test_an_identifier_is_no_word() -> None:
    tokenizer = make_tokenizer(minilm_words(WORD_DIMS))
    packer = Packer(tokenizer)
    assert len(set(packer.letters)) == 52

    def tokens(text: str, **options: bool) -> list[str]:
        ids = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]

    assert tokens("A<img></img>a<img>") == ["A", "<img>", "</img>", "a", "<img>"]
    plain = tokens("A dog and a T-shirt <img>", split_special_tokens=True)
    assert plain[:7] == ["▁a", "▁dog", "▁and", "▁a", "▁t", "-", "▁shirt"]
    assert not {"A", "a", "t", "<img>"} & set(plain)
    assert "[UNK]" not in tokens("a cyan kayak, 3 zebras & qxz", split_special_tokens=True)


def test_every_step_has_its_layers() -> None:
    steps = [step_of(layer, 12) for layer in range(12)]
    assert steps == ["bind", "gather", *["look"] * 6, "read", "read", "answer", "answer"]
    assert [step_of(layer, 6) for layer in range(6)] == ["bind", "gather", "read", "read", "answer", "answer"]
