"""The first stage of the photos model: the vision tower's embedding of a picture, and a bag of words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones import Backbone
from radical_rerank.backbones.model import base_model
from radical_rerank.embedded.photos import PLAIN, SCALE, WORD_DIMS
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, ImageLike, enough_side, load_image


class PhotoEmbedder:
    """Embeds pictures and queries in the space of the word embeddings.

    A picture's vector is the tower's class token behind the projector. A query's vector is the sum of its
    word embeddings, weighted by how much each word says about pictures. Both have norm 1.

    Args:
        backbone: the photos model
        batch_size: pictures that are encoded together
    """

    name = "photos"

    def __init__(self, backbone: Backbone, *, batch_size: int = 16) -> None:
        self.backbone, self.batch_size = backbone, batch_size

    @property
    def fingerprint(self) -> str:
        """The model's."""
        return self.backbone.fingerprint

    @torch.inference_mode()
    def embed_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Return one row per image."""
        base, side = base_model(self.backbone.model), enough_side(MAX_IMAGE_TOKENS)
        rows = []
        for start in range(0, len(images), self.batch_size):
            batch = [
                load_image(image, name=f"document {start + i}", side=side)
                for i, image in enumerate(images[start : start + self.batch_size])
            ]
            pixels = [self.backbone.preprocess(image, MAX_IMAGE_TOKENS).values for image in batch]
            states = base.vision_tower(torch.cat(pixels).to(base.device, base.dtype)).last_hidden_state
            rows.append(base.multi_modal_projector(states[:, 0])[:, :WORD_DIMS].float().cpu())
        return normalize(torch.cat(rows), dim=-1) if rows else torch.zeros(0, WORD_DIMS)

    def embed_queries(self, queries: Sequence[str]) -> Tensor:
        """Return one row per query."""
        table = self.backbone.model.get_input_embeddings().weight.detach()
        rows = torch.zeros(len(queries), WORD_DIMS)
        for row, query in zip(rows, queries, strict=True):
            ids = self.backbone.tokenizer(query, add_special_tokens=False, split_special_tokens=True)
            words = table[torch.tensor(ids["input_ids"])].float().cpu()
            weight = 1 - words[:, PLAIN] / SCALE
            row += weight @ normalize(words[:, :WORD_DIMS], dim=-1)
        return normalize(rows, dim=-1)
