"""The shared expert of `carpool.MoE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from carpool.routing.router import draw_weight


class SharedExpert(nn.Module):
    """A dense expert that serves every token at home.

    Args:
        hidden_size, size: H, and its own hidden size.
        activation, gated: as of the layer's experts.
        place: device and dtype."""

    def __init__(
        self,
        hidden_size: int,
        size: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        gated: bool,
        place: dict[str, Any],
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(hidden_size, size * (2 if gated else 1), bias=False, **place)
        self.down = nn.Linear(size, hidden_size, bias=False, **place)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        y_TH: torch.Tensor = self.down(self.activation(self.up(x_TH)))
        return y_TH

    def reset_parameters(self) -> None:
        """Draw all weights from the default generator."""
        for parameter in self.parameters():
            draw_weight(parameter)
