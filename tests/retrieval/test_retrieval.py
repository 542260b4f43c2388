"""First stages of other people's making, on tiny models of the true architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from radical_rerank.errors import InputError
from radical_rerank.lab.bench.models import bench_tokenizer as tiny_tokenizer
from radical_rerank.retrieval import DualEncoder, SentenceEmbedder, embedder_of, nearest, search


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel

    folder = tmp_path_factory.mktemp("first") / "siglip2-tiny"
    tokenizer = tiny_tokenizer()
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = SiglipModel(
        SiglipConfig(
            text_config={
                **size,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 16,
                "projection_size": 32,
            },
            vision_config={**size, "image_size": 32, "patch_size": 8},
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_a_dual_encoder_gives_unit_vectors_of_one_space(siglip: Path) -> None:
    embedder = embedder_of(str(siglip))
    assert isinstance(embedder, DualEncoder)
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
    images = embedder.embed_images(pictures)
    queries = embedder.embed_queries(["a red circle", "a green star"])
    assert images.shape == (3, 32)
    assert queries.shape == (2, 32)
    torch.testing.assert_close(images.norm(dim=-1), torch.ones(3))
    # Batches do not matter, and the model's own forward pass agrees.
    embedder.batch_size = 1
    torch.testing.assert_close(embedder.embed_images(pictures), images, atol=1e-5, rtol=0)
    torch.testing.assert_close(embedder.embed_queries(["a green star"])[0], queries[1], atol=1e-5, rtol=0)
    text = embedder.tokenizer(["a red circle"], padding="max_length", max_length=16, return_tensors="pt")
    pixels = embedder.processor(pictures, return_tensors="pt")
    with torch.no_grad():
        output = embedder.model(input_ids=text["input_ids"], pixel_values=pixels["pixel_values"])
    torch.testing.assert_close(output.image_embeds, images, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.text_embeds[0], queries[0], atol=1e-5, rtol=0)
    fingerprint = embedder_of(str(siglip)).fingerprint
    assert embedder.fingerprint == fingerprint
    with torch.no_grad():
        embedder.model.logit_scale.add_(1)
    assert embedder.fingerprint != fingerprint


@pytest.mark.slow
def test_what_is_no_embedder_is_named(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="cannot load the embedder"):
        DualEncoder(str(tmp_path / "clip-none"))
    pytest.importorskip("sentence_transformers", reason="an extra")
    with pytest.raises(InputError, match="cannot load the embedder"):
        SentenceEmbedder(str(tmp_path / "none"))


@pytest.mark.slow
def test_sentence_transformers_models(siglip: Path) -> None:
    """A two-tower model through sentence-transformers gives the same vectors as by hand."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="an extra")
    assert sentence_transformers
    embedder = SentenceEmbedder(str(siglip))
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green")]
    images, queries = embedder.embed_images(pictures), embedder.embed_queries(["a red circle"])
    assert images.shape[0] == 2
    assert queries.shape == (1, images.shape[1])
    torch.testing.assert_close(images.norm(dim=-1), torch.ones(2))
    fingerprint = embedder.fingerprint
    with torch.no_grad():
        next(embedder.model.parameters()).add_(1)
    assert embedder.fingerprint != fingerprint


def test_faiss_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss", reason="an extra")
    draw = torch.Generator().manual_seed(1)
    queries, gallery = torch.randn(9, 8, generator=draw), torch.randn(200, 8, generator=draw)
    plain = nearest(queries, gallery, 7)
    monkeypatch.setattr(search, "FAISS_FROM", 1)
    fast = nearest(queries, gallery, 7)
    assert torch.equal(plain[1], fast[1])
    torch.testing.assert_close(plain[0], fast[0])
