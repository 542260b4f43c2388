"""The Muon optimizer in float32. Torch's own computes in bfloat16, which a CPU only emulates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return roughly the nearest (semi-)orthogonal matrix, by quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalized momentum, scaled to the root mean square of AdamW's steps.

    Args:
        parameters: matrices
        lr: the learning rate
        momentum: how much of the momentum stays at each step
        weight_decay: as in AdamW
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: not used"""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                buffer = state["momentum"]
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(buffer, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)
