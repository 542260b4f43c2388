"""A model's trust profile: how concentrated its attention is, layer by layer."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from radical_rerank.errors import CalibrationError
from radical_rerank.files import replacing
from radical_rerank.method import DecoderShape, Schedule, plan, trust

PROFILE_FILE = "radical_profile.json"
NUMBERS = re.compile(r"\[[-+\d.eE,\s]*\]")


@dataclass(frozen=True)
class ModelIdentity:
    """What a model is called, and what it is.

    fingerprint: a digest of its configuration and of all its weights
    folder: its files, if it was loaded from a folder
    """

    name: str
    fingerprint: str
    shape: DecoderShape
    folder: Path | None = None


@dataclass(frozen=True)
class TunedSchedule:
    """A schedule that `radical tune` measured against Dense on lists without labels.

    flops: the part of Dense's arithmetic that it was measured at
    layers, exponents: as in `method.Schedule`
    nucleus: the share of the score that a stage keeps for this cost on average; None: not measured
    kl: KL(Dense ‖ pruned), mean over lists; agreement: how often both have the same best document
    relevance: what relevance was measured with, see `RaDiCal`
    """

    flops: float
    layers: tuple[int, ...]
    exponents: tuple[float, ...]
    nucleus: float | None = None
    kl: float = 0.0
    agreement: float = 0.0
    lists: int = 0
    relevance: str = "mean"

    @property
    def schedule(self) -> Schedule:
        """Its layers, and how the cut is spread over them."""
        return Schedule(tuple(self.layers), tuple(self.exponents))


@dataclass(frozen=True)
class Profile:
    """The trust profile of a model: H_norm and α of its layers.

    A measured profile has all layers with attention, and the fingerprint of the model it was measured on: it
    is used for that model only. A published one may have only some layers and no H_norm. It is used for
    models with its name and decoder shape. If it has no α either, it is a schedule: the layers that
    α-Maximin chose.

    Args:
        model: the model's name
        layers: layer indices, ascending
        alpha: α of each of them; empty if only the schedule is known
        h_norm, h_min: H_norm of each, and its minimum
        lists, source: what it was measured on
        fingerprint, shape: which model it is for
        scores: calibrations of its scores, as dicts (`reranking.scores.ScoreCalibration`)
        schedules: the best schedules that `radical tune` found, the cheapest first
        safety: what it found about ranking twice, as dicts (`reranking.safety.Safety`)

    Example:
        >>> profile = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
        >>> profile.alpha_at(29)
        0.0
    """

    model: str
    layers: tuple[int, ...]
    alpha: tuple[float, ...]
    h_norm: tuple[float, ...] | None = None
    h_min: float | None = None
    lists: int = 0
    source: str = ""
    fingerprint: str | None = None
    shape: DecoderShape | None = None
    scores: tuple[dict[str, Any], ...] = ()
    schedules: tuple[TunedSchedule, ...] = ()
    safety: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or (self.alpha and len(self.layers) != len(self.alpha)):
            raise CalibrationError(f"profile of {self.model}: one alpha per layer is needed")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise CalibrationError(f"profile of {self.model}: layers must ascend without repeats")
        if not all(0 <= a <= 1 for a in self.alpha) or not all(map(math.isfinite, self.h_norm or ())):
            raise CalibrationError(f"profile of {self.model}: every alpha must lie in [0, 1]")

    @classmethod
    def measured(
        cls,
        model: str,
        h_norm: Sequence[float],
        lists: int,
        source: str,
        fingerprint: str | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> Profile:
        """Make a profile from H_norm of every layer: α(l) = (H_norm(l) − H_min) / (1 − H_min).

        layers: those that have attention, if not all do
        """
        alpha = trust(torch.tensor(h_norm, dtype=torch.float64)).tolist()
        layers = tuple(range(len(h_norm)) if layers is None else layers)
        return cls(model, layers, tuple(alpha), tuple(h_norm), min(h_norm), lists, source, fingerprint)

    def alpha_at(self, layer: int) -> float:
        """Return α of a layer, or raise a CalibrationError if the profile does not have it."""
        if not self.alpha:
            raise CalibrationError(
                f"of {self.model}, {self.published}: measure the model with `radical calibrate`, or set a "
                "fixed alpha"
            )
        if layer not in self.layers:
            raise CalibrationError(f"the profile of {self.model} has no value for layer {layer}")
        return self.alpha[self.layers.index(layer)]

    def tuned(self, flops: float) -> TunedSchedule | None:
        """Return the tuned schedule whose cost is nearest to this part of Dense's, if there is one."""
        return min(self.schedules, key=lambda one: abs(math.log(one.flops / flops)), default=None)

    def schedule(self, flops: float, num_layers: int) -> Schedule:
        """Return the schedule for a part of Dense's arithmetic: the nearest tuned one, or a plan."""
        tuned = self.tuned(flops)
        if tuned is not None:
            return tuned.schedule
        if not self.alpha:
            raise CalibrationError(
                f"of {self.model}, {self.published}: a budget needs α of every layer. Measure the model with "
                "`radical calibrate`"
            )
        return plan(self.layers, self.alpha, num_layers, flops)

    @property
    def published(self) -> str:
        """What a published profile has, in words."""
        if not self.alpha:
            return f"only the schedule {list(self.layers)} is published, not its α"
        return f"α of {len(self.layers)} layers is published"

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, whole or not at all. Each list of numbers is one line."""
        path, text = Path(path), json.dumps(asdict(self), indent=1)
        with replacing(path) as file:
            file.write(NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile, or raise a CalibrationError that names the file."""
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
        for name in ("scores", "safety"):
            data[name] = tuple(data.get(name) or ())
        data["schedules"] = tuple(TunedSchedule(**one) for one in data.get("schedules") or ())
        if data.get("shape") is not None:
            data["shape"] = DecoderShape(**data["shape"])
        return cls(**data)

    @classmethod
    def find(cls, model: str | ModelIdentity, *, alpha: bool = True) -> Profile | None:
        """Return the profile of a model, or None.

        A profile that was measured on this very model comes first: in the user's cache, then in the model's
        folder. Then the published profile of its name. A name alone finds only a published profile.

        Args:
            model: the model, or its name
            alpha: if False, a published schedule without α will do; a name alone finds it anyway
        """
        if isinstance(model, str):
            return next((profile for profile in published_profiles() if profile.model == model), None)
        for path in (cls.cache_path(model), model.folder and model.folder / PROFILE_FILE):
            if path is None or not path.is_file():
                continue
            profile = cls.load(path)
            if profile.fingerprint == model.fingerprint:
                return profile
            warnings.warn(f"{path} was measured on another model than {model.name}: not used", stacklevel=2)
        own = model.name.removesuffix("-hf"), model.shape  # a converted checkpoint is the same model
        return next(
            (p for p in published_profiles() if (p.model, p.shape) == own and (p.alpha or not alpha)), None
        )

    @classmethod
    def may_exist(cls, name: str, folder: Path | None) -> bool:
        """Return whether a file may be this model's profile. Reads no weights, unlike `find`."""
        if folder is not None and (folder / PROFILE_FILE).is_file():
            return True
        return any((cache_folder() / "profiles").glob(f"{file_stem(name, 'model')}-*.json"))

    @staticmethod
    def cache_path(model: ModelIdentity) -> Path:
        """Return where a measured profile is kept: under RADICAL_CACHE, or XDG_CACHE_HOME, or ~/.cache."""
        folder, stem = cache_folder() / "profiles", file_stem(model.name, "model")
        return folder / f"{stem}-{model.fingerprint}.json"


@lru_cache(maxsize=1)
def published_profiles() -> tuple[Profile, ...]:
    """Return the profiles that ship with the package."""
    folder = resources.files("radical_rerank.pruning") / "profiles"
    entries = sorted(folder.iterdir(), key=lambda file: file.name)
    return tuple(Profile._parse(entry.read_text(encoding="utf-8")) for entry in entries)


def cache_folder() -> Path:
    """Return the folder of what can be made again: RADICAL_CACHE, or one in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("RADICAL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radical-rerank"


def file_stem(name: str, default: str) -> str:
    """Return the last part of a name or a path as the beginning of a file's name, without odd characters."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(name).name or default)
