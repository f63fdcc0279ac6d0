"""Parameters that were added after the model was sharded: LoRA adapters and the like.

FSDP averages the gradients of the parameters that it sharded, and knows nothing of those that peft adds later: every
rank would start from its own random values and train them on its own tokens. So Carpool makes them equal on all ranks
and averages their gradients, with one all-reduce each. Adapters of experts are as large as there are experts: each rank
has those of its own (`carpool.hf.expert_adapters`).

    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))          needs nothing more

PyTorch tells `watch_adapters` when a module gets a submodule, so it sees a tuner of peft that takes a model with
Carpool's layers, and changes three methods of that tuner:

  - `inject_adapter` takes over the adapters of experts. On a sharded model it refuses what peft would compute from
    sharded weights (PiSSA, copies of modules), and adds a hook that synchronises new adapter parameters before each
    forward, also those that loading or `set_adapter` puts in place later.
  - `merge_and_unload` and `merge_adapter` are refused on a sharded model, to which they add a whole matrix, and on one
    that is quantised.

Prompt tuning and its kin are refused: their parameters are outside the model, and they read its embedding outside its
forward. A model with an adapter of `model.add_adapter` gets a `save_pretrained` of its own: that of transformers
gathers the adapter on one rank and the whole model on the others, and never returns.

Parameters that come another way are for `synchronize_adapters`. Where that was forgotten, `check_adapters` raises in
the first forward of a training run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook

from carpool.hf.expert_adapters import full, is_expert_adapter, take_over
from carpool.hf.linear_adapters import look_up_trained_rows, multiply_in_16_bits
from carpool.hf.seam.experts_module import base_of
from carpool.hf.seam.refusals import known_to_fsdp
from carpool.hf.sharding import non_expert_mesh, replaced
from carpool.parallel import fsdp
from carpool.parallel.replicated import replicated, sharded_parameters

# What starts from random numbers alone. Every other way of peft's to start reads the base weights or the data.
RANDOM_STARTS = (True, False, "gaussian", "orthogonal")
INSTEAD = "LoRA of linear layers and experts works (init_lora_weights True, False, 'gaussian' or 'orthogonal')"


def watch_adapters() -> None:
    """From now on, look after the adapters that peft adds to models with Carpool's layers."""
    register_module_module_registration_hook(_look_after)


def _look_after(owner: Any, name: str, model: nn.Module | None) -> None:
    """Change the tuner `owner` as the module's docstring says, if that is what it is."""
    if name == "base_model" and getattr(owner, "_is_prompt_learning", False) and _is_sharded(model):
        raise ValueError(
            f"{owner.peft_type.value} cannot be used on a sharded model: its parameters are outside the model, and it "
            f"reads the embedding, of which each rank has a part. {INSTEAD}"
        )
    if name != "model" or not hasattr(owner, "inject_adapter") or not _has_layers(model):
        return
    owner.inject_adapter = partial(_inject, owner, owner.inject_adapter)
    assert model is not None
    if _is_sharded(model):
        owner.merge_and_unload = owner.merge_adapter = _refuse_merge
    elif any(base_of(module) for module in model.modules()):
        owner.merge_and_unload = owner.merge_adapter = _refuse_quantised


