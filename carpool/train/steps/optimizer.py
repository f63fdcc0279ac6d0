"""The optimizer of a run and its learning rate: AdamW, PyTorch's or Carpool's own (`carpool.optim`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.optim import AdamW
from carpool.train.config.schema import TrainingSection


def make_optimizer(
    model: nn.Module, training: TrainingSection, folder: Path | None = None
) -> AdamW | torch.optim.AdamW:
    """AdamW; weight decay on matrices only, not on norms, biases and other vectors. Whose: `training.optimizer`.
    `folder`: of its state, if that is on disk.

    Parameters on different meshes (dense on fsdp, experts on efsdp x ep) go into different groups, because one fused
    update of PyTorch's over DTensors of two meshes is refused.
    """
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The shared bias of all experts has two dimensions but is still a bias.
            decays = parameter.dim() >= 2 and not name.endswith("bias")
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((decays, mesh), []).append(parameter)
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    of_groups = [
        {"params": p, "weight_decay": training.weight_decay if decays else 0.0} for (decays, _), p in groups.items()
    ]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for found in groups.values() for parameter in found}
    if any(training.one_pass(dtype) for dtype in dtypes):
        offload = training.optimizer_state != "device"
        return AdamW(of_groups, **settings, moments=training.optimizer_moments, offload=offload, folder=folder)
    return torch.optim.AdamW(of_groups, **settings, fused=True)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """What run.json says of it, and how it is lossy."""
    bf16 = any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"])
    if not isinstance(optimizer, AdamW):
        lossy = ["bfloat16 parameters and their moments are updated in bfloat16, without masters"] if bf16 else []
        return {
            "name": "torch",
            "masters": False,
            "moments": "bfloat16" if bf16 else "float32",
            "state": "device",
        }, lossy
    moments = optimizer.moments
    lossy = [f"the optimizer's moments are kept in {moments}"] if moments != "float32" else []
    state = "device" if not optimizer.offload else "host" if optimizer.folder is None else "disk"
    return {"name": "one-pass", "masters": bf16, "moments": moments, "state": state}, lossy


def learning_rate(step: int, training: TrainingSection) -> float:
    """The learning rate of step 1, 2, ...: linear warm-up, then cosine, linear or constant to `min_lr_ratio`.

    A pure function of the step, so that there is no scheduler state to save.
    """
    warmup = training.warmup()
    if step <= warmup:
        return training.learning_rate * step / warmup
    if training.lr_scheduler_type == "constant":
        return training.learning_rate
    done = (step - warmup) / max(1, training.steps - warmup)
    left = 1 - done if training.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return training.learning_rate * (training.min_lr_ratio + (1 - training.min_lr_ratio) * left)
