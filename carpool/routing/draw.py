"""How a layer's parameters start."""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def draw_weight(weight: torch.Tensor) -> None:
    """Fill in place from the default generator: normal with the standard deviation of a linear layer's usual start;
    zeros for a bias (fewer than two dimensions)."""
    if weight.dim() < 2:
        weight.zero_()
    else:
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]))
