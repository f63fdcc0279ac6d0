"""What of a run is in host memory or on disk: the optimizer's state, experts; and gradients that are not kept at all.

training.optimizer_state = "host"     moments and low bits                carpool/memory/optimizer/streamed.py
training.gradients = "consumed"       gradients, used in the backward     carpool/parallel/consumed.py
memory.experts = "host"               experts' parameters                 carpool/memory/host_experts.py
both = "disk"                         in files                            carpool/memory/disk.py, read_experts.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carpool.hf.memory.host_experts import keep_experts_in_host_memory
from carpool.hf.seam.layers import experts_modules
from carpool.hf.seam.layouts import lies_logically
from carpool.hf.weights.stored_experts import StoredExperts
from carpool.layout import ExpertLayout
from carpool.memory.disk import check_disk
from carpool.memory.host import check_host_memory
from carpool.memory.host_experts import HostExperts
from carpool.memory.optimizer import AdamW
from carpool.memory.popularity import Popularity
from carpool.parallel.consumed import ConsumedGradients
from carpool.train.config.schema import Config, MemorySection
from carpool.train.decisions.few_tokens import choose_few_tokens
from carpool.train.launch.machine import Machine
from carpool.train.launch.ranks import gather
from carpool.train.model.source import meta_model

if TYPE_CHECKING:
    from carpool.train.assembly.assemble import Assembled


def check_tiers(config: Config, machine: Machine, host: int, disk: int) -> None:
    """Raise ValueError, on all ranks, if a machine has not the host memory, or not the disk, for what its ranks will
    keep there. Collective over the ranks, if there are any.

    Args:
        host, disk: bytes of each rank."""
    if not host and not disk:
        return
    ranks = machine.topology.ranks_beside(machine.rank)
    what = "what this run keeps there (training.optimizer_state, [memory])"
    problem = None
    try:
        if host:
            if config.memory.experts_host_memory is None:
                check_host_memory(host, what, ranks)
            else:
                check_host_memory(host, what, ranks, advice="Lower memory.experts_host_memory, or use more machines")
        if disk:
            check_disk(disk, what, disk_folder(config), ranks)
    except ValueError as error:
        problem = f"rank {machine.rank}: {error}"
    if found := [text for text in gather(problem) if text]:
        raise ValueError(found[0])


def make_tiers(run: Assembled) -> tuple[ConsumedGradients | None, HostExperts | None]:
    """Of a run that has its optimizer.

    Raises:
        ValueError: what is asked for cannot be with this model, layout or schedule."""
    training, where = run.config.training, run.config.memory.experts
    check_layouts_of_tiers(run.config, [own.layout for own in run.rides], run.schedule.answer.name == "two-batch")
    away = None
    if where != "device":
        on_disk = _on_disk(run) if where == "disk" else {}
        away = keep_experts_in_host_memory(run.model, **on_disk, **loading_of(run.config.memory, _few_tokens(run)))
    if training.gradients == "kept":
        return None, away
    assert isinstance(run.optimizer, AdamW)
    return ConsumedGradients(run.model, run.optimizer, away, training.max_grad_norm or math.inf), away


def check_layouts_of_tiers(config: Config, layouts: Sequence[ExpertLayout], halves: bool) -> None:
    """Raise ValueError for layouts that keep state or experts from being elsewhere, or gradients from being consumed.

    Args:
        layouts: of the layers with experts.
        halves: two batches run at a time."""
    training, moved = config.training, not all(map(lies_logically, layouts))
    if training.optimizer_state != "device" and moved:
        raise ValueError(
            f'training.optimizer_state = "{training.optimizer_state}" cannot be used with experts in another order '
            '(moe.layout): their state in checkpoints would travel between GPUs. Use moe.layout="contiguous"'
        )
    if training.gradients == "consumed" and (halves or not all(layout.slot_is_home for layout in layouts)):
        raise ValueError(
            'training.gradients = "consumed" uses each gradient once it is there, but two batches at a time '
            "(moe.schedule) and replicas of experts (moe.layout) add several to one: choose another schedule or "
            'layout, or keep gradients (training.gradients = "kept")'
        )
    if config.memory.experts != "device" and moved:
        _refuse_away(config, _MOVE)


def check_experts_away(config: Config, bf16: bool) -> None:
    """Raise ValueError if settings keep experts from being in host memory, or on disk, that are to be there.

    Args:
        bf16: the run computes in bfloat16."""
    training, memory, why = config.training, config.memory, None
    stored = config.model.dtype or "float32"
    if memory.experts == "device":
        return
    trained = config.adapter.kind is None and training.freeze != "experts"
    if trained and training.gradients == "kept":
        why = (
            "they are trained, and their gradients would be on the device all together; set "
            'training.gradients="consumed" and training.max_grad_norm=0 (or training.clip_by="previous")'
        )
    elif trained and memory.experts_memory is not None:
        why = (
            "they are trained, so that they change in each step, and none can stay on the device "
            "(memory.experts_memory)"
        )
    elif config.moe.schedule == "two-batch":
        why = "two batches are at two layers at the same time; choose another moe.schedule"
    elif training.torch_compile:
        why = "compiled layers hold their parameters; set training.torch_compile=false"
    elif config.placement.every is not None:
        why = _MOVE
    elif bf16 and stored != "bfloat16":
        why = f"they are stored in {stored} and computed in bfloat16; set model.dtype=bfloat16"
    _refuse_away(config, why)


_MOVE = 'they are to move between ranks; use moe.layout="contiguous", without placement.every'


def _refuse_away(config: Config, why: str | None) -> None:
    if why is not None:
        where = config.memory.experts
        raise ValueError(f'memory.experts = "{where}": experts cannot come from there layer by layer, because {why}')


def _on_disk(run: Assembled) -> dict[str, Any]:
    """Where the experts of a run are on disk: in the files of its checkpoint, or, if they are trained or from scratch,
    in files of their own."""
    frozen = not any(parameter.requires_grad for own in run.rides for parameter in own.experts.parameters())
    if not frozen or run.config.model.from_scratch:
        return {"folder": disk_folder(run.config)}
    path = Path(str(run.config.model.path))
    blueprint = meta_model(path)
    modules = set(experts_modules(blueprint))
    ordered = [name for name, _ in blueprint.named_modules() if name in modules]
    first = run.rides[0].layout.homes[run.rides[0].rank][0]
    return {"files": StoredExperts(path, blueprint, ordered, first)}


def loading_of(memory: MemorySection, few: int) -> dict[str, Any]:
    """Which experts come, and which stay, as `keep_experts_in_host_memory` takes it. `few`: tokens of an expert that
    the CPU computes."""
    device, host = memory.experts_bytes
    if memory.expert_loading == "layers":
        return {"host_bytes": host}
    return {"predictor": partial(Popularity, few=few), "cache_bytes": device, "host_bytes": host, "few": few}


def _few_tokens(run: Assembled) -> int:
    if not run.config.memory.few_tokens:
        return 0
    computed = torch.bfloat16 if run.bf16 else run.model.dtype
    return choose_few_tokens(run.config.memory.few_tokens, run.rides[0], computed, run.device, run.decisions).answer


def disk_folder(config: Config) -> Path:
    """Where files of a run are made that nobody else sees: a folder that exists."""
    if config.memory.disk_folder is not None:
        folder = Path(config.memory.disk_folder)
        if not folder.is_dir():
            raise ValueError(f"memory.disk_folder = {folder}: there is no such folder; make it, or name another one")
        return folder
    folder = Path(config.training.output_dir).absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())
