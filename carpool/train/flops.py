"""Floating-point operations of a training step, for MFU and HFU.

Definitions (PaLM, arXiv 2204.02311, appendix B):
  - MFU, model FLOPs utilisation: the operations that the mathematics of the step needs, per second, over the peak
    of the device. A matrix product of m x k by k x n needs 2mkn; a parameter that a token meets costs 2 forward and 4
    backward, so 6 per token.
  - HFU, hardware FLOPs utilisation: the same with what is computed again counted again (activation checkpointing runs
    the forward twice).

What counts: active parameters only (K of E experts; the input embedding is a table, not a product, the output head
counts), and the part of the score matrix that is needed: half of it for causal attention, a band for sliding windows,
and none of it where attention is linear, whose own states are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from carpool.hf.config.sizes import head_sizes
from carpool.planner.machine.hardware import hardware_of


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, counted once whatever the sharding.

    Attributes:
        total: all parameters.
        experts: those of routed experts.
        active: those that one token meets: all but the experts that it does not choose.
        multiplied: active without the input embedding.
        attention: sum over layers that see the whole sequence of heads * head size, for the score products; the mean of
            the sizes of keys and values where they differ.
        windowed: the same sum over layers that see `window` tokens.
        window: tokens.
    """

    total: int
    experts: int
    active: int
    multiplied: int
    attention: int
    windowed: int = 0
    window: int = 0


# Names in transformers' `layer_types` of layers without a score matrix, and of those that see a window of it.
_WITHOUT_SCORES = ("linear_attention", "conv", "moe")
_WINDOWED = ("sliding_attention", "hybrid_sliding")


def model_size(model: nn.Module, expert_modules: dict[str, int], top_k: int) -> ModelSize:
    """Count a transformers model's parameters.

    Args:
        model: may be sharded (DTensors count in full) or on the meta device.
        expert_modules: number of all experts by module name.
        top_k: K.
    """
    total = sum(p.numel() for p in model.parameters())
    experts, active_experts = 0, 0
    for name, number in expert_modules.items():
        size = sum(p.numel() for p in model.get_submodule(name).parameters())
        experts += size
        active_experts += size * min(top_k, number) // number
    active = total - experts + active_experts
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    width = getattr(config, "num_attention_heads", 0) * sum(head_sizes(config)) // 2
    window = getattr(config, "sliding_window", None) or 0
    everywhere = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    scoring = [kind for kind in kinds if kind not in _WITHOUT_SCORES]
    windowed = sum(kind in _WINDOWED for kind in scoring) if window else 0
    return ModelSize(
        total=total,
        experts=experts,
        active=active,
        multiplied=active if tied else active - embedding.numel(),
        attention=(len(scoring) - windowed) * width,
        windowed=windowed * width,
        window=window,
    )


def flops_per_token(size: ModelSize, sequence_length: int) -> int:
    """Operations of one token's forward and backward.

    Example: 1000 parameters, 2 layers of 8 heads * 4, sequence 16: 6 * 1000 + 12 * 64 * 8 = 12,144. The scores and
    their product with the values take 2 * heads * head size each for a token that is seen, and twice that in the
    backward; a token sees 8 others in the mean, or fewer through a window.
    """
    beyond = max(sequence_length - size.window, 0)
    seen, seen_through_window = sequence_length / 2, (sequence_length**2 - beyond**2) / (2 * sequence_length)
    return int(6 * size.multiplied + 12 * (size.attention * seen + size.windowed * seen_through_window))


def peak_flops(device: torch.device, override: float | None) -> tuple[float | None, str]:
    """The device's peak rate in FLOP/s and where the number is from; None where it is not known."""
    if override is not None:
        return override, "training.peak_flops"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        profile = hardware_of(name)
        if profile.peak_flops is not None:
            return profile.peak_flops, f"datasheet of {profile.name}, dense bf16"
        return None, f"no known peak for {name}: set training.peak_flops to see MFU"
    return None, "no peak is taken for CPUs"
