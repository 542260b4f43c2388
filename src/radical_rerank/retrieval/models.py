"""First stages from other libraries: dual encoders, and models of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones.model import fingerprint_of
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.reranking.encoding import ImageLike, load_image
from radical_rerank.retrieval.embedder import Embedder

EMBEDDERS = {
    "siglip2": "google/siglip2-base-patch16-512",
    "jina": "jinaai/jina-embeddings-v4",
    "qwen": "Qwen/Qwen3-VL-Embedding-2B",
}
"""The paper's three"""


class DualEncoder(Embedder):
    """SigLIP, SigLIP2, CLIP: a text and an image tower into one space; cosine."""

    def __init__(self, name: str, *, device: str | None = None, batch_size: int = 32) -> None:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

        self.name, self.batch_size = name, batch_size
        device = device or str(torch.accelerator.current_accelerator() or "cpu")
        try:
            self.model = AutoModel.from_pretrained(name).to(device).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.processor = AutoImageProcessor.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot load the embedder {name!r}: {str(error).splitlines()[0]}") from error
        if not hasattr(self.model, "get_text_features"):
            raise InputError(f"{name!r} has no text and image towers")

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    @torch.inference_mode()
    def embed_images(self, images: Sequence[ImageLike]) -> Tensor:
        rows = []
        for start in range(0, len(images), self.batch_size):
            part = enumerate(images[start : start + self.batch_size], start)
            pictures = [load_image(image, name=f"document {i}") for i, image in part]
            inputs = self.processor(pictures, return_tensors="pt").to(self.model.device)
            rows.append(_vectors(self.model.get_image_features(**inputs)))
        return torch.cat(rows) if rows else torch.zeros(0, 1)

    @torch.inference_mode()
    def embed_queries(self, queries: Sequence[str]) -> Tensor:
        rows = []
        length = self.model.config.text_config.max_position_embeddings
        for start in range(0, len(queries), self.batch_size):
            inputs = self.tokenizer(
                list(queries[start : start + self.batch_size]),
                padding="max_length",  # as these towers were trained
                max_length=length,
                truncation=True,
                return_tensors="pt",
            ).to(self.model.device)
            known = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
            if self.model.config.model_type.startswith("siglip"):
                known.pop("attention_mask", None)  # SigLIP attends to its padding
            rows.append(_vectors(self.model.get_text_features(**known)))
        return torch.cat(rows) if rows else torch.zeros(0, 1)


def _vectors(output: Any) -> Tensor:
    vectors = output if isinstance(output, Tensor) else output.pooler_output
    return normalize(vectors.float(), dim=-1).cpu()


class SentenceEmbedder(Embedder):
    """Embeds with a model of sentence-transformers: Jina v4, Qwen3-VL-Embedding … (extra `[retrieval]`)."""

    def __init__(self, name: str, *, device: str | None = None, batch_size: int = 16, **options: Any) -> None:
        with needs_extra("retrieval"):
            from sentence_transformers import SentenceTransformer
        self.name, self.batch_size = name, batch_size
        try:
            self.model = SentenceTransformer(name, device=device, **options)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot load the embedder {name!r}: {str(error).splitlines()[0]}") from error

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    def embed_images(self, images: Sequence[ImageLike]) -> Tensor:
        return self._encode([load_image(image, name=f"document {i}") for i, image in enumerate(images)])

    def embed_queries(self, queries: Sequence[str]) -> Tensor:
        return self._encode(list(queries))

    def _encode(self, inputs: list[Any]) -> Tensor:
        vectors: Tensor = self.model.encode(
            inputs,
            batch_size=self.batch_size,
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return vectors.float().cpu()


def embedder_of(name: str) -> Embedder:
    """Load an embedder by name: "siglip2", "jina" (runs code from its repository), "qwen", or any model id.

    A model id with "siglip" or "clip" in it is loaded as a dual encoder, any other by sentence-transformers.
    """
    model = EMBEDDERS.get(name, name)
    if any(kind in model.lower() for kind in ("siglip", "clip")):
        return DualEncoder(model)
    options: dict[str, Any] = {"trust_remote_code": True} if name == "jina" else {}
    return SentenceEmbedder(model, **options)
