"""How a model's non-expert parameters are laid out: by FSDP2, or whole on each rank (`carpool.parallel.replicated`).

    with sharded_as("zero1"):               transformers shards, and hangs no hooks on modules
        model = ...                             built or loaded, as under FSDP
    freeze_dense(model)                         or not
    replicate_dense(model, bfloat16=True)       parameters are whole from here on

    with sharded_as("fsdp"):                    FSDP2 shards non-expert parameters
        model = ...
    freeze_dense(model)
    keep_experts(model)                         experts are plain parameters from here on

Transformers applies FSDP2 in one function, after expert parallelism and before weights are loaded. Inside
`sharded_as("zero1")` another stands for it: it gives each dense parameter the placement that FSDP2 would, so
whatever fills sharded parameters with values does it as ever.

Either way FSDP2 has those experts that it has something to do for: those that several ranks hold, and those that are
stored in one dtype and computed with in another. Transformers gives it all. Where one rank holds an expert alone, FSDP2
then copies its parameters in each forward and each backward, and its gradients three times in float32, and it hangs
hooks on the inside of each layer. So Carpool leaves such experts out (`keep_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.distributed import fsdp as transformers_fsdp
from transformers.distributed import mixin

from carpool.parallel import fsdp
from carpool.parallel.replicated import Replicated

APPLY = "apply_fully_sharded_data_parallelism"
# Of a model whose experts FSDP does not have.
_LEFT_OUT = "_carpool_experts_left_out"


@contextmanager
def sharded_as(dense: str | None) -> Iterator[None]:
    """Inside, transformers distributes models as the module's docstring says.

    Args:
        dense: "fsdp", or "zero1", whose models cannot compute before `replicate_dense`. None: as transformers does.
    """
    before = getattr(mixin, APPLY)
    setattr(mixin, APPLY, {"fsdp": _shard_dense, "zero1": _place, None: before}[dense])
    try:
        yield
    finally:
        setattr(mixin, APPLY, before)


def replicate_dense(model: nn.Module, bfloat16: bool, **options: Any) -> Replicated:
    """Make the non-expert parameters of a model that was built as "zero1" whole. All ranks together.

    Args:
        bfloat16: compute in bfloat16, and add gradients in float32.
        options: of `Replicated`.
    """
    return Replicated(model, torch.bfloat16 if bfloat16 else None, **options)


def keep_experts(model: nn.Module) -> Replicated | None:
    """Of a model that was built as "fsdp": if FSDP has none of its experts, modules get this rank's part of them as
    plain parameters. Gradients are then summed over ranks, also of non-expert parameters, and not averaged: whoever
    makes the loss divides it by the number of data-parallel ranks. All ranks together.

    Returns:
        What has taken over the experts; None: FSDP has them, or there is no FSDP, and gradients are averaged."""
    if not getattr(model, _LEFT_OUT, False):
        return None
    fsdp.sum_gradients(model)
    return Replicated(model)


def _experts(model: Any, ep_plan: dict[str, str]) -> tuple[list[Any], bool]:
    """The modules of experts, and whether FSDP2 has something to do for them."""
    config = model.config.distributed_config
    experts = [module for name, module in model.named_modules() if ep_plan.get(name) == "ep_dispatch_experts"]
    # A stage of a pipeline may have none, and does as the others do.
    dtypes = {parameter.dtype for module in experts for parameter in module.parameters()} or {model.config.dtype}
    casts = config.fsdp_mixed_precision and dtypes != {torch.bfloat16}
    return experts, config.dp_replicate_size > 1 or config.efsdp_size > 1 or casts


def _shard_dense(model: Any, meshes: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """Stands for transformers' `apply_fully_sharded_data_parallelism`, which it calls."""
    apply, shard = transformers_fsdp.apply_fully_sharded_data_parallelism, transformers_fsdp.fully_shard
    experts, shared = _experts(model, ep_plan)
    if shared:
        return apply(model, meshes, fsdp_plan, ep_plan)
    setattr(model, _LEFT_OUT, True)
    theirs = {parameter for module in experts for parameter in module.parameters()}
    transformers_fsdp.fully_shard = partial(shard, ignored_params=theirs)
    try:
        return apply(model, meshes, fsdp_plan, {})
    finally:
        transformers_fsdp.fully_shard = shard


def _place(model: Any, meshes: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """Replaces transformers' `apply_fully_sharded_data_parallelism`: non-expert parameters get placements, no hooks."""
    config = model.config.distributed_config
    if config.tp_size > 1:
        raise ValueError(
            "tensor parallelism divides non-expert parameters, so they cannot be whole on each rank: use "
            "parallelism.data_parallel='fsdp' or parallelism.tp_size=1"
        )
    copied = config.dp_replicate_size > 1
    mesh = meshes.get_mesh(("dp_replicate", "fsdp") if copied else "fsdp")
    placements = [Replicate(), Shard(0)] if copied else [Shard(0)]
    experts, shared = _experts(model, ep_plan)
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
    if experts and shared:
        policy = MixedPrecisionPolicy()
        if config.fsdp_mixed_precision:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        expert_mesh = meshes.get_mesh(("dp_replicate", "efsdp") if copied else "efsdp")
        for module in experts:
            fully_shard(module, mesh=expert_mesh, mp_policy=policy)
        # Then they share streams, and the next layer's are gathered ahead.
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=set(made.values()))
        # As the gradients of non-expert parameters are.
        fsdp.sum_gradients(model)
    # Transformers' generation asks for that: all ranks take part in each forward.
    model._is_fsdp_managed_module = True
    return model
