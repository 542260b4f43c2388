"""Heads that a checkpoint has besides its language model, read from its weights without its own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from radical_rerank.backbones.model import folder_of
from radical_rerank.errors import InputError

_LAYERS = ("0", "2")
"""the linear layers of Linear, ReLU, Linear"""


def load_head(name: str, prefix: str) -> nn.Sequential:
    """Load a head that gives one value: Linear(d, d), ReLU, Linear(d, 1), in float32.

    Args:
        name: the checkpoint, a model id or a folder
        prefix: what the names of its weights begin with: "score" for score.0.weight …

    Returns:
        The head: (…, d) -> (…, 1).
    """
    names = [f"{prefix}.{layer}.{part}" for layer in _LAYERS for part in ("weight", "bias")]
    folder = folder_of(name)
    source = str(folder if folder is not None and folder.is_dir() else name)
    found = _tensors(source, names)
    missing = [wanted for wanted in names if wanted not in found]
    if missing:
        raise InputError(f"{name} has no weights {missing[0]}: it has no head of this preset")
    first, last = (found[f"{prefix}.{layer}.weight"] for layer in _LAYERS)
    if first.ndim != 2 or tuple(last.shape) != (1, first.shape[0]):
        raise InputError(f"{name}: its head has the shapes {tuple(first.shape)}, {tuple(last.shape)}")
    head = nn.Sequential(nn.Linear(first.shape[1], first.shape[0]), nn.ReLU(), nn.Linear(first.shape[0], 1))
    head.load_state_dict({own.removeprefix(f"{prefix}."): tensor.float() for own, tensor in found.items()})
    return head.eval().requires_grad_(False)


def _tensors(source: str, names: list[str]) -> dict[str, Tensor]:
    """Return those tensors of a checkpoint's safetensors files that it has."""
    from safetensors import safe_open

    index = _file(source, "model.safetensors.index.json")
    files = {"model.safetensors"}
    if index is not None:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {places[name] for name in names if name in places}
    found: dict[str, Tensor] = {}
    for file in sorted(files):
        path = _file(source, file)
        if path is None:
            raise InputError(f"{source} has no {file}")
        with safe_open(path, framework="pt") as weights:
            found |= {name: weights.get_tensor(name) for name in names if name in weights.keys()}  # noqa: SIM118
    return found


def _file(source: str, file: str) -> Path | None:
    from transformers.utils import cached_file

    path: Any = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)
