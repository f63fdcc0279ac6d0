"""Training only what decides and computes in MoE layers, as fine-tuning with limited routing does (Occult); or all but
the experts, which then need neither gradients nor an update."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from carpool.hf.seam.layers import find_router
from carpool.hf.seam.rides import required_rides


def freeze_dense(model: nn.Module) -> int:
    """Freeze all parameters but those of experts and their routers. Before the optimizer is made.

    Returns:
        How many parameters (elements, over all ranks) still train.

    Raises:
        ValueError: a model without Carpool's layers, of which nothing would be left to train.
    """
    return freeze_all_but_experts(model, list(required_rides(model)))


def freeze_all_but_experts(model: nn.Module, experts: Iterable[str]) -> int:
    """As `freeze_dense`, of a model whose experts modules have these names; it need not have Carpool's layers."""
    trained: set[int] = set()
    for name in experts:
        for module in (model.get_submodule(name), find_router(model, name)):
            if module is not None:
                trained |= {id(parameter) for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained and parameter.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def freeze_experts(model: nn.Module, experts: Iterable[str]) -> None:
    """Freeze the parameters of experts modules with these names. Before the optimizer is made."""
    for name in experts:
        model.get_submodule(name).requires_grad_(False)
