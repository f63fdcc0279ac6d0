"""Parameters that were added after the model was sharded: LoRA adapters and the like.

FSDP averages the gradients of the parameters that it sharded. Whatever is added later (peft puts two small matrices
beside each target module) it does not know: every rank would start from its own random values, train them on its own
tokens only, and nothing would say so. Two remedies:

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    carpool.hf.synchronize_adapters(model)          # same start on all ranks, averaged gradients from now on

and `check_adapters`, which Carpool's layers call in the first forward of a training run, and which raises where that
was forgotten. Adapters are small, so they are replicated rather than sharded; the cost is one all-reduce for each.

What peft computes from sharded weights themselves it cannot do here, and says so in PyTorch's words: adapters of the
experts' weights, DoRA, and `merge_and_unload` end in "got mixed torch.Tensor and DTensor", `modules_to_save` in "FSDP
does not support deepcopy", on all ranks. Save the adapter, and merge it into a model that one process has loaded. PiSSA
and `add_adapter` followed by `save_pretrained` do not come back: use `get_peft_model` with another initialisation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.parallel import fsdp


def synchronize_adapters(model: Any) -> list[str]:
    """Make trainable parameters that are not sharded equal on all ranks, and average their gradients over the ranks.

    Call it on all ranks, after the adapters were added and before the optimizer is made. Gradients are averaged after
    each backward, also with gradient accumulation and activation checkpointing.

    Args:
        model: a sharded transformers model, or a peft model around one.

    Returns:
        The names of the parameters that it took care of.

    Raises:
        ValueError: if the model was not sharded by transformers, with tensor parallelism, or for adapters on the
            experts' own weights.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_mesh_manager", None) is None:
        raise ValueError("this model is not sharded; load it with a DistributedConfig first, then add the adapters")
    if base.config.distributed_config.tp_size > 1:
        raise ValueError("adapters beside tensor-parallel modules are sharded with them, so use tp_size=1 with Carpool")
    # peft wraps the module whose parameter it adapts; on DTensors of another mesh its product is not even defined.
    if wrapped := [name for name, module in model.named_modules() if _adapts_experts(module)]:
        raise ValueError(
            f"{wrapped[0]} adapts the experts' own weights, which are spread over the ranks; peft cannot do that. "
            "Choose other targets (attention, shared experts), or train the experts themselves"
        )
    groups = [base._mesh_manager.get_mesh(axis) for axis in ("fsdp", "dp_replicate")]
    meshes = [mesh for mesh in groups if mesh.size() > 1]

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        for mesh in meshes:
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad /= mesh.size()

    names = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or isinstance(parameter, DTensor) or hasattr(parameter, "_carpool_average"):
            continue
        for mesh in meshes:
            dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)
        parameter._carpool_average = parameter.register_post_accumulate_grad_hook(average)
        names.append(name)
    return names


def check_adapters(experts: nn.Module) -> None:
    """Raise ValueError if the model around an FSDP-sharded module trains parameters that FSDP does not know.

    To be called inside a forward pass, where FSDP knows which of its modules is the root.
    """
    states = list(fsdp.states_in_forward(experts))
    sharded = (one for state in states for group in fsdp.groups(state) for one in fsdp.parameters_of(group))
    known = {(id(module), name) for module, name in sharded}
    unknown = [
        f"{prefix}.{name}"
        for state in states
        for root in fsdp.root_modules(state)
        for prefix, module in root.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and (id(module), name) not in known and not hasattr(parameter, "_carpool_average")
    ]
    if unknown:
        raise ValueError(
            f"{len(unknown)} trainable parameters were added after the model was sharded ({', '.join(unknown[:2])}, "
            "...), so their gradients would not be averaged over the ranks; call "
            "carpool.hf.synchronize_adapters(model) on all ranks after adding them"
        )


def _adapts_experts(module: nn.Module) -> bool:
    """Whether this is a peft wrapper of a parameter (not of a module) of one of Carpool's experts modules."""
    wrapper: Any = module
    wraps = hasattr(wrapper, "parameter_name") and hasattr(wrapper, "get_base_layer")
    return wraps and hasattr(wrapper.get_base_layer(), "_carpool_rides")
