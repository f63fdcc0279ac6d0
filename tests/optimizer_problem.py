"""Parameters of odd and round sizes and gradients of many magnitudes, for tests of the optimizer with and without a
GPU."""

from __future__ import annotations

from typing import Any

import torch

from carpool.optim import Muon
from carpool.optim.base import Matrices

# A row of 37 blocks in the last one, one element, none, blocks that end in a row, more than one program's piece.
SHAPES = [(37, 300), (5,), (1,), (0, 7), (3, 5, 512), (64, 64), (2, 9000), (17, 255)]
STEPS = 4
# Those of `SHAPES` that are matrices of a layer.
MATRICES = {0: Matrices(), 4: Matrices(True, 2), 5: Matrices(), 6: Matrices(), 7: Matrices()}


def gradients(step: int, device: str = "cpu") -> list[torch.Tensor]:
    """Of one step: those of an element differ by orders of magnitude, some are 0."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for shape in SHAPES:
        size = 10.0 ** torch.randint(-6, 1, shape, generator=generator)
        found.append((torch.randn(shape, generator=generator) * size * (size > 1e-6)).to(device))
    return found


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def groups(found: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """With settings of their own."""
    return [{"params": found[:3], "weight_decay": 0.1}, {"params": found[3:], "betas": (0.8, 0.95), "lr": 3e-3}]


def train(
    optimizer: torch.optim.Optimizer, found: list[torch.nn.Parameter], steps: int = STEPS, first: int = 0, **how: Any
) -> None:
    """Steps in which the third parameter has no gradient in the second, and learning rates change."""
    for step in range(first, first + steps):
        for i, (parameter, grad) in enumerate(zip(found, gradients(step, str(found[0].device)), strict=True)):
            parameter.grad = None if i == 2 and step == 1 else grad.to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        optimizer.step(**how)


def masters(optimizer: torch.optim.Optimizer, found: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The parameters as the optimizer knows them: in float32."""
    from carpool.optim.adamw_reference import join

    states = [optimizer.state[p] for p in found]
    return [
        join(p.detach(), state["low_bits"]) if "low_bits" in state else p.detach()
        for p, state in zip(found, states, strict=True)
    ]


def muon(found: list[torch.nn.Parameter], rate: float | torch.Tensor = 1e-2, **how: Any) -> Muon:
    """Of all these parameters."""
    named = [(str(number), parameter) for number, parameter in enumerate(found)]
    return Muon(Muon.groups(named, 0.1, {str(number): of for number, of in MATRICES.items()}), lr=rate, **how)
