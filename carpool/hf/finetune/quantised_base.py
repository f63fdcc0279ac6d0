"""The frozen experts of a transformers model in 4 or 8 bits, under adapters (QLoRA, arXiv 2305.14314).

Experts are almost all of a model (Qwen3-30B-A3B: 29 of 30.5 billion parameters), so they alone are quantised
(`carpool.experts.quantised`); attention, routers, embeddings and norms stay as they are.

    experts.gate_up_proj, .down_proj    stand for their shape, dtype and device, and have no memory
    codes and scales                    beside them, of this rank's experts; rides read these

A model is quantised while it is loaded. Transformers reads tensor by tensor, puts a layer's experts together, keeps
this rank's, and gives the module its parameter: there it is quantised, so that no more than one layer's experts are
there as the files have them. Codes depend on nothing but the files' values, so a run that is resumed finds the same.

Such a model cannot be saved, and adapters cannot be merged into it: that is for the files that it was loaded from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import core_model_loading, modeling_utils

from carpool.experts.base import stand_in
from carpool.experts.quantised import Kind, quantise, why_not
from carpool.hf.seam.experts_module import QUANTISED, base_of, expert_function, weight_names
from carpool.parallel import fsdp

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
        The bytes of codes and scales on this rank.

    Raises:
        ValueError: experts that cannot be quantised, or that FSDP shards.
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
    put, warm_up = core_model_loading.set_param_for_module, modeling_utils.caching_allocator_warmup
    in_turn = os.environ.get(_IN_TURN)

    def put_quantised(model: Any, name: str, *args: Any) -> None:
        put(model, name, *args)
        path, _, weight = name.rpartition(".")
        experts: Any = model.get_submodule(path)
        if not hasattr(experts, "is_transposed") or weight not in weight_names(experts)[:2]:
            return
        if not experts._parameters[weight].is_meta:  # of another shape than the model's
            check_can_be_quantised(path, experts, kind)
            _quantise_parameter(experts, weight, kind)

    loading: Any = core_model_loading
    models: Any = modeling_utils
    loading.set_param_for_module = put_quantised
    # It takes the memory that the whole model would need.
    models.caching_allocator_warmup = lambda *_: None
    # Other threads would read weights faster than this one quantises them.
    os.environ[_IN_TURN] = "1"
    try:
        yield
    finally:
        loading.set_param_for_module, models.caching_allocator_warmup = put, warm_up
        if in_turn is None:
            del os.environ[_IN_TURN]
        else:
            os.environ[_IN_TURN] = in_turn


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
