"""How a model's dense parameters lie on the ranks: sharded by FSDP2, or whole on each (`carpool.parallel.replicated`).

    with without_fsdp():                        transformers shards, and hangs no hooks on modules
        model = ...                             built or loaded, as under FSDP
    freeze_dense(model)                         or not
    replicate_dense(model, bfloat16=True)       parameters are whole from here on

Transformers applies FSDP2 in one function, after expert parallelism and before weights are loaded. Inside
`without_fsdp` another stands for it: it gives each dense parameter the placement that FSDP2 would, so whatever fills
sharded parameters with values does it as ever. Of the experts, FSDP2 keeps those that it has something to do for:
those that several ranks hold, and those that are stored in one dtype and computed with in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.distributed import mixin

from carpool.parallel.replicated import Replicated

APPLY = "apply_fully_sharded_data_parallelism"


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Inside, models that transformers distributes have dense parameters that are sharded, without FSDP's hooks.

    They cannot compute before `replicate_dense`."""
    before = getattr(mixin, APPLY)
    setattr(mixin, APPLY, _shard)
    try:
        yield
    finally:
        setattr(mixin, APPLY, before)


def replicate_dense(model: nn.Module, bfloat16: bool, **options: Any) -> Replicated:
    """Make the dense parameters of a model that was built `without_fsdp` whole. All ranks together.

    Args:
        bfloat16: compute in bfloat16, and add gradients in float32.
        options: of `Replicated`.
    """
    return Replicated(model, torch.bfloat16 if bfloat16 else None, **options)


def _shard(model: Any, meshes: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """Stands for transformers' `apply_fully_sharded_data_parallelism`."""
    config = model.config.distributed_config
    if config.tp_size > 1:
        raise ValueError(
            "tensor parallelism divides dense parameters, so they cannot be whole on each rank: use "
            "parallelism.dense='fsdp' or parallelism.tp_size=1"
        )
    copied = config.dp_replicate_size > 1
    mesh = meshes.get_mesh(("dp_replicate", "fsdp") if copied else "fsdp")
    placements = [Replicate(), Shard(0)] if copied else [Shard(0)]
    experts = [module for name, module in model.named_modules() if ep_plan.get(name) == "ep_dispatch_experts"]
    theirs = {id(parameter) for module in experts for parameter in module.parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in theirs:
                continue
            if id(parameter) not in made:
                sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                made[id(parameter)] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
    bfloat16 = bool(config.fsdp_mixed_precision)
    casts = bfloat16 and any(p.dtype != torch.bfloat16 for module in experts for p in module.parameters())
    if experts and (copied or config.efsdp_size > 1 or casts):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
        expert_mesh = meshes.get_mesh(("dp_replicate", "efsdp") if copied else "efsdp")
        for module in experts:
            fully_shard(module, mesh=expert_mesh, mp_policy=policy)
            # Summed, as the gradients of dense parameters are.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # Then they share streams, and the next layer's are gathered ahead.
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=set(made.values()))
    # Transformers' generation asks for that: all ranks take part in each forward.
    model._is_fsdp_managed_module = True
    return model
