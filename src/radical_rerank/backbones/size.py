"""The size of a model that is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radical_rerank.backbones.model import decoder_shape, family_of, folder_of, text_model
from radical_rerank.method import DecoderShape


@dataclass(frozen=True)
class Footprint:
    """The size of a model, counted without its weights.

    Args:
        shape: of the decoder
        parameters: of the whole model
        per_patch, per_token: multiply-accumulates of the vision tower for each patch, and of what follows it
            for each visual token
        per_pair: of each pair of patches in an image
        patches: patches that become one visual token
    """

    shape: DecoderShape
    parameters: int
    per_patch: int
    per_token: int
    per_pair: int
    patches: int

    def vision_macs(self, tokens: int) -> int:
        """Return the multiply-accumulates that an image of so many visual tokens costs before the decoder."""
        patches = tokens * self.patches
        return patches * self.per_patch + patches**2 * self.per_pair + tokens * self.per_token


def footprint_of(source: str | Mapping[str, Any]) -> Footprint:
    """Return the size of a model: its modules are made without weights, and counted.

    source: a name or folder with a configuration, or the fields of one
    """
    import transformers

    from radical_rerank.backbones import lite_vision  # noqa: F401, registers the type

    if isinstance(source, str):
        config = transformers.AutoConfig.from_pretrained(folder_of(source) or source)
    else:
        config = transformers.AutoConfig.for_model(**source)
    family_of(config)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    parts = {"per_patch": 0, "per_token": 0}
    text = text_model(model)
    inside = {id(module) for module in (text, *text.modules(), model.get_output_embeddings())}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and id(module) not in inside:
            after = "merger" in name or "projector" in name or "connector" in name
            parts["per_token" if after else "per_patch"] += module.weight.numel()
    vision = config.vision_config
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", 0)
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    merged = getattr(vision, "spatial_merge_size", None) or 1 / getattr(config, "downsample_ratio", 1.0)
    return Footprint(
        decoder_shape(config),
        sum(parameter.numel() for parameter in model.parameters()),
        **parts,
        per_pair=2 * width * depth,
        patches=round(merged**2),
    )
