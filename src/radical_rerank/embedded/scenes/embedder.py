"""The scenes model's own first stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.world import COLOURS, PLACES, SHAPES, SIZES
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, Document, load_image


class SceneEmbedder:
    """The embedded model's own first stage: late interaction of words and visual tokens.

    A picture is, for every attribute word w, how close its best token is to it, v_w = max_t cos(x_t, e_w); a
    query is which words it names. Their dot product sums, over what is named, the best token's similarity:
    which colour goes with which shape it does not know, as first stages often do not. No decoder runs.

    pairs: for every colour next to a shape, also how close the best token is to both
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        words: bool = True,
        pairs: bool = False,
        max_image_tokens: int = MAX_IMAGE_TOKENS,
        batch_size: int = 64,
    ) -> None:
        self.name = "scenes" + ("" if words else "-pairs") + ("-and-pairs" if words and pairs else "")
        self.backbone = backbone
        self.max_image_tokens, self.batch_size = max_image_tokens, batch_size
        self.words = [*COLOURS, *SHAPES, *SIZES, *PLACES]
        sizes = [len(self.words), len(COLOURS) * len(SHAPES)]
        self._mask = torch.tensor([float(words), float(pairs)]).repeat_interleave(torch.tensor(sizes))
        ids = [
            backbone.tokenizer(" " + word, add_special_tokens=False)["input_ids"][0] for word in self.words
        ]
        self._embeddings = normalize(backbone.model.get_input_embeddings().weight.detach()[ids], dim=-1)

    def embed_images(self, images: Sequence[Document]) -> Tensor:
        rows = []
        for start in range(0, len(images), self.batch_size):
            batch = [
                load_image(image, name=f"document {start + i}")
                for i, image in enumerate(images[start : start + self.batch_size])
            ]
            pixels = [self.backbone.preprocess(image, self.max_image_tokens) for image in batch]
            rows += [self._vector(feature.tokens) for feature in self.backbone.encode(pixels)]
        return torch.stack(rows) if rows else torch.zeros(0, self._size)

    def embed_queries(self, queries: Sequence[str]) -> Tensor:
        rows = torch.zeros(len(queries), self._size)
        for row, query in zip(rows, queries, strict=True):
            known = query.lower().split()
            for word in known:
                if word in self.words:
                    row[self.words.index(word)] += 1
            for colour, shape in pairwise(known):
                if colour in COLOURS and shape in SHAPES:
                    row[len(self.words) + COLOURS.index(colour) * len(SHAPES) + SHAPES.index(shape)] += 1
        return rows * self._mask

    @property
    def _size(self) -> int:
        return len(self.words) + len(COLOURS) * len(SHAPES)

    def _vector(self, tokens: Tensor) -> Tensor:
        cosine = (normalize(tokens.float(), dim=-1) @ self._embeddings.float().T).cpu()
        colours, shapes = cosine[:, : len(COLOURS)], cosine[:, len(COLOURS) : len(COLOURS) + len(SHAPES)]
        pairs = (colours[:, :, None] + shapes[:, None]).flatten(1)
        return torch.cat([cosine.amax(0), pairs.amax(0)])
