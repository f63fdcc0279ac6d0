"""The experts of a transformers model in host memory: which parameters these are, and which models can do so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from carpool.hf.expert_parallel import required_rides
from carpool.hf.quantised_base import base_of
from carpool.memory.host_experts import HostExperts, storage_key
from carpool.memory.next_experts import Predictor
from carpool.memory.read_experts import ExpertFiles
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated


def keep_experts_in_host_memory(
    model: nn.Module,
    device: torch.device | None = None,
    predictor: Callable[[int, int], Predictor] | None = None,
    cache_bytes: int = 0,
    files: ExpertFiles | None = None,
    host_bytes: int = 0,
    folder: Path | None = None,
) -> HostExperts:
    """Move the experts of a model to host memory; its layers bring them in when it is their turn. Called once whatever
    holds these parameters exists: optimizers, `Replicated`.

    Args:
        device: which computes; None: where the experts are.
        predictor, cache_bytes, files, host_bytes, folder: as `HostExperts`.

    Raises:
        ValueError: FSDP shards or casts them, which moves them by itself; a predictor with several ranks.
    """
    layers = required_rides(model)
    for name, own in layers.items():
        if base_of(own.experts):
            raise ValueError(f"{name}: experts that are quantised (adapter.base_dtype) stay on their device")
        if predictor is not None and own.num_ranks > 1:
            raise ValueError(f"{name}: which experts other ranks choose is not known here; use one rank")
        if fsdp.groups_of(own.experts):
            raise ValueError(
                f"{name}: FSDP shards or casts these experts, so they cannot come from host memory "
                'or disk (memory.experts): keep the parameters in the dtype that computes (model.dtype = "bfloat16"), '
                'use as many expert-parallel ranks as there are, and parallelism.dense = "replicate"'
            )
    kept = replicated(model)
    shards = {} if kept is None else {storage_key(shard): shard for shard in kept.expert_shards}
    modules = [own.experts for own in layers.values()]
    return HostExperts(model, modules, shards, device, predictor, cache_bytes, files, host_bytes, folder)
