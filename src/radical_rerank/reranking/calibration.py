"""Calibration: measure how concentrated a model's attention is, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones import Backbone
from radical_rerank.errors import CalibrationError, ScoringError
from radical_rerank.method import normalized_entropy, text_averaged
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Profile, Pruner, Stage, StageView
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, ImageLike, load_image
from radical_rerank.reranking.preset import Preset
from radical_rerank.reranking.prompt import PromptTemplate, build_pair, build_prompt, own_template, sizes_of

log = logging.getLogger("radical_rerank")

CALIBRATION_LISTS = 8
CALIBRATION_CANDIDATES = 20
SAMPLE_IMAGES = 12
"""generated scenes in a list to try"""


@dataclass(kw_only=True)
class EntropyProbe(Pruner):
    """Keeps every token and writes down H_norm of every layer: a calibration pass is a pruning pass."""

    keep: float = 1.0
    h_norm: list[list[float]] = field(default_factory=list)
    """per layer, one value per list; none for a layer whose attention cannot be read"""

    def stages(self, num_layers: int) -> list[Stage]:
        self.h_norm = self.h_norm or [[] for _ in range(num_layers)]
        return [Stage(layer, 1.0) for layer in range(num_layers)]

    def select(self, view: StageView, count: int) -> Tensor:
        self.h_norm[view.layer].append(float(normalized_entropy(text_averaged(view.attention()))))
        return torch.arange(count, device=view.alive.device)


def generated_list(
    seed: int, candidates: int = CALIBRATION_CANDIDATES, *, split: str = "test"
) -> tuple[str, list[Image.Image]]:
    """Return a query and candidate images drawn from a seed: lists that need no data set.

    Args:
        seed: the same seed gives the same list
        candidates: how many images
        split: "train", "validation" or "test"; the splits share no picture

    Example:
        >>> query, images = generated_list(0, candidates=5)
        >>> len(images)
        5
    """
    from radical_rerank.embedded.scenes.lists import make_list

    item = make_list(split, seed, candidates)
    return item.descriptions[0].text(), item.images


def sample_worlds() -> list[str]:
    """Return the worlds that `sample_list` can draw from here."""
    return [*(["photos"] if find_spec("skimage") else []), "scenes"]


def sample_list(world: str, seed: int) -> tuple[str, Sequence[ImageLike]]:
    """Return a query and pictures to try a model on.

    Args:
        world: "scenes", or "photos" for scikit-image's sample pictures
        seed: draws the query, and the scenes
    """
    if world == "scenes":
        return generated_list(seed, SAMPLE_IMAGES)
    from radical_rerank.embedded.photos.pictures import ASKED, sample_pictures

    return list(ASKED)[seed % len(ASKED)], sample_pictures()


def calibrate(
    model: Any,
    lists: Iterable[tuple[str, Sequence[ImageLike]]] | None = None,
    *,
    progress: Progress = silent,
) -> Profile:
    """Measure H_norm per layer, in one unpruned pass per list, or per image if the model is asked pointwise.

    Args:
        model: a Reranker or a Backbone. A list longer than its window is cut to it
        lists: (query, images) pairs; by default generated scenes, which need no data set
        progress: shows how many lists are done

    Returns:
        The model's trust profile.

    Example:
        >>> profile = calibrate(Backbone.from_pretrained("scenes"), [generated_list(0, candidates=4)])
        >>> profile.lists, len(profile.layers)
        (1, 12)
    """
    backbone: Backbone = getattr(model, "backbone", model)
    source = "lists of the user"
    if lists is None:
        lists = [generated_list(seed, split="validation") for seed in range(CALIBRATION_LISTS)]
        source = f"{CALIBRATION_LISTS} lists of {CALIBRATION_CANDIDATES} generated scenes"
    asking = model if hasattr(model, "template") else _own_asking(backbone)
    probe = EntropyProbe()
    count = 0
    for query, documents in progress(lists, f"calibrating {backbone.name}"):
        count += 1
        images = [load_image(document, name=f"document {i}") for i, document in enumerate(documents)]
        try:
            _measure(backbone, asking, probe, query, images)
        except ScoringError as error:
            raise CalibrationError(f"{backbone.name} cannot be calibrated: {error}") from None
    if not probe.h_norm:
        raise CalibrationError("calibration needs at least one list")
    layers = [layer for layer, values in enumerate(probe.h_norm) if values]  # those that have attention
    h_norm = [sum(probe.h_norm[layer]) / len(probe.h_norm[layer]) for layer in layers]
    return Profile.measured(backbone.name, h_norm, count, source, backbone.fingerprint, layers=layers)


def profile_of(model: Any) -> Profile:
    """Return the trust profile of a Reranker's or Backbone's model: a known one, or measure and save it."""
    identity = getattr(model, "backbone", model).identity
    return Profile.find(identity) or measured_profile(model)


def measured_profile(model: Any) -> Profile:
    """Measure the trust profile of a Reranker's or Backbone's model and save it in the user's cache."""
    identity = getattr(model, "backbone", model).identity
    name = identity.name or "this model"
    known = Profile.find(identity, alpha=False)
    unknown = "no trust profile of %s is known" if known is None else f"of %s, {known.published}"
    log.info(f"{unknown}: measuring one on %d lists (once)", name, CALIBRATION_LISTS)
    profile = calibrate(model)
    log.info("saved the trust profile of %s to %s", name, profile.save(Profile.cache_path(identity)))
    return profile


@dataclass(frozen=True)
class _Asking:
    """How a model is asked: what calibration needs of a Reranker."""

    template: PromptTemplate
    scorer: str
    max_image_tokens: int


def _own_asking(backbone: Backbone) -> _Asking:
    preset = Preset.of(backbone) if own_template(backbone) is None else None
    if preset is None:
        return _Asking(PromptTemplate.of(backbone), "logits", MAX_IMAGE_TOKENS)
    return _Asking(preset.template, preset.scorer, preset.max_image_tokens or MAX_IMAGE_TOKENS)


def _measure(
    backbone: Backbone, asking: Any, probe: EntropyProbe, query: str, images: Sequence[Image.Image]
) -> None:
    template: PromptTemplate = asking.template
    if asking.scorer != "pointwise":
        images = images[: template.window]
    features = backbone.encode([backbone.preprocess(image, asking.max_image_tokens) for image in images])
    sizes = sizes_of(features)
    if asking.scorer == "pointwise":
        prompts = [build_pair(backbone, template, query, size) for size in sizes]
        each = [[feature] for feature in features]
    else:
        prompts, each = [build_prompt(backbone, template, query, sizes)], [features]
    for prompt, own in zip(prompts, each, strict=True):
        with probe.on(backbone.model, prompt.layout):
            backbone.next_token_logits(backbone.inputs([prompt.ids], own))
