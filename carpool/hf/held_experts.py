"""The frozen experts of a transformers model in 4 or 8 bits, under adapters (QLoRA, arXiv 2305.14314).

Experts are almost all of a model (Qwen3-30B-A3B: 29 of 30.5 billion parameters), so they alone are quantised.

    experts.gate_up_proj, .down_proj    stand for their shape, dtype and device, and have no memory
    codes and scales                    beside them, of this rank's experts; rides read these

A model is quantised while it is loaded, where Transformers gives an experts module its parameter: no more than one
layer's experts are there as the files have them. Codes depend on the files' values alone, so a resumed run finds the
same. Such a model cannot be saved, and adapters cannot be merged into it: that is for the files it was loaded from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import core_model_loading, modeling_utils

from carpool.experts import Experts, ExpertWeights
from carpool.experts.base import stand_in
from carpool.experts.host_experts import HostExperts, storage_key
from carpool.experts.on_host import FewOnHost
from carpool.experts.quantised import Kind, quantise, why_not
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.experts_module import QUANTISED, base_of, expert_function, weight_names
from carpool.hf.sharding import replaced
from carpool.memory.next_experts import Predictor
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated

_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


def check_can_be_quantised(name: str, experts: nn.Module, kind: Kind) -> None:
    """Raise ValueError for experts that cannot be quantised. `name`: of the module."""
    if expert_function(experts) is None:
        raise ValueError(
            f"{name} ({type(experts).__name__}) runs the model's own forward, which cannot read weights in {kind}: "
            'leave adapter.base_dtype out (base="none")'
        )
    for weight in weight_names(experts)[:2]:
        if why := why_not(kind, experts.get_parameter(weight).shape):
            other = ' (adapter.base_dtype="int8" takes any size)' if kind == "nf4" else ""
            raise ValueError(f"{name}.{weight} cannot be kept in {kind}: {why}{other}")


def quantise_experts(model: nn.Module, kind: Kind) -> int:
    """Quantise the experts of a model that is loaded, layer by layer. Before adapters are added.

    Returns:
        The bytes of codes and scales on this rank. ValueError: experts that cannot be quantised, or that FSDP shards.
    """
    layers = {name: module for name, module in model.named_modules() if "_carpool_rides" in vars(module)}
    if not layers:
        raise ValueError("this model has no layers of Carpool, whose experts could be quantised")
    for name, experts in layers.items():
        check_can_be_quantised(name, experts, kind)
        if fsdp.groups_of(experts):
            raise ValueError(f"{name}: FSDP shards these experts, so they cannot be quantised")
    for experts in layers.values():
        for weight in weight_names(experts)[:2]:
            _quantise_parameter(experts, weight, kind)
    return sum(one.nbytes for experts in layers.values() for one in base_of(experts).values())


@contextmanager
def quantised_while_loading(kind: Kind | None) -> Iterator[None]:
    """Inside, `from_pretrained` quantises experts as it reads them, for layers of Carpool. None: it does not.

        with quantised_while_loading("nf4"):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": 0})
        carpool.hf.install(model)  # on one process, without a DistributedConfig

    Raises:
        ValueError: experts that cannot be quantised.
    """
    if kind is None:
        yield
        return
    put, in_turn = core_model_loading.set_param_for_module, os.environ.get(_IN_TURN)

    def put_quantised(model: Any, name: str, *args: Any) -> None:
        put(model, name, *args)
        path, _, weight = name.rpartition(".")
        experts: Any = model.get_submodule(path)
        if not hasattr(experts, "is_transposed") or weight not in weight_names(experts)[:2]:
            return
        if not experts._parameters[weight].is_meta:  # of another shape than the model's
            check_can_be_quantised(path, experts, kind)
            _quantise_parameter(experts, weight, kind)

    # Other threads would read weights faster than this one quantises them.
    os.environ[_IN_TURN] = "1"
    # The warm-up takes the memory that the whole model would need.
    no_warm_up = replaced(modeling_utils, "caching_allocator_warmup", lambda *_: None)
    try:
        with replaced(core_model_loading, "set_param_for_module", put_quantised), no_warm_up:
            yield
    finally:
        del os.environ[_IN_TURN]
        os.environ.update({} if in_turn is None else {_IN_TURN: in_turn})


@torch.no_grad()
def _quantise_parameter(experts: Any, name: str, kind: Kind) -> None:
    parameter = experts._parameters[name]
    whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    if not base_of(experts):
        object.__setattr__(experts, QUANTISED, {})
        experts.register_state_dict_post_hook(_leave_out)
    base_of(experts)[name] = quantise(whole, kind)
    empty = stand_in(whole.shape, whole.dtype, whole.device)
    if isinstance(parameter, DTensor):
        empty = fsdp.dtensor_like(empty, parameter)
    experts._parameters[name] = nn.Parameter(empty, requires_grad=False)
    experts._parameters[name]._is_hf_initialized = True  # as transformers says of what it has loaded


def _leave_out(experts: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state has no values for what is quantised: whoever loads it as a model is told that they are missing."""
    for name in base_of(experts):
        state.pop(prefix + name, None)


