"""Access to private parts of FSDP2 (`torch.distributed.fsdp.fully_shard`), which no other file uses.

A module that FSDP shards has a *state*; a state has the parameter *groups* that are gathered and reduced together. Both
are objects of PyTorch, and their methods are FSDP's hooks, which run around the module's forward and backward:

    group.pre_forward(module, args, kwargs)     gathers parameters
    group.post_forward(module, input, output)   frees them
    group.post_backward(*_)                     reduces gradients
    state.FINAL_CALLBACK()                      after the whole backward: reduces remaining gradients, and waits
    state.REGISTER_FINAL_CALLBACK()             registers that callback with autograd

Schedules of `carpool.ride` replace some of them temporarily (`Replaced`). PyTorch does not guarantee any of this, so
`tests/parallel/test_fsdp.py` checks each name and its behaviour, and fails first when a release changes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _from_local_no_grad
from torch.distributed.tensor import DTensor

__all__ = ["FINAL_CALLBACK", "REGISTER_FINAL_CALLBACK", "Replaced"]

FINAL_CALLBACK = "_root_post_backward_final_callback"
REGISTER_FINAL_CALLBACK = "_register_root_post_backward_final_callback"
_PHASES = {
    "idle": TrainingState.IDLE,
    "forward": TrainingState.FORWARD,
    "pre_backward": TrainingState.PRE_BACKWARD,
}


def states(model: nn.Module) -> list[Any]:
    """The states of all modules of a model that FSDP shards, each once."""
    found = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    return list({id(state): state for state in found}.values())


def states_in_forward(module: nn.Module) -> Iterator[Any]:
    """The states of the whole model, from one of its modules in a forward; none if FSDP does not shard it."""
    if isinstance(module, FSDPModule):
        yield from module._get_fsdp_state()._state_ctx.all_states


def find_all(model: nn.Module) -> None:
    """Initialise the root of a model with the states of all its modules, as its first forward would."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def reduce_in_float32(model: nn.Module) -> None:
    """Reduce the gradients of a model in float16 in float32. Before its first forward. (FSDP divides gradients of
    float16 in two steps, before and after the reduction; those that only one rank has, such as experts', once more.)"""
    for group in (group for state in states(model) for group in groups(state)):
        group.mp_policy = dataclasses.replace(group.mp_policy, reduce_dtype=torch.float32)


def divide_once(module: nn.Module) -> None:
    """Where FSDP divides gradients twice (float16, float64, all rows on one rank), have it divide by the root of the
    factor. Needs a model that FSDP has sharded already; further calls change nothing."""
    for group in groups_of(module):
        policy, factor = group.mp_policy, None if hasattr(group, "divides_once") else group.gradient_divide_factor
        dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].orig_dtype
        if factor and group.mesh_info.shard_mesh_size == 1 and dtype not in (torch.float32, torch.bfloat16):
            group.gradient_divide_factor, group.divides_once = factor**0.5, True


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP sum gradients over ranks, instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters that a forward without a backward has left, which would not see a changed shard."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def end_backward(model: nn.Module) -> None:
    """Reduce accumulated gradients as at the end of a backward, and let the current stream wait for them."""
    for state in states(model):
        if state._is_root:
            getattr(state, FINAL_CALLBACK)()


def groups(state: Any) -> list[Any]:
    """The parameter groups of a state; newer releases of PyTorch may have several."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group is not None]


def groups_of(module: nn.Module | FSDPModule | None) -> list[Any]:
    """The parameter groups of one module; none if FSDP does not shard it by itself."""
    return groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else []


def is_alone(group: Any) -> bool:
    """Whether a group is sharded over one rank only, so that nothing is communicated."""
    return bool(group.mesh_info.mesh.size() == 1)


def parameters_of(group: Any) -> list[tuple[nn.Module, str]]:
    """The parameters of a group: module and name there."""
    return [(one._module_info.module, one._module_info.param_name) for one in group.fsdp_params]


def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Inside the forward of a module that FSDP shards by itself: its whole parameters by name, leaves of autograd."""
    found = ((one._module_info, one.unsharded_param) for group in groups_of(module) for one in group.fsdp_params)
    return {info.param_name: parameter for info, parameter in found if info.module is module}


def modules_of(model: nn.Module) -> set[int]:
    """The ids of all modules whose parameters FSDP shards."""
    return {id(module) for state in states(model) for group in groups(state) for module, _ in parameters_of(group)}


def root_modules(state: Any) -> tuple[nn.Module, ...]:
    """The modules of the root's state; none for other states."""
    return tuple(state._modules) if state._is_root else ()


def set_phase(group: Any, phase: Literal["idle", "forward", "pre_backward"]) -> None:
    """Set the phase of a group."""
    group._training_state = _PHASES[phase]


def reduce_later(group: Any, reduce: Any) -> None:
    """Run the hook `reduce` (`post_backward`) so that it accumulates gradients, and neither reduces nor frees."""
    before = group.reduce_grads, group.reshard_after_backward
    group.reduce_grads = group.reshard_after_backward = False
    try:
        reduce()
    finally:
        group.reduce_grads, group.reshard_after_backward = before


def dtensor_like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """A DTensor with the sharding of `tensor` and the shard `local`, constructed as FSDP does, in a twentieth of the
    host time of `DTensor.from_local`."""
    return _from_local_no_grad(local, tensor._spec)


class TwoPhases:
    """Separate FSDP phases for a forward and a backward of one model that take turns. Without it FSDP would take the
    forward for the recomputation of a layer in the backward.

    Both may be in one module at the same time. Then the first to leave does not free the parameters.

    Args:
        model: between two steps."""

    def __init__(self, model: nn.Module) -> None:
        own = states(model)
        self._groups = [group for state in own for group in groups(state)]
        self._owners = [*self._groups, *own]
        self._others = [one._training_state for one in self._owners]

    def switch(self) -> None:
        """Switch to the phases of the other one."""
        own = [one._training_state for one in self._owners]
        for one, phase in zip(self._owners, self._others, strict=True):
            one._training_state = phase
        self._others = own

    def keep_for_other(self, replaced: Replaced) -> None:
        """Let a group stay gathered while the other one is in it."""
        for number, group in enumerate(self._groups):
            replaced.replace(group, "reshard", partial(self._reshard, number, group.reshard))

    def _reshard(self, number: int, reshard: Callable[[], None]) -> None:
        if self._others[number] not in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            reshard()


class Replaced:
    """Replaced hooks, until `restore`. A hook may be replaced repeatedly."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace a hook of a group or a state by `value`."""
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Restore all hooks."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
