"""The first stage of the scenes model: its vision encoder and its word embeddings, without the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.world import ATTRIBUTE_WORDS, COLOURS, SHAPES
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, ImageLike, load_image


class SceneEmbedder:
    """Embeds pictures and queries by late interaction of words and visual tokens.

    A picture's vector has one entry per attribute word w: the cosine of the word with the visual token
    nearest to it, v_w = max_t cos(x_t, e_w). A query's vector counts the words in it. Their dot product sums
    the cosines of the query's words. It does not see which colour belongs to which shape.

    Args:
        backbone: the scenes model
        words: use the entries of single words
        pairs: add an entry for each colour next to a shape: the largest sum of a token's two cosines
        max_image_tokens: larger images are scaled down to this many visual tokens
        batch_size: pictures that are encoded together

    Example:
        >>> from radical_rerank.embedded.scenes.lists import make_list
        >>> item = make_list("test", 1, 4)
        >>> embedder = SceneEmbedder(Backbone.from_pretrained("scenes"))
        >>> queries = embedder.embed_queries([item.descriptions[0].text()])
        >>> scores = queries @ embedder.embed_images(item.images).T
        >>> scores.shape, int(scores.argmax()) == item.targets[0]
        (torch.Size([1, 4]), True)
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
        sizes = [len(ATTRIBUTE_WORDS), len(COLOURS) * len(SHAPES)]
        self._mask = torch.tensor([float(words), float(pairs)]).repeat_interleave(torch.tensor(sizes))
        encode = backbone.tokenizer
        ids = [encode(" " + word, add_special_tokens=False)["input_ids"][0] for word in ATTRIBUTE_WORDS]
        self._embeddings = normalize(backbone.model.get_input_embeddings().weight.detach()[ids], dim=-1)

    @property
    def fingerprint(self) -> str:
        """The model's."""
        return self.backbone.fingerprint

    def embed_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Return one row per image."""
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
        """Return one row per query."""
        rows = torch.zeros(len(queries), self._size)
        for row, query in zip(rows, queries, strict=True):
            words = query.lower().split()
            for word in words:
                if word in ATTRIBUTE_WORDS:
                    row[ATTRIBUTE_WORDS.index(word)] += 1
            for colour, shape in pairwise(words):
                if colour in COLOURS and shape in SHAPES:
                    row[len(ATTRIBUTE_WORDS) + COLOURS.index(colour) * len(SHAPES) + SHAPES.index(shape)] += 1
        return rows * self._mask

    @property
    def _size(self) -> int:
        return len(ATTRIBUTE_WORDS) + len(COLOURS) * len(SHAPES)

    def _vector(self, tokens: Tensor) -> Tensor:
        cosine = (normalize(tokens.float(), dim=-1) @ self._embeddings.float().T).cpu()
        colours, shapes = cosine[:, : len(COLOURS)], cosine[:, len(COLOURS) : len(COLOURS) + len(SHAPES)]
        pairs = (colours[:, :, None] + shapes[:, None]).flatten(1)
        return torch.cat([cosine.amax(0), pairs.amax(0)])
