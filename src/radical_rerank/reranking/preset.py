"""Trained rerankers: how each published checkpoint is asked, as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError, unknown_name
from radical_rerank.reranking.prompt import PromptTemplate


@dataclass(frozen=True)
class Preset:
    """How a trained reranker is asked: its prompt, its scorer and its limits.

    Args:
        models: patterns of the checkpoints' names, such as "Qwen3-VL-Reranker-*"
        scorer: "pointwise", "generate" or "logits"
        template: its prompt
        architectures: what its configuration may say under `architectures`
        max_image_tokens: the largest image it was made for, in visual tokens
        max_new_tokens: the limit of a generated answer

    Example:
        >>> preset = Preset.load("qwen3-vl-reranker")
        >>> preset.scorer, preset.template.answers
        ('pointwise', ('yes', 'no'))
    """

    models: tuple[str, ...]
    scorer: str
    template: PromptTemplate
    architectures: tuple[str, ...] = ()
    max_image_tokens: int | None = None
    max_new_tokens: int | None = None

    @classmethod
    def load(cls, source: str | Path | dict[str, Any]) -> Preset:
        """Load a preset from a dict, a JSON file, or the name of one that ships."""
        if isinstance(source, dict):
            return cls._parse(source)
        path = Path(source)
        if path.suffix != ".json":
            if str(source) not in presets():
                raise unknown_name("preset", str(source), presets())
            return presets()[str(source)]
        try:
            return cls._parse(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the preset {path}: {error}") from None

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> Preset:
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"preset: unknown field {unknown[0]!r}")
        try:
            values = {**data, "template": PromptTemplate.load(data["template"])}
            for name in ("models", "architectures"):
                values[name] = tuple(data.get(name, ()))
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise InputError(f"preset: {error}") from None

    @classmethod
    def of(cls, backbone: Backbone) -> Preset | None:
        """Return the preset of a checkpoint, by its name or its configuration; None if it has none."""
        # An id, a folder, or a folder of Hugging Face's cache: models--org--name/snapshots/…
        names = [part.lower() for part in re.split(r"[/\\]|--", backbone.name)]
        architectures = set(backbone.model.config.architectures or ())
        for preset in presets().values():
            patterns = [pattern.lower() for pattern in preset.models]
            if any(fnmatch(name, pattern) for name in names for pattern in patterns):
                return preset
            if architectures & set(preset.architectures):
                return preset
        return None


@lru_cache(maxsize=1)
def presets() -> dict[str, Preset]:
    """Return the presets that ship with the package, by name."""
    folder = resources.files("radical_rerank.reranking") / "presets"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda f: f.name)
    return {
        file.name.removesuffix(".json"): Preset._parse(json.loads(file.read_text(encoding="utf-8")))
        for file in files
    }