def _has_layers(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(hasattr(module, "_carpool_rides") for module in model.modules())


def _is_sharded(model: Any) -> bool:
    """Whether this is a model of transformers that is sharded and has layers of Carpool."""
    if getattr(model, "_mesh_manager", None) is None or not _has_layers(model):
        return False
    whole = replicated(model) is None and not fsdp.states(model)
    return not whole or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _inject(tuner: Any, inject: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """peft's `inject_adapter`: adapters of experts are taken over; on a sharded model there are refusals before it, and
    the synchronisation for later."""
    sharded = _is_sharded(model)
    try:
        if sharded:
            _check_config(model, tuner.peft_config[adapter_name])
        with _whole_weights(), patterns_of_parameters():
            inject(model, adapter_name, *args, **kwargs)
    except ValueError:
        if not hasattr(model, "peft_config"):  # `model.add_adapter` has already said that there is an adapter
            model._hf_peft_config_loaded = False
        raise
    take_over(model, adapter_name)
    multiply_in_16_bits(model, adapter_name)
    look_up_trained_rows(model)
    if not sharded:
        return
    if hasattr(model, "_carpool_adapters"):  # the hook of an earlier adapter
        model._carpool_adapters.remove()
    model._carpool_adapters = model.register_forward_pre_hook(partial(_synchronize_new, _adapter_parameters(model)))
    model.save_pretrained = partial(_save, model)
    # Of a model that says it has tensor parallelism, if over one rank, peft's `save_pretrained` gathers all weights.
    model._tp_size = None


@contextmanager
def patterns_of_parameters() -> Iterator[None]:
    """Inside, peft does not warn that patterns of ranks fit nothing, as it does where they fit parameters alone, such
    as experts.down_proj."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        yield


@contextmanager
def _whole_weights() -> Iterator[None]:
    """Inside, adapters of sharded weights are as large as those of whole ones (peft takes copies of a sharded model for
    tensor parallelism), DoRA starts from norms of whole weights, and sharded modules can be copied (PyTorch's own way
    copies the memory of a DTensor, which has none). All ranks together."""
    from peft.tuners import lora
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    tokens: Any = TrainableTokensLayer
    dora: Any = lora.dora
    layer: Any = lora.layer
    sharded: Any = DTensor
    read, sizes = dora.dequantize_module_weight, layer._get_in_out_features

    def whole(module: nn.Module) -> torch.Tensor:
        weight: torch.Tensor = read(module)
        return full(weight) if isinstance(weight, DTensor) else weight

    def whole_sizes(module: nn.Module) -> Any:
        return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else sizes(module)

    def copied(tensor: Any, memo: dict[int, Any]) -> Any:
        memo[id(tensor)] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        return memo[id(tensor)]

    sharded.__deepcopy__ = copied
    # What rows of new tokens are copied from.
    tokens.weight = property(lambda layer: full(layer.base_layer.weight))
    try:
        with (
            replaced(dora, "dequantize_module_weight", whole),
            replaced(layer, "_get_in_out_features", whole_sizes),
        ):
            yield
    finally:
        del sharded.__deepcopy__, tokens.weight


def _adapter_parameters(model: nn.Module) -> list[dict[str, nn.Parameter | None]]:
    """The dictionaries in which modules of peft hold the parameters that they added; they follow replacements."""
    added = (
        attrgetter(name)(module) for module in model.modules() for name in getattr(module, "adapter_layer_names", ())
    )
    return [leaf._parameters for one in added for leaf in one.modules() if leaf._parameters]


def _synchronize_new(adapters: list[dict[str, nn.Parameter | None]], model: nn.Module, _: Any) -> None:
    """Before a forward: synchronise if an adapter's parameter is not. All ranks run the forward, so all come here."""
    parameters = (parameter for leaf in adapters for parameter in leaf.values() if parameter is not None)
    if any(parameter.requires_grad and not hasattr(parameter, "_carpool_average") for parameter in parameters):
        synchronize_adapters(model)


def _check_config(model: Any, config: Any) -> None:
    """Raise ValueError for what peft cannot do on sharded weights. What it depends on is the same on all ranks."""
    if replicated(model) is not None:
        raise ValueError("adapters are added before non-expert parameters are made whole (replicate_dense), not after")
    if model.config.distributed_config.tp_size > 1:
        raise ValueError("adapters beside tensor-parallel modules are sharded with them, so use tp_size=1 with Carpool")
    start = getattr(config, "init_lora_weights", True)
    reasons = {"layer_replication": "a copy of a sharded layer cannot be made"}
    if fsdp.states(model):
        reasons["modules_to_save"] = "a copy of a sharded module cannot be made"
    asked = [(f"{name}={getattr(config, name)!r}", why) for name, why in reasons.items() if getattr(config, name, None)]
    if start not in RANDOM_STARTS:
        asked.append((f"init_lora_weights={start!r}", "this start is computed from the base weights or from data"))
    if asked:
        what, why = asked[0]
        raise ValueError(f"{what} cannot be used on a sharded model: {why}, of which each rank has a part. {INSTEAD}")


def _refuse_merge(*_: Any, **__: Any) -> None:
    raise ValueError(
        "adapters cannot be merged into a sharded model, because each rank has only a part of each weight; save the "
        "adapter with save_pretrained, load the model and the adapter in one process, and merge them there"
    )


def _refuse_quantised(*_: Any, **__: Any) -> None:
    raise ValueError(
        "adapters cannot be merged into weights that are quantised: merge them into the model that these were loaded "
        "from, with `carpool merge` or peft's merge_and_unload"
    )


def _save(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """transformers' `save_pretrained`; of a model with an adapter of its own, written by rank 0. All ranks call it, and
    all raise if rank 0 could not write."""
    if not model._hf_peft_config_loaded:  # the adapter belongs to a model of peft around this one
        return type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if kwargs.get("distributed_checkpoint"):
        raise ValueError(
            "an adapter is saved whole, so distributed_checkpoint=True cannot be used with one; leave it out"
        )
    failed: list[str | None] = [None]
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = adapter_tensors(model)
    try:
        if dist.get_rank() == 0:
            # What transformers would write if this were the only process.
            with replaced(model.config, "distributed_config", None):
                type(model).save_pretrained(model, save_directory, *args, **kwargs)
    except Exception as error:
        failed = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise RuntimeError(f"rank 0 could not save the adapter to {save_directory}: {failed[0]}")


def names_of_former_experts(model: Any) -> set[str]:
    """Names of modules that peft, asked to adapt them in this model, takes for those of its experts or routers in
    former releases of Transformers: it adapts these then, and no module of that name (gate_proj of shared experts)."""
    from peft.utils import transformers_weight_conversion as conversion

    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(kind, ()))


def names_without_adapters(model: Any) -> set[str]:
    """Names of linear layers that peft refuses to adapt in this model: Mamba's kernels read their weights past them."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check

    refused = set()
    for name in {one.rpartition(".")[2] for one, module in model.named_modules() if isinstance(module, nn.Linear)}:
        try:
            check(LoraConfig(), model, name)
        except ValueError:
            refused.add(name)
    return refused


def share_adapters(model: Any) -> None:
    """Shard the adapters of a model that was built as "zero1" as its non-expert parameters are, so that
    `replicate_dense` makes them whole with the others. All ranks together."""
    mesh, placements = non_expert_mesh(model.config.distributed_config, model._mesh_manager)
    for _, module, name, parameter in _added(model):
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, 0)
            sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            module._parameters[name] = nn.Parameter(sharded)


def _added(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """The parameters that peft added to a model: name, module, and name there."""
    return [
        (f"{prefix}.{name}", module, name, parameter)
        for prefix, module in model.named_modules()
        if is_added(f"{prefix}.")
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def is_added(name: str) -> bool:
    """Whether a parameter of that name is one that peft added."""
    return any(part in name for part in (".lora_", ".modules_to_save.", ".trainable_tokens_delta."))


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that peft added to a model, by name, whole and in peft's layout. All ranks together, outside a forward."""
    found: dict[str, torch.Tensor] = {}
    with sharded_parameters(model):
        for name, module, _, parameter in _added(model):
            stack = getattr(module, "_carpool_stack", None)
            found[name] = full(parameter) if stack is None else stack.to_peft(parameter)
    return found


def synchronize_adapters(model: Any) -> list[str]:
    """Make trainable parameters that are not sharded equal on all ranks, and average their gradients over the ranks.

    Adapters that peft adds or loads while `carpool.hf` is imported need no call. For parameters that were added another
    way, call it on all ranks, after they were added and before the first forward. Calling it again does nothing.
    Gradients are averaged after each backward, also with gradient accumulation and activation checkpointing.

    Returns:
        The names of the parameters that it took care of, without those of an earlier call.

    Raises:
        ValueError: the model (or that of peft around it) was not sharded by transformers, or by tensor parallelism.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_mesh_manager", None) is None:
        raise ValueError("this model is not sharded; load it with a DistributedConfig first, then add the adapters")
    if base.config.distributed_config.tp_size > 1:
        raise ValueError("adapters beside tensor-parallel modules are sharded with them, so use tp_size=1 with Carpool")
    if replicated(base) is not None:  # it has taken them over, and reduces their gradients
        return []
    groups = [base._mesh_manager.get_mesh(axis) for axis in ("fsdp", "dp_replicate")]
    meshes = [mesh for mesh in groups if mesh.size() > 1]
    ranks = math.prod(mesh.size() for mesh in meshes)

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        for mesh in meshes:
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad /= mesh.size()

    def sum_copies(gradient: torch.Tensor) -> torch.Tensor:
        # An expert has met the tokens of all ranks of its expert-parallel group; its copies have met those of others.
        assert isinstance(gradient, DTensor)
        local, mesh = gradient.to_local().clone(), gradient.device_mesh
        for axis in range(mesh.ndim - 1):
            if mesh.size(axis) > 1:
                dist.all_reduce(local, group=mesh.get_group(axis))
        return fsdp.dtensor_like(local.div_(ranks), gradient)

    added = _not_averaged(model)
    for _, parameter in added:
        if isinstance(parameter, DTensor):
            object.__setattr__(parameter, "_carpool_average", parameter.register_hook(sum_copies))
            continue
        for mesh in meshes:
            dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)
        parameter._carpool_average = parameter.register_post_accumulate_grad_hook(average)
    return [name for name, _ in added]


def _not_averaged(model: nn.Module) -> list[tuple[str, Any]]:
    """The trainable parameters, by name, that neither FSDP nor `synchronize_adapters` looks after."""
    known = known_to_fsdp(fsdp.states(model))  # between forward and backward, not all of them are DTensors
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
        and (not isinstance(parameter, DTensor) or is_expert_adapter(module))
        and (id(module), name) not in known
        and not hasattr(parameter, "_carpool_average")
    ]
