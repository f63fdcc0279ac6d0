"""An optimizer outside the package, in one file: gradient descent with momentum (Polyak's heavy ball)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from carpool.optim import OptimizerBase, register


@register
class HeavyBall(OptimizerBase, torch.optim.Optimizer):
    name = "heavy-ball"
    options = {"beta": float}  # noqa: RUF012

    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0})

    @classmethod
    def state_bytes(cls, dtype: str, moments: str) -> Mapping[str, float]:
        return {"momentum": 4}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["momentum"].mul_(group["beta"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * state["momentum"])
