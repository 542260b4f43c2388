from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where other programs use the processors too, tiny models are several times faster on one thread.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

from hypothesis import settings  # noqa: E402

from radical_rerank.backbones import Backbone  # noqa: E402
from tests.tiny import write_tiny  # noqa: E402

settings.register_profile("ours", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("ours")


Value = TypeVar("Value")


class Made(dict[str, Value]):
    """A dict whose values are made when they are first asked for."""

    def __init__(self, make: Callable[[str], Value]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, key: str) -> Value:
        self[key] = self.make(key)
        return self[key]


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every family, in Hugging Face format."""
    root = tmp_path_factory.mktemp("tiny")
    return Made(lambda family: write_tiny(root / family, family))


@pytest.fixture(scope="session")
def backbones(tiny_folders: dict[str, Path]) -> dict[str, Backbone]:
    return Made(lambda family: Backbone.from_pretrained(tiny_folders[family]))


@pytest.fixture(scope="session")
def backbone(backbones: dict[str, Backbone]) -> Backbone:
    return backbones["qwen3_vl"]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own profiles."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("RADICAL_CACHE", str(cache))
    return cache
