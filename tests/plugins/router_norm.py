"""A metric in one file outside the package: the largest norm of a router's weight."""

from __future__ import annotations

import torch
from torch import nn

from carpool.metrics.metric import Metric, register


@register
class RouterNorm(Metric):
    name, help, unit, over_ranks = "router_norm", "Largest norm of a router's weight.", "norm", "max"

    def measure(self, model: nn.Module) -> torch.Tensor:
        norms = [weight.norm() for name, weight in model.named_parameters() if name.endswith("gate.weight")]
        return torch.stack(norms).max()
