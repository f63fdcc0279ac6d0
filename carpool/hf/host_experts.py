"""The experts of a transformers model in host memory: which parameters these are, and which models can do so."""

from __future__ import annotations

import torch
from torch import nn

from carpool.hf.expert_parallel import required_rides
from carpool.memory.host_experts import HostExperts, storage_key
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated


def keep_experts_in_host_memory(
    model: nn.Module, device: torch.device | None = None, chosen_only: bool = False
) -> HostExperts:
    """Move the experts of a model to host memory; its layers bring them in when it is their turn. Called once whatever
    holds these parameters exists: optimizers, `Replicated`.

    Args:
        device: which computes; None: where the experts are.
        chosen_only: forwards without a backward bring in what tokens choose; for one rank.

    Raises:
        ValueError: FSDP shards or casts them, which moves them by itself; `chosen_only` with several ranks.
    """
    layers = required_rides(model)
    for name, own in layers.items():
        if chosen_only and own.num_ranks > 1:
            raise ValueError(f"{name}: which experts other ranks choose is not known here; use one rank")
        if fsdp.groups_of(own.experts):
            raise ValueError(
                f"{name}: FSDP shards or casts these experts, so they cannot come from host memory "
                '(memory.experts = "host"): keep the parameters in the dtype that computes (model.dtype = "bfloat16"), '
                'use as many expert-parallel ranks as there are, and parallelism.dense = "replicate"'
            )
    kept = replicated(model)
    shards = {} if kept is None else {storage_key(shard): shard for shard in kept.expert_shards}
    return HostExperts(model, [own.experts for own in layers.values()], shards, device, chosen_only)
