"""What of a run is in host memory: the optimizer's state, experts; and gradients that are not kept at all.

training.optimizer_state = "host"     moments and low bits                carpool/memory/optimizer/streamed.py
training.gradients = "consumed"       gradients, used in the backward     carpool/parallel/consumed.py
memory.experts = "host"               experts' parameters                 carpool/memory/host_experts.py
"""

from __future__ import annotations

import math

import torch

from carpool.hf.host_experts import keep_experts_in_host_memory
from carpool.hf.layouts import is_logical
from carpool.memory.host import check_host_memory
from carpool.memory.host_experts import HostExperts
from carpool.memory.optimizer import AdamW
from carpool.parallel.consumed import ConsumedGradients
from carpool.train.checkpoints.ranks import gather
from carpool.train.run.state import RunState


def check_host_memory_of_ranks(run: RunState, needed: int) -> None:
    """Raise ValueError, on all ranks, if a machine has not the host memory that its ranks will keep. Collective.

    Args:
        needed: bytes of each rank."""
    if not needed:
        return
    problem = None
    try:
        what = "what this run keeps there (training.optimizer_state, [memory])"
        check_host_memory(needed, what, run.topology.ranks_beside(run.rank))
    except ValueError as error:
        problem = f"rank {run.rank}: {error}"
    if found := [text for text in gather(problem) if text]:
        raise ValueError(found[0])


def make_tiers(run: RunState) -> tuple[ConsumedGradients | None, HostExperts | None]:
    """Of a run that has its optimizer.

    Raises:
        ValueError: what is asked for cannot be with this model, layout or schedule."""
    training, host = run.config.training, run.config.memory.experts == "host"
    if training.optimizer_state == "host" and not is_logical(run.model):
        raise ValueError(
            'training.optimizer_state = "host" cannot be used with experts in another order (moe.layout): their '
            'state in checkpoints would travel between GPUs. Use moe.layout="contiguous"'
        )
    halves = run.schedule.answer.name == "two-batch"
    if training.gradients == "consumed" and (halves or any(not own.layout.slot_is_home for own in run.rides)):
        raise ValueError(
            'training.gradients = "consumed" uses each gradient once it is there, but two batches at a time '
            "(moe.schedule) and replicas of experts (moe.layout) add several to one: choose another schedule or "
            'layout, or keep gradients (training.gradients = "kept")'
        )
    away = None
    if host:
        _check_experts_can_be_away(run, halves)
        away = keep_experts_in_host_memory(run.model)
    if training.gradients == "kept":
        return None, away
    assert isinstance(run.optimizer, AdamW)
    return ConsumedGradients(run.model, run.optimizer, away, training.max_grad_norm or math.inf), away


def _check_experts_can_be_away(run: RunState, halves: bool) -> None:
    """Raise ValueError unless experts can be in host memory."""
    experts = [parameter for own in run.rides for parameter in own.experts.parameters()]
    computed = torch.bfloat16 if run.bf16 else run.model.dtype
    why = None
    if run.config.training.gradients == "kept" and any(parameter.requires_grad for parameter in experts):
        why = (
            "they are trained, and their gradients would be on the device all together; set "
            'training.gradients="consumed" and training.max_grad_norm=0 (or training.clip_by="previous")'
        )
    elif any(parameter.dtype != computed for parameter in experts):
        why = f"they are stored in {experts[0].dtype} and computed in {computed}; set model.dtype to the latter"
    elif halves:
        why = "two batches are at two layers at the same time; choose another moe.schedule"
    elif run.config.training.torch_compile:
        why = "compiled layers hold their parameters; set training.torch_compile=false"
    elif not is_logical(run.model) or run.config.placement.every is not None:
        why = 'they are to move between ranks; use moe.layout="contiguous", without placement.every'
    if why is not None:
        raise ValueError(f'memory.experts = "host": experts cannot come from host memory layer by layer, because {why}')
