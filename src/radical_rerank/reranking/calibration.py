"""Calibration: how concentrated is this model's attention, layer by layer?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones import Backbone
from radical_rerank.errors import CalibrationError, ScoringError
from radical_rerank.method import normalized_entropy, text_averaged
from radical_rerank.pruning import Profile, Pruner, Stage, StageView
from radical_rerank.reranking.images import Document, load_image
from radical_rerank.reranking.prompt import PromptTemplate, build_prompt
from radical_rerank.scenes.lists import make_list

CALIBRATION_LISTS = 8
CALIBRATION_CANDIDATES = 20


@dataclass(kw_only=True)
class EntropyProbe(Pruner):
    """Keeps every token and writes down H_norm of every layer: a calibration pass is a pruning pass."""

    keep: float = 1.0
    h_norm: list[list[float]] = field(default_factory=list)
    """per layer, one value per list"""

    def stages(self, num_layers: int) -> list[Stage]:
        self.h_norm = self.h_norm or [[] for _ in range(num_layers)]
        return [Stage(layer, 1.0) for layer in range(num_layers)]

    def select(self, view: StageView, count: int) -> Tensor:
        self.h_norm[view.layer].append(float(normalized_entropy(text_averaged(view.attention()))))
        return torch.arange(count, device=view.alive.device)


def calibrate(
    model: Any,
    lists: Iterable[tuple[str, Sequence[Document]]] | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> Profile:
    """Measure H_norm per layer in one unpruned pass per list; returns the model's trust profile.

    model: a Reranker or a Backbone
    lists: (query, images) pairs; by default generated scenes, which need no data set
    """
    backbone: Backbone = getattr(model, "backbone", model)
    source = "the lists that were passed"
    if lists is None:
        items = [make_list("validation", seed, CALIBRATION_CANDIDATES) for seed in range(CALIBRATION_LISTS)]
        lists = [(item.descriptions[0].text(), item.images) for item in items]
        source = f"{CALIBRATION_LISTS} lists of {CALIBRATION_CANDIDATES} generated scenes"
    template = getattr(model, "template", None) or PromptTemplate.of(backbone)
    max_image_tokens = getattr(model, "max_image_tokens", 384)
    total = f" of {len(lists)}" if isinstance(lists, Sequence) else ""
    probe = EntropyProbe()
    count = 0
    for count, (query, documents) in enumerate(lists, start=1):
        if say is not None:
            say(f"calibrating {backbone.name}: list {count}{total}")
        images = [load_image(document, name=f"document {i}") for i, document in enumerate(documents)]
        try:
            _measure(backbone, template, probe, query, images, max_image_tokens)
        except ScoringError as error:
            raise CalibrationError(f"{backbone.name} cannot be calibrated: {error}") from None
    if not count:
        raise CalibrationError("calibration needs at least one list")
    h_norm = [sum(values) / len(values) for values in probe.h_norm]
    return Profile.measured(backbone.name, h_norm, count, source, backbone.fingerprint)


def profile_of(model: Any, *, say: Callable[[str], None] | None = None) -> Profile:
    """The trust profile of a Reranker's or Backbone's model: a known one, or measured now and kept."""
    identity = getattr(model, "backbone", model).identity
    name = identity.name or "this model"
    profile = Profile.find(identity)
    if profile is None:
        tell = say or (lambda line: None)
        tell(f"no trust profile of {name} is known: measuring one (once)")
        profile = calibrate(model, say=say)
        tell(f"saved the trust profile of {name} to {profile.save(Profile.cache_path(identity))}")
    return profile


def _measure(
    backbone: Backbone,
    template: PromptTemplate,
    probe: EntropyProbe,
    query: str,
    images: Sequence[Image.Image],
    max_image_tokens: int,
) -> None:
    features = backbone.encode([backbone.preprocess(image, max_image_tokens) for image in images])
    prompt = build_prompt(backbone, template, query, [len(feature.tokens) for feature in features])
    with probe.on(backbone.model, prompt.layout):
        backbone.next_token_logits(backbone.inputs([prompt.ids], features))
