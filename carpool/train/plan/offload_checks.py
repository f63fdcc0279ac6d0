"""Whether what a run wants in host memory or on disk (`carpool.train.build.offloaded`) can be there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from carpool.activations.host_memory import check_host_memory
from carpool.hf.seam.layouts import lies_logically
from carpool.layout import ExpertLayout
from carpool.memory.disk import check_disk
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine
from carpool.train.launch.ranks import gather


def check_host_and_disk(config: Config, machine: Machine, host: int, disk: int) -> None:
    """Raise ValueError, on all ranks, if a machine has not the host memory, or not the disk, for what its ranks will
    keep there. Collective over the ranks, if there are any.

    Args:
        host, disk: bytes of each rank."""
    if not host and not disk:
        return
    ranks = machine.topology.ranks_beside(machine.rank)
    what = "what this run keeps there (training.optimizer_offload, [memory])"
    problem = None
    try:
        if host:
            if config.memory.expert_host_memory is None:
                check_host_memory(host, what, ranks)
            else:
                check_host_memory(host, what, ranks, advice="Lower memory.expert_host_memory, or use more machines")
        if disk:
            check_disk(disk, what, disk_folder(config), ranks)
    except ValueError as error:
        problem = f"rank {machine.rank}: {error}"
    if found := [text for text in gather(problem) if text]:
        raise ValueError(found[0])


def check_offload_layouts(config: Config, layouts: Sequence[ExpertLayout], halves: bool) -> None:
    """Raise ValueError for layouts that keep state or experts from being elsewhere, or gradients from being consumed.

    Args:
        layouts: of the layers with experts.
        halves: two batches run at a time."""
    training, moved = config.training, not all(map(lies_logically, layouts))
    if training.optimizer_offload != "none" and moved:
        raise ValueError(
            f'training.optimizer_offload = "{training.optimizer_offload}" cannot be used with experts in another order '
            '(moe.layout): their state in checkpoints would travel between GPUs. Use moe.layout="contiguous"'
        )
    if training.optimizer_in_backward and (halves or not all(layout.slot_is_home for layout in layouts)):
        raise ValueError(
            "training.optimizer_in_backward = true uses each gradient once it is there, but two batches at a time "
            "(moe.schedule) and replicas of experts (moe.layout) add several to one: choose another schedule or "
            "layout, or keep gradients (training.optimizer_in_backward = false)"
        )
    if config.memory.experts != "device" and moved:
        _refuse_away(config, _MOVE)


def check_offloaded_experts(config: Config, bf16: bool) -> None:
    """Raise ValueError if settings keep experts from being in host memory, or on disk, that are to be there.

    Args:
        bf16: the run computes in bfloat16."""
    training, memory, why = config.training, config.memory, None
    stored = config.model.dtype or "float32"
    if memory.experts == "device":
        return
    trained = config.adapter.kind is None and training.freeze != "experts"
    if trained and not training.optimizer_in_backward:
        why = (
            "they are trained, and their gradients would be on the device all together; set "
            'training.optimizer_in_backward=true and training.max_grad_norm=0 (or training.grad_clipping="delayed")'
        )
    elif trained and memory.expert_device_memory is not None:
        why = (
            "they are trained, so that they change in each step, and none can stay on the device "
            "(memory.expert_device_memory)"
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


def disk_folder(config: Config) -> Path:
    """Where files of a run are made that nobody else sees: a folder that exists."""
    if config.memory.disk_folder is not None:
        folder = Path(config.memory.disk_folder)
        if not folder.is_dir():
            raise ValueError(f"memory.disk_folder = {folder}: there is no such folder; make it, or name another one")
        return folder
    folder = Path(config.training.output_dir).absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())
