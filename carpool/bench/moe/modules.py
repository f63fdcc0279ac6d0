"""transformers' own experts modules: the weights that all contenders share, and the two that are transformers' own.

A module of the model's class, of the sizes in question, is made without the model around it. Its forward looks up
`config._experts_implementation` at every call: "grouped_mm" is transformers' fast path, "eager" the loop over experts
that is written in the model's file. Carpool computes on the same parameters.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import nn

from carpool.bench.moe.shapes import Shape

IMPLEMENTATIONS = ("grouped_mm", "eager")


class Family(NamedTuple):
    """Names in `transformers.models.NAME`: of the classes, and of the configuration's sizes."""

    experts: str
    config: str
    inner: str
    number: str
    others: dict[str, Any] = {}  # noqa: RUF012  (never changed)


FAMILIES = {
    "olmoe": Family("OlmoeExperts", "OlmoeConfig", "intermediate_size", "num_experts"),
    "qwen3_moe": Family("Qwen3MoeExperts", "Qwen3MoeConfig", "moe_intermediate_size", "num_experts"),
    "mixtral": Family("MixtralExperts", "MixtralConfig", "intermediate_size", "num_local_experts"),
    "deepseek_v3": Family("DeepseekV3Experts", "DeepseekV3Config", "moe_intermediate_size", "n_routed_experts"),
    "gpt_oss": Family("GptOssExperts", "GptOssConfig", "intermediate_size", "num_local_experts"),
    "nemotron_h": Family(
        "NemotronHExperts",
        "NemotronHConfig",
        "moe_intermediate_size",
        "n_routed_experts",
        {"mlp_hidden_act": "relu2", "moe_latent_size": None},
    ),
}


def make_module(shape: Shape, experts: int, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The experts module with `experts` experts, and random weights that keep the size of what they multiply."""
    family = FAMILIES[shape.family]
    package = f"transformers.models.{shape.family}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{shape.family}"), family.config)
    module_class = getattr(importlib.import_module(f"{package}.modeling_{shape.family}"), family.experts)
    sizes = {"hidden_size": shape.hidden, family.inner: shape.inner, family.number: experts}
    with torch.device("meta"):
        module: nn.Module = module_class(config_class(**sizes, **family.others))
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
