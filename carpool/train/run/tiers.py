"""What of a run is in host memory or on disk: the optimizer's state, experts; and gradients that are not kept at all.

training.optimizer_state = "host"     moments and low bits                carpool/memory/optimizer/streamed.py
training.gradients = "consumed"       gradients, used in the backward     carpool/parallel/consumed.py
memory.experts = "host"               experts' parameters                 carpool/memory/host_experts.py
both = "disk"                         in files                            carpool/memory/disk.py, read_experts.py
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carpool.hf.build import experts_modules
from carpool.hf.host_experts import keep_experts_in_host_memory
from carpool.hf.layouts import is_logical
from carpool.hf.stored_experts import StoredExperts
from carpool.memory.disk import check_disk
from carpool.memory.host import check_host_memory
from carpool.memory.host_experts import HostExperts
from carpool.memory.optimizer import AdamW
from carpool.memory.popularity import Popularity
from carpool.parallel.consumed import ConsumedGradients
from carpool.train.checkpoints.ranks import gather
from carpool.train.config.schema import Config, MemorySection
from carpool.train.run.few_tokens import choose_few_tokens
from carpool.train.run.machine import Machine
from carpool.train.run.model import meta_model

if TYPE_CHECKING:
    from carpool.train.run.assemble import Assembled


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
            check_host_memory(host, what, ranks)
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
    if training.optimizer_state != "device" and not is_logical(run.model):
        raise ValueError(
            f'training.optimizer_state = "{training.optimizer_state}" cannot be used with experts in another order '
            '(moe.layout): their state in checkpoints would travel between GPUs. Use moe.layout="contiguous"'
        )
    halves = run.schedule.answer.name == "two-batch"
    if training.gradients == "consumed" and (halves or any(not own.layout.slot_is_home for own in run.rides)):
        raise ValueError(
            'training.gradients = "consumed" uses each gradient once it is there, but two batches at a time '
            "(moe.schedule) and replicas of experts (moe.layout) add several to one: choose another schedule or "
            'layout, or keep gradients (training.gradients = "kept")'
        )
    away = None
    if where != "device":
        _check_experts_can_be_away(run)
        on_disk = _on_disk(run) if where == "disk" else {}
        away = keep_experts_in_host_memory(run.model, **on_disk, **loading_of(run.config.memory, _few_tokens(run)))
    if training.gradients == "kept":
        return None, away
    assert isinstance(run.optimizer, AdamW)
    return ConsumedGradients(run.model, run.optimizer, away, training.max_grad_norm or math.inf), away


def check_experts_away(config: Config) -> None:
    """Raise ValueError if settings keep experts from being in host memory, or on disk, that are to be there."""
    training, memory, why = config.training, config.memory, None
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
    _refuse_away(config, why)


_MOVE = 'they are to move between ranks; use moe.layout="contiguous", without placement.every'


def _check_experts_can_be_away(run: Assembled) -> None:
    """The same for what the model says."""
    experts = [parameter for own in run.rides for parameter in own.experts.parameters()]
    computed = torch.bfloat16 if run.bf16 else run.model.dtype
    why = None
    if any(parameter.dtype != computed for parameter in experts):
        why = f"they are stored in {experts[0].dtype} and computed in {computed}; set model.dtype to the latter"
    elif not is_logical(run.model):
        why = _MOVE
    _refuse_away(run.config, why)


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
