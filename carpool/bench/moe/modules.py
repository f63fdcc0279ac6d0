"""transformers' own experts modules: the weights that all contenders share, and the two that are transformers' own.

A module of the model's class, of the sizes in question, is made without the model around it. Its forward looks up
`config._experts_implementation` at every call: "grouped_mm" is transformers' fast path, "eager" the loop over experts
that is written in the model's file. Carpool computes on the same parameters.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from carpool.bench.moe.shapes import Shape
from carpool.families import family

IMPLEMENTATIONS = ("grouped_mm", "eager")


def make_module(shape: Shape, experts: int, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The experts module with `experts` experts, and random weights that keep the size of what they multiply."""
    modeling = importlib.import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    (module_class,) = (thing for name, thing in vars(modeling).items() if name.endswith("Experts"))
    config = CONFIG_MAPPING[shape.family](**family(shape.family).layer_keys)
    inner = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    config.update({"hidden_size": shape.hidden, inner: shape.inner, family(shape.family).experts_key(config): experts})
    with torch.device("meta"):
        module: nn.Module = module_class(config)
    module = module.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            fan_in = shape.inner if name.startswith("down") else shape.hidden
            weight.normal_(std=0.5 if weight.dim() < 3 else fan_in**-0.5, generator=generator)
    return module


def use(module: Any, implementation: str) -> None:
    """Compute by `implementation` (one of `IMPLEMENTATIONS`) from now on."""
    module.config._experts_implementation = implementation
