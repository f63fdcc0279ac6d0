"""The experts of a transformers model in host memory: which parameters these are, and which models can do so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.experts.host_experts import HostExperts
from carpool.experts.host_layers import storage_key
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.experts_module import base_of
from carpool.memory.next_experts import Predictor
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated


def keep_experts_in_host_memory(
    model: nn.Module,
    device: torch.device | None = None,
    predictor: Callable[[int, int], Predictor] | None = None,
    **options: Any,
) -> HostExperts:
    """Move the experts of a model to host memory; its layers bring them in when it is their turn. Called once
    optimizers and `Replicated`, which hold these parameters, exist. `device`: which computes; None: where the experts
    are.

    Raises:
        ValueError: FSDP shards or casts them, which moves them by itself, or they are in flat buffers.
    """
    layers, kept, by_fsdp = required_rides(model), replicated(model), fsdp.modules_of(model)
    shards = {} if kept is None else {storage_key(shard): shard for shard in kept.expert_shards}
    buffered = set() if kept is None else {module for module, _ in kept.buffered}
    for name, own in layers.items():
        if base_of(own.experts):
            raise ValueError(f"{name}: experts that are quantised (adapter.base_dtype) stay on their device")
        sharded = kept is None and any(isinstance(parameter, DTensor) for parameter in own.experts.parameters())
        if sharded or id(own.experts) in by_fsdp | buffered:
            raise ValueError(
                f"{name}: data-parallel ranks shard or cast these experts, so they cannot come from host memory "
                'or disk (memory.experts): keep the parameters in the dtype that computes (model.dtype = "bfloat16"), '
                'use as many expert-parallel ranks as there are, and parallelism.data_parallel = "zero1"'
            )
    modules = [own.experts for own in layers.values()]
    away = HostExperts(model, modules, shards, device, predictor, **options)
    for number, own in enumerate(layers.values()):
        if predictor is not None:
            own.on_choice = partial(_tell, away, own, number)
    return away


def _tell(away: HostExperts, own: ExpertRides, number: int, expert_TK: torch.Tensor) -> None:
    """Tell how many tokens of all ranks have chosen each expert of this one. The host waits for the router."""
    chosen = expert_TK[expert_TK >= 0].long()
    tokens_E = torch.bincount(chosen, minlength=own.num_experts)
    if own.group is not None:
        dist.all_reduce(tokens_E, group=own.group)
    tokens = tokens_E.tolist()
    mine = [tokens[expert] for expert in own.layout.homes[own.rank]]
    counts = {row: count for row, count in enumerate(mine) if count}
    away.choose(number, counts, single=own.group is None and len(expert_TK) == 1)
