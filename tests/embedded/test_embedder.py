"""The first stage of the scenes model."""

from __future__ import annotations

import pytest
import torch

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.embedder import SceneEmbedder
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.embedded.scenes.world import COLOURS, SHAPES


def test_its_first_stage_is_late_interaction(embedded: Backbone) -> None:
    item = make_list("test", 3, 6)
    queries = ["a small red star left of a blue ring", "a green heart"]
    plain, paired = SceneEmbedder(embedded), SceneEmbedder(embedded, pairs=True)
    vectors = plain.embed_images(item.images)
    scores = plain.embed_queries(queries) @ vectors.T
    more = paired.embed_queries(queries) @ vectors.T - scores
    table = torch.nn.functional.normalize(embedded.model.get_input_embeddings().weight.detach(), dim=-1)

    def word(text: str) -> torch.Tensor:
        embedding: torch.Tensor = table[
            embedded.tokenizer(" " + text, add_special_tokens=False)["input_ids"][0]
        ]
        return embedding

    for row, query in enumerate(queries):
        words = query.split()
        for column, image in enumerate(item.images):
            (feature,) = embedded.encode([embedded.preprocess(image, 384)])
            tokens = torch.nn.functional.normalize(feature.tokens, dim=-1)
            expected = both = 0.0
            for i, name in enumerate(words):
                if name in (*COLOURS, *SHAPES, "small", "large", "left", "right", "top", "bottom"):
                    expected += max(float(t @ word(name)) for t in tokens)
                if name in COLOURS and words[i + 1] in SHAPES:
                    both += max(float(t @ word(name) + t @ word(words[i + 1])) for t in tokens)
            assert float(scores[row, column]) == pytest.approx(expected, abs=1e-4)
            assert float(more[row, column]) == pytest.approx(both, abs=1e-4)
