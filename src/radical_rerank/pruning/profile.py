"""A model's trust profile: how concentrated its attention is, layer by layer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import torch

from radical_rerank.errors import CalibrationError
from radical_rerank.files import model_folder, replacing
from radical_rerank.method import trust

FILE_NAME = "radical_profile.json"


@dataclass(frozen=True)
class Profile:
    """H_norm and α of a model's layers.

    A published profile may cover only some layers and carry no H_norm; a measured one has all of
    them. Profiles are found by the model's name: first those that ship with the package, then a
    `radical_profile.json` in the model's own folder, then the user's cache.
    """

    model: str
    layers: tuple[int, ...]
    alpha: tuple[float, ...]
    h_norm: tuple[float, ...] | None = None
    h_min: float | None = None
    lists: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.alpha):
            raise CalibrationError(f"profile of {self.model}: one alpha per layer is needed")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise CalibrationError(f"profile of {self.model}: layers must ascend without repeats")
        if not all(0 <= a <= 1 for a in self.alpha):
            raise CalibrationError(f"profile of {self.model}: every alpha must lie in [0, 1]")

    @classmethod
    def measured(cls, model: str, h_norm: Sequence[float], lists: int, source: str) -> Profile:
        """From H_norm of every layer: H_min is its minimum, α(l) = (H_norm(l) − H_min) / (1 − H_min)."""
        alpha = trust(torch.tensor(h_norm, dtype=torch.float64)).tolist()
        layers = tuple(range(len(h_norm)))
        return cls(model, layers, tuple(alpha), tuple(h_norm), min(h_norm), lists, source)

    def alpha_at(self, layer: int) -> float:
        if layer not in self.layers:
            raise CalibrationError(f"the profile of {self.model} says nothing about layer {layer}")
        return self.alpha[self.layers.index(layer)]

    def checked(self, num_layers: int) -> Profile:
        """This profile, if it fits a decoder of so many layers."""
        if self.layers[-1] >= num_layers:
            raise CalibrationError(
                f"the profile of {self.model} speaks of layer {self.layers[-1]}, "
                f"but the model has {num_layers} layers"
            )
        return self

    def save(self, path: str | Path) -> Path:
        """Write as JSON, whole or not at all."""
        path = Path(path)
        with replacing(path) as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        try:
            return cls._parse(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
            raise CalibrationError(f"cannot read the profile {path}: {error}") from None

    @classmethod
    def _parse(cls, text: str) -> Profile:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        for name in ("layers", "alpha", "h_norm"):
            data[name] = tuple(data[name]) if data.get(name) is not None else None
        return cls(**data)

    @classmethod
    def find(cls, model: str) -> Profile | None:
        """The profile of this model, or None."""
        folder = resources.files("radical_rerank.pruning") / "profiles"
        for entry in sorted(folder.iterdir(), key=lambda file: file.name):
            profile = cls._parse(entry.read_text(encoding="utf-8"))
            if profile.model == model:
                return profile
        for path in (model_folder(model) / FILE_NAME if model else None, cls.cache_path(model)):
            if path is not None and path.is_file():
                return cls.load(path)
        return None

    @staticmethod
    def cache_path(model: str) -> Path:
        """Where a measured profile of this model is kept.

        RADICAL_CACHE, or XDG_CACHE_HOME, or ~/.cache. A model in a local folder is known by the
        folder's weights as well, so that training it again outdates its profile.
        """
        root = os.environ.get("RADICAL_CACHE")
        base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        state = model
        folder = model_folder(model)
        if model and folder.is_dir():
            files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
            stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
            state = f"{folder.resolve()} {stats}"
        digest = hashlib.sha256(state.encode()).hexdigest()[:12]
        stem = "".join(c if c.isalnum() or c in "-._" else "-" for c in folder.name or "model")
        return (base if root else base / "radical-rerank") / "profiles" / f"{stem}-{digest}.json"
