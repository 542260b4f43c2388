"""InternVL with a small convolutional vision tower: EfficientNet-lite0, then a few attention blocks.

Only the tower differs from InternVL. Importing this module registers it with transformers' Auto classes, so
that its checkpoints load, run and are pruned like any InternVL checkpoint.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, pad, pixel_unshuffle, relu6
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    InternVLVisionModel,
)
from transformers.configuration_utils import SubConfigSpec
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.internvl.modeling_internvl import InternVLVisionEmbeddings

STRIDE = 32
"""pixels per cell, along each side"""
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""EfficientNet-lite0: (blocks, kernel, stride of the first, expansion, channels) of each stage"""
STEM, MIDDLE, HEAD = 32, 112, 1280
"""channels after the stem, of the map at half the stride, and of the last map"""
MARK = 0.5
"""what marks the token of the whole picture, beside a content of norm 1"""


class LiteVisionConfig(InternVLVisionConfig):  # type: ignore[misc]
    """The configuration of the tower.

    Args:
        num_classes: named things that the classifier tells apart
        named: how much their names say in a token, beside what the attention blocks make of it
    """

    model_type = "lite_vision"

    num_classes: int = 1000
    named: float = 0.2


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding, for sides that are multiples of its stride."""

    def __init__(self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups)
        total = kernel - stride
        self.pads = (total // 2, total - total // 2) * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad(x, self.pads) if any(self.pads) else x)


class Block(nn.Module):
    """An inverted bottleneck. Its batch norms are folded into the convolutions."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expand = SameConv(channels, wide) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.project = SameConv(wide, out)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.expand is None else relu6(self.expand(x))
        narrow: Tensor = self.project(relu6(self.depthwise(wide)))
        return x + narrow if self.adds else narrow


class LiteCells(nn.Module):
    """Turns an image into cells of 32 × 32 pixels: what lite0 sees in each, and what it would call it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.stem = SameConv(config.num_channels, STEM, 3, 2)
        self.blocks = nn.ModuleList()
        channels = STEM
        for count, kernel, stride, expansion, out in STAGES:
            for number in range(count):
                self.blocks.append(Block(channels, out, kernel, stride if number == 0 else 1, expansion))
                channels = out
        self.head = SameConv(channels, HEAD)
        self.classifier = nn.Linear(HEAD, config.num_classes)
        self.names = nn.Linear(config.num_classes, config.hidden_size, bias=False)
        self.project = nn.Linear(HEAD + 4 * MIDDLE, config.hidden_size)
        middle = sum(count for count, *_ in STAGES[:5])
        self.middle = middle - 1
        """the block after which the map has half the stride"""

    def maps(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return two maps as cells: (B, M, 1280) the last one, (B, M, 448) the one at half the stride.

        pixels: (B, 3, height, width), sides multiples of 32. A cell has four places of the finer map.
        """
        # This memory format halves the time of depthwise convolutions on a CPU.
        x = relu6(self.stem(pixels.contiguous(memory_format=torch.channels_last)))
        fine = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.middle:
                fine = x
        last = relu6(self.head(x))
        return last.flatten(2).transpose(1, 2), pixel_unshuffle(fine, 2).flatten(2).transpose(1, 2)

    def describe(self, last: Tensor, fine: Tensor, names: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return two descriptions of the cells, (B, M, d) each: for the attention blocks, and by names alone.

        The latter is the mean of the class names' embeddings, weighted by the cell's class probabilities.
        Half the logits: the classifier was trained on means over cells, single cells are too certain.

        Args:
            last, fine: the two maps
            names: (d, classes) the names' embeddings, if not the model's own
        """
        probable = (self.classifier(last) / 2).softmax(dim=-1)
        named: Tensor = self.names(probable) if names is None else linear(probable, names)
        seen: Tensor = self.project(torch.cat([last, fine], dim=-1))
        return named + seen, named


class LiteVisionEmbeddings(InternVLVisionEmbeddings):  # type: ignore[misc]
    """InternVL's embeddings with cells for patches. The class token starts as the mean of the cells."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.patch_embeddings = LiteCells(config)

    def forward(self, last: Tensor, fine: Tensor, names: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what `LiteCells.describe` does; the first with the class token, (B, 1 + M, d)."""
        cells, named = self.patch_embeddings.describe(last, fine, names)
        return self.with_class_token(cells), named

    def with_class_token(self, cells: Tensor) -> Tensor:
        """(B, M, d) -> (B, 1 + M, d)."""
        return torch.cat([self.cls_token + cells.mean(dim=1, keepdim=True), cells], dim=1)


class LiteVisionModel(InternVLVisionModel):  # type: ignore[misc]
    """The tower: cells, then InternVL's attention blocks without position embeddings.

    The names of the classes bypass the blocks, so that things which no caption names keep their place in the
    space of words. InternVL drops the class token and wants a square of tokens, so the picture takes the
    place of the first cell, a corner. It is marked in the last dimension. A few dimensions are kept free for
    that, as many as the blocks have heads.
    """

    config_class = LiteVisionConfig
    config: LiteVisionConfig

    def __init__(self, config: LiteVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = LiteVisionEmbeddings(config)
        self.post_init()

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        cells = self.embeddings.patch_embeddings
        maps = cells.maps(pixel_values.to(cells.project.weight.dtype))
        return BaseModelOutputWithPooling(last_hidden_state=self.describe(*maps))

    def describe(self, last: Tensor, fine: Tensor, names: Tensor | None = None) -> Tensor:
        """Return (B, 1 + M, d): the picture, the picture as the first token, the other cells.

        For the arguments see `LiteCells.describe`.
        """
        cells, named = self.embeddings(last, fine, names)
        named = torch.cat([named.mean(dim=1, keepdim=True), named], dim=1)
        tokens = normalize(self.encoder(cells).last_hidden_state, dim=-1) + self.config.named * named
        # What InternVL's layer norm takes away goes here: else the mark would weigh more in some pictures.
        free = self.config.num_attention_heads
        content = tokens[..., :-free]
        content = normalize(content - content.mean(dim=-1, keepdim=True), dim=-1)
        tokens = pad(content, (0, free))
        marked = tokens[:, :1].clone()
        marked[..., -1] = MARK
        return torch.cat([tokens[:, :1], marked, tokens[:, 2:]], dim=1)


class InternVLLiteConfig(InternVLConfig):  # type: ignore[misc]
    """InternVL's configuration with a `LiteVisionConfig`."""

    model_type = "internvl_lite"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="qwen3"),
        "vision_config": LiteVisionConfig,
    }


class InternVLLite(InternVLForConditionalGeneration):  # type: ignore[misc]
    """InternVL with the tower of `LiteVisionModel`."""

    config_class = InternVLLiteConfig


AutoConfig.register(LiteVisionConfig.model_type, LiteVisionConfig, exist_ok=True)
AutoModel.register(LiteVisionConfig, LiteVisionModel, exist_ok=True)
AutoConfig.register(InternVLLiteConfig.model_type, InternVLLiteConfig, exist_ok=True)
AutoModelForImageTextToText.register(InternVLLiteConfig, InternVLLite, exist_ok=True)
