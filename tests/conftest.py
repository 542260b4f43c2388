from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where other programs use the processors too, tiny models are several times faster on one thread.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

from hypothesis import settings  # noqa: E402

from radical_rerank.backbones import Backbone  # noqa: E402
from tests.tiny import TINY_FAMILIES, write_tiny  # noqa: E402

settings.register_profile("ours", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("ours")


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every family, in Hugging Face format."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny(root / family, family) for family in TINY_FAMILIES}


@pytest.fixture(scope="session")
def backbones(tiny_folders: dict[str, Path]) -> dict[str, Backbone]:
    return {family: Backbone.from_pretrained(folder) for family, folder in tiny_folders.items()}


@pytest.fixture(scope="session")
def backbone(backbones: dict[str, Backbone]) -> Backbone:
    return backbones["qwen3_vl"]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own profiles."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("RADICAL_CACHE", str(cache))
    return cache