# ---------------------------------------------------------------------------------------------------------------------
# The experts of a transformers model in host memory: which parameters these are, and which models can do so.


def keep_experts_in_host_memory(
    model: nn.Module,
    device: torch.device | None = None,
    predictor: Callable[[int, int], Predictor] | None = None,
    few: int = 0,
    **options: Any,
) -> HostExperts:
    """Move the experts of a model to host memory; its layers bring them in when it is their turn. Called once
    optimizers and `Replicated`, which hold these parameters, exist. `device`: which computes; None: where the experts
    are.

    Raises:
        ValueError: FSDP shards or casts them, which moves them by itself; or with `few` experts that are not grouped,
            or tokens that arrive in parts.
    """
    layers, kept, by_fsdp = required_rides(model), replicated(model), fsdp.modules_of(model)
    for name, own in layers.items():
        if base_of(own.experts):
            raise ValueError(f"{name}: experts that are quantised (adapter.base_dtype) stay on their device")
        if few and getattr(own.compute, "name", None) not in FewOnHost.beside:
            raise ValueError(
                f"{name}: the CPU computes experts beside {' or '.join(FewOnHost.beside)} ones (moe.experts), so "
                "memory.cpu_expert_tokens cannot be used"
            )
        in_parts = own.transport is not None and own.transport.rides_in_parts
        if few and not own.schedule.kind.whole and in_parts:
            raise ValueError(
                f"{name}: the CPU computes experts once all rows have come, and the rows of moe.schedule = "
                f"{own.schedule.name!r} come in parts: choose another schedule, or memory.cpu_expert_tokens=0"
            )
        sharded = kept is None and any(isinstance(parameter, DTensor) for parameter in own.experts.parameters())
        if sharded or id(own.experts) in by_fsdp:
            raise ValueError(
                f"{name}: FSDP shards or casts these experts, so they cannot come from host memory "
                'or disk (memory.experts): keep the parameters in the dtype that computes (model.dtype = "bfloat16"), '
                'use as many expert-parallel ranks as there are, and parallelism.data_parallel = "zero1"'
            )
    shards = {} if kept is None else {storage_key(shard): shard for shard in kept.expert_shards}
    modules = [own.experts for own in layers.values()]
    away = HostExperts(model, modules, shards, device, predictor, few=few, **options)
    for number, own in enumerate(layers.values()):
        if predictor is not None:
            own.on_choice = partial(_tell, away, own, number)
        if few:
            own.set_experts_beside(partial(_with_few, away, own, number))
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


def _with_few(away: HostExperts, own: ExpertRides, number: int, experts: Experts) -> FewOnHost:
    assert own.function is not None
    names = [name for name, _ in own.experts.named_parameters()]
    places = [None if name is None else names.index(name) for name in weight_names(own.experts)]

    def host(expert: int) -> ExpertWeights:
        values = away.host_values(number, expert)
        return ExpertWeights.of(None if place is None else values[place] for place in places)

    return FewOnHost(experts, own.function, partial(away.few_of, number), host)
