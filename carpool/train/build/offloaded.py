"""What of a run is in host memory or on disk: the optimizer's state, experts; and gradients that are not kept at all.

training.optimizer_offload = "host"     moments and low bits                carpool/optim/offloaded_state.py
training.optimizer_in_backward = true       gradients, used in the backward     carpool/optim/in_backward.py
memory.experts = "host"               experts' parameters                 carpool/experts/host_experts.py
both = "disk"                         in files                            carpool/memory/disk.py, read_experts.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from carpool.experts.host_experts import HostExperts
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.stored_experts import StoredExperts
from carpool.memory.popularity import Popularity
from carpool.optim import OptimizerBase
from carpool.optim.in_backward import ConsumedGradients
from carpool.train.blueprint import meta_model
from carpool.train.build.measured_choices import choose_few_tokens
from carpool.train.config.schema import Config, MemorySection
from carpool.train.plan.resolve import Plan, check_offload_layouts, disk_folder


def make_offload(
    plan: Plan, model: PreTrainedModel, layers: Sequence[ExpertRides], optimizer: OptimizerBase, halves: bool
) -> tuple[ConsumedGradients | None, HostExperts | None]:
    """(what uses gradients in the backward, what keeps experts away from the device), of a model that has its
    optimizer; None: nothing does. All ranks together. `halves`: two batches run at a time.

    Raises:
        ValueError: what is asked for cannot be with this model, layout or schedule."""
    config, training, memory, away = plan.config, plan.config.training, plan.config.memory, None
    check_offload_layouts(config, [own.layout for own in layers], halves)
    if memory.experts != "device":
        on_disk = _on_disk(config, layers) if memory.experts == "disk" else {}
        few = 0
        if memory.cpu_expert_tokens:
            assert plan.machine.device is not None
            wanted, device = memory.cpu_expert_tokens, plan.machine.device
            few = choose_few_tokens(wanted, layers[0], plan.dtype, device, plan.decisions).answer
        away = keep_experts_in_host_memory(model, **on_disk, **loading_of(memory, few))
    if not plan.candidate.optimizer_in_backward:
        return None, away
    assert optimizer.in_backward
    return ConsumedGradients(model, optimizer, away, training.max_grad_norm or math.inf), away


def _on_disk(config: Config, layers: Sequence[ExpertRides]) -> dict[str, Any]:
    """Where the experts of a run are on disk: in the files of its checkpoint, or, if they are trained or from scratch,
    in files of their own."""
    frozen = not any(parameter.requires_grad for own in layers for parameter in own.experts.parameters())
    if not frozen or (path := config.model.weights) is None:
        return {"folder": disk_folder(config)}
    blueprint = meta_model(path)
    modules = set(experts_modules(blueprint))
    ordered = [name for name, _ in blueprint.named_modules() if name in modules]
    first = layers[0].layout.homes[layers[0].rank][0]
    return {"files": StoredExperts(path, blueprint, ordered, first)}


def loading_of(memory: MemorySection, few: int) -> dict[str, Any]:
    """Which experts come, and which stay, as `keep_experts_in_host_memory` takes it. `few`: tokens of an expert that
    the CPU computes."""
    device, host = memory.experts_bytes
    if memory.expert_loading == "layers":
        return {"host_bytes": host}
    return {"predictor": partial(Popularity, few=few), "cache_bytes": device, "host_bytes": host, "few": few}
