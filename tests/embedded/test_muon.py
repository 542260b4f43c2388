"""The Muon optimizer."""

from __future__ import annotations

import torch

from radical_rerank.embedded.muon import orthogonalize


def test_muon_orthogonalizes() -> None:
    for shape in ((16, 16), (8, 24), (24, 8)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalize(matrix))
        assert values.min() > 0.4
        assert values.max() < 1.4
