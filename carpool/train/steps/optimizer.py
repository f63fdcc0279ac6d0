"""The optimizer of a run, made from its settings, and the learning rate of each step."""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from carpool.optim import OptimizerBase, OptimizerSettings
from carpool.train.config.schema import TrainingSection


def make_optimizer(model: nn.Module, training: TrainingSection, folder: Path | None = None) -> OptimizerBase:
    """The optimizer that `training.optimizer` names, of all parameters that are trained.

    Args:
        folder: of its state, if that is on disk.

    Raises:
        ValueError: parameters are sharded, and it updates whole ones alone."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for _, parameter in named}
    # All parameters have one optimizer: bfloat16 ones among others decide it.
    cls = training.optimizer_class("bfloat16" if "bfloat16" in dtypes else "float32")
    if not cls.updates_shards:
        for name, parameter in named:
            if isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements):
                raise ValueError(
                    f"training.optimizer = {cls.name!r} updates whole parameters, and {name} is sharded over ranks: "
                    "take another optimizer, or fewer ranks"
                )
    settings = OptimizerSettings(
        learning_rate=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        epsilon=training.adam_epsilon,
        moments=training.optimizer_state_dtype,
        place=training.optimizer_offload,
        folder=folder,
        options=training.optimizer_options,
    )
    return cls.make(cls.groups(named, training.weight_decay), settings)


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
