"""What the adapters of tile-based families share: signals of plain vision towers, and tokens by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from radical_rerank.backbones.families.base import ImageFeatures, Pixels
from radical_rerank.backbones.view import column_means


def tile_signals(attention: Any, hidden: Tensor, *, cls: bool) -> tuple[Tensor, Tensor]:
    """Return per tile (t, n) the attention that each patch receives, and (t, n, hd) its keys; head means.

    hidden: (t, n, d), or n + 1 with a CLS token first
    cls: read the CLS token's attention, not the mean over all patches
    """
    q, k = (
        getattr(attention, f"{which}_proj")(hidden).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for which in "qk"
    )
    q, k = q.float(), k.float()
    if not cls:
        received = torch.stack([column_means(*pair, attention.scale) for pair in zip(q, k, strict=True)])
        return received, k.mean(dim=1)
    weights = (q[:, :, :1] @ k.transpose(-1, -2) * attention.scale).softmax(-1).mean(dim=1)[:, 0]
    return weights[:, 1:], k.mean(dim=1)[:, 1:]


def joined(values: Tensor, rows: int, columns: int, factor: int) -> Tensor:
    """Average over the factor × factor patches of a token. values: (t, n, …) -> (t, n / factor², …)"""
    grid: Tensor = values.unflatten(1, (rows // factor, factor, columns // factor, factor))
    return grid.mean(dim=(2, 4)).flatten(1, 2)


def by_size(
    encode: Callable[[list[Pixels]], Sequence[ImageFeatures]], pixels: Sequence[Pixels]
) -> list[ImageFeatures]:
    """Encode tiles of one size together."""
    encoded: dict[int, ImageFeatures] = {}
    for size in {p.values.shape[1:] for p in pixels}:
        same = [i for i, p in enumerate(pixels) if p.values.shape[1:] == size]
        encoded |= dict(zip(same, encode([pixels[i] for i in same]), strict=True))
    return [encoded[i] for i in range(len(pixels))]
