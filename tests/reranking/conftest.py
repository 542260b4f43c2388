from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radical_rerank.backbones import Backbone
from tests.tiny import pair_tokenizer, write_tiny


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models that know the words of the trained rerankers, with a head like jina-reranker-m0's."""
    root = tmp_path_factory.mktemp("pairs")
    folders = {}
    for family in ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5"):
        folder = write_tiny(root / family, family, tokenizer=pair_tokenizer())
        draw = torch.Generator().manual_seed(7)
        weights = load_file(folder / "model.safetensors")
        for name, shape in (
            ("0.weight", (64, 64)),
            ("0.bias", (64,)),
            ("2.weight", (1, 64)),
            ("2.bias", (1,)),
        ):
            weights[f"score.{name}"] = torch.randn(shape, generator=draw) / 8
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        folders[family] = folder
    return folders


@pytest.fixture(scope="session")
def pairs(pair_folders: dict[str, Path]) -> dict[str, Backbone]:
    loaded = {family: Backbone.from_pretrained(folder) for family, folder in pair_folders.items()}
    # transformers loads a Qwen3.5 folder's tokenizer as a class of its own, which cuts words otherwise.
    loaded["qwen3_5"].tokenizer = pair_tokenizer()
    return loaded


@pytest.fixture
def judge(pairs: dict[str, Backbone]) -> Backbone:
    return pairs["qwen3_vl"]
