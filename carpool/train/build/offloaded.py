"""What of a run is in host memory or on disk: the optimizer's state, experts; and gradients that are not kept at all.

training.optimizer_offload = "host"     moments and low bits                carpool/optim/offloaded_state.py
training.optimizer_in_backward = true       gradients, used in the backward     carpool/optim/in_backward.py
memory.experts = "host"               experts' parameters                 carpool/experts/host_experts.py
both = "disk"                         in files                            carpool/memory/disk.py, read_experts.py

How many tokens an expert in host memory may have for the CPU to compute it (see
`carpool.planner.decisions.chosen` for when that is chosen):

    memory.cpu_expert_tokens   a run that starts                        a run that is resumed
    auto                measured, before the first step          as recorded in run.json
    a number            that one                                 that one

By APTMoE (SC 2024) the CPU computes an expert if t_cpu(tokens) < t_load + t_gpu(tokens), of which all three are
measured here on all ranks at the same time, because they share the CPU and its memory. Both grow with the tokens, the
CPU's time faster, so that one number says it all. A number, and not the time of a step, also makes a step that is
repeated the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from carpool.experts import ExpertWeights
from carpool.experts.reference import expert_rows
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.seam.experts_module import weight_names
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.weights.stored_experts import StoredExperts
from carpool.activations.host_memory import host_zeros
from carpool.experts.host_experts import HostExperts
from carpool.optim import OptimizerBase
from carpool.memory.popularity import Popularity
from carpool.metrics.host import synchronize
from carpool.optim.in_backward import ConsumedGradients
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, Record
from carpool.train.blueprint import meta_model
from carpool.train.config.schema import Config, MemorySection
from carpool.train.launch.machine import device_name
from carpool.train.plan.resolve import Plan
from carpool.train.plan.resolve import check_offload_layouts, disk_folder


def make_offload(
    plan: Plan, model: PreTrainedModel, layers: Sequence[ExpertRides], optimizer: OptimizerBase, halves: bool
) -> tuple[ConsumedGradients | None, HostExperts | None]:
    """(what uses gradients in the backward, what keeps experts away from the device), of a model that has its
    optimizer; None: nothing does. All ranks together.

    Args:
        layers: those of the model that ride.
        halves: two batches run at a time.

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
    if not training.optimizer_in_backward:
        return None, away
    assert optimizer.in_backward
    return ConsumedGradients(model, optimizer, away, training.max_grad_norm or math.inf), away


def _on_disk(config: Config, layers: Sequence[ExpertRides]) -> dict[str, Any]:
    """Where the experts of a run are on disk: in the files of its checkpoint, or, if they are trained or from scratch,
    in files of their own."""
    frozen = not any(parameter.requires_grad for own in layers for parameter in own.experts.parameters())
    if not frozen or config.model.from_scratch:
        return {"folder": disk_folder(config)}
    path = Path(str(config.model.path))
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


COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Different experts, so that none is in the CPU's caches.
_EXPERTS, _REPEATS = 8, 3


def _read(record: Record) -> int:
    return int(record["tokens"])


FEW_KIND: Kind[int] = Kind("cpu_expert_tokens", lambda tokens: {"tokens": tokens}, _read, "microseconds")


def choose_few_tokens(
    wanted: int | str, own: ExpertRides, dtype: torch.dtype, device: torch.device, decisions: Decisions
) -> Chosen[int]:
    """Choose for all layers, by the experts of one. All ranks together.

    Args:
        wanted: `memory.cpu_expert_tokens`.
        dtype: in which experts compute.
        decisions: of the run."""
    shapes = [tuple(own.experts.get_parameter(one).shape[1:]) for one in weight_names(own.experts) if one is not None]
    shape = {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "experts": [list(one) for one in shapes],
    }

    def decide(kept: Chosen[int] | None, note: str) -> tuple[Chosen[int], bool]:
        if wanted != "auto":
            return Chosen(int(wanted), shape, "given", "asked for"), False
        if kept is not None:
            return kept, False
        if device.type != "cuda":
            return Chosen(0, shape, "default", f"there is no GPU to which experts would come{note}"), False
        return Chosen(0, shape, "default", f"to be measured{note}"), True

    def measure(fallback: Chosen[int]) -> Chosen[int]:
        times = measured_times(own, dtype, device)
        few = most_tokens(times)
        cpu, loaded = (", ".join(f"{one[n]:,.0f}" for n in COUNTS) for one in (times["cpu"], times["loaded"]))
        why = f"measured, in microseconds for {', '.join(map(str, COUNTS))} tokens: CPU {cpu}; loaded {loaded}"
        return Chosen(few, fallback.shape, "measured", why, times)

    return decisions.choose(FEW_KIND, shape, decide, measure)


def most_tokens(times: Mapping[str, Mapping[int, float]]) -> int:
    """The most tokens up to which the CPU is the faster one; 0: it never is."""
    few = 0
    for count in COUNTS:
        if times["cpu"][count] >= times["loaded"][count]:
            break
        few = count
    return few


def measured_times(own: ExpertRides, dtype: torch.dtype, device: torch.device) -> dict[str, dict[int, float]]:
    """Microseconds of an expert by its tokens, on the mean over ranks: "cpu", with rows that go there and come back,
    and "loaded", which is copied to the device first."""
    assert own.function is not None
    names, function = weight_names(own.experts), own.function
    hidden = own.experts.get_parameter(names[1]).shape[1 if not function.transposed else 2]
    shapes = [None if name is None else own.experts.get_parameter(name).shape[1:] for name in names]
    hosts = [[None if one is None else host_zeros(one, dtype, device) for one in shapes] for _ in range(_EXPERTS)]
    heres = [None if one is None else torch.empty(one, dtype=dtype, device=device) for one in shapes]
    seconds = torch.zeros(2, len(COUNTS), dtype=torch.float64, device=device)
    for place, count in enumerate(COUNTS):
        rows = torch.zeros(count, hidden, dtype=dtype, device=device)

        def on_cpu(number: int, rows: torch.Tensor = rows) -> None:
            expert_rows(rows.cpu(), ExpertWeights.of(hosts[number]), function).to(device)

        def loaded(number: int, rows: torch.Tensor = rows) -> None:
            for host, here in zip(hosts[number], heres, strict=True):
                if host is not None and here is not None:
                    here.copy_(host, non_blocking=True)
            expert_rows(rows, ExpertWeights.of(heres), function)

        for which, compute in enumerate((on_cpu, loaded)):
            seconds[which, place] = _seconds(compute, device)
    if dist.is_initialized():
        dist.all_reduce(seconds)
        seconds /= dist.get_world_size()
    cpu, load = (1e6 * seconds).tolist()
    return {"cpu": dict(zip(COUNTS, cpu, strict=True)), "loaded": dict(zip(COUNTS, load, strict=True))}


@torch.no_grad()
def _seconds(compute: Callable[[int], Any], device: torch.device) -> float:
    """Of one expert; the best of some rounds over all of them."""
    best = float("inf")
    for _ in range(_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        for number in range(_EXPERTS):
            compute(number)
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / _EXPERTS)
    return best
