"""Random weights for a sharded model that do not depend on how it is sharded.

A run on 1 process and one on 4 ranks with `ep_size=4` start bitwise equal (on the same kind of device), so that
changing the number of ranks changes nothing else. How:

1. Two copies of the model are on the meta device. One is whole: the *blueprint*. The other is sharded.
2. `_init_weights`, the model's own recipe, runs once over the blueprint on the meta device, only to see which module
   writes which tensors: nearly always its own, but some reach into children. Modules that write the same tensor form
   one *unit*.
3. Unit by unit: the blueprint's tensors are allocated in full, each module's `_init_weights` runs under a generator
   seeded by (seed, name of the module), the rank copies its shards into the sharded model, and the full tensors go.

The peak is one unit in full size (the experts of one layer). The price is that every rank draws everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.distributed.sharding_utils import DtensorShardOperation

from carpool.parallel import fsdp


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    blueprint: PreTrainedModel,
    seed: int,
    device: torch.device,
    offload: bool,
    stored: Callable[[str], torch.Tensor | None] | None = None,
    lies: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    filled: Callable[[PreTrainedModel, str], None] = lambda _, __: None,
    only: Collection[str] | None = None,
) -> None:
    """Gives `model`, sharded and on the meta device, its values; see the module's docstring.

    Args:
        offload: parameters go to the CPU (FSDP brings them to the device when it needs them), buffers do not.
        stored: by name, the tensor of a checkpoint in the place of a random one; None: there is none.
        lies: a tensor of the blueprint, by name, as the whole of it lies in `model`; None: as in the blueprint.
        filled: is called with `model` and the name of each tensor that has got its values.
        only: the names of tensors that get values; others have them. None: all.
    """
    placeholders = {name: tensor for name, tensor in _tensors(model) if only is None or name in only}
    tied = set(model.all_tied_weights_keys)
    seeded = torch.default_generator if device.type == "cpu" else torch  # which notes the stack for devices not in use
    with init.guard_torch_init_functions(), torch.random.fork_rng(devices=[device] if device.type != "cpu" else []):
        for unit in _units(blueprint):
            shape_only = {key: blueprint.get_parameter_or_buffer(key) for key in sorted(unit.tensors - tied)}
            if not shape_only.keys() & placeholders.keys():
                continue  # of another stage of a pipeline
            given = {key: None if stored is None or key not in placeholders else stored(key) for key in shape_only}
            if any(given[key] is None for key in shape_only.keys() & placeholders.keys()):
                for key, tensor in shape_only.items():
                    set_tensor(blueprint, key, torch.empty_like(tensor, device=device))
                for _, name, module, owner in sorted(unit.modules, key=lambda entry: entry[0]):
                    seeded.manual_seed(_seed_of(seed, name))
                    owner._init_weights(module)
            for key, tensor in shape_only.items():
                if key not in placeholders:
                    set_tensor(blueprint, key, tensor)
                    continue
                full, value = blueprint.get_parameter_or_buffer(key), given.pop(key)
                target = torch.device("cpu") if offload and isinstance(full, nn.Parameter) else device
                if value is not None:
                    full = value.to(device, full.dtype)
                if lies is not None:
                    full = lies(key, full.detach())
                set_tensor(model, key, _shard_like(placeholders[key], full, target))
                set_tensor(blueprint, key, tensor)
                del full, value
                filled(model, key)
    if only is None:
        model.tie_weights(recompute_mapping=False)
    for one in (*model.modules(), *model.parameters(), *model.buffers()):
        one._is_hf_initialized = True  # type: ignore[assignment, union-attr]


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Puts a tensor in the place of the parameter or buffer of that name."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if leaf in parent._parameters:
        value = nn.Parameter(value, requires_grad=cast(nn.Parameter, parent._parameters[leaf]).requires_grad)
    setattr(parent, leaf, value)


def _tensors(module: nn.Module, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, persistent or not, of a module and its children."""
    return [(prefix + name, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())]


@dataclass
class _Unit:
    """Modules that write the same tensors: place in the order of initialisation, name, module, whose recipe it gets."""

    tensors: set[str]
    modules: list[tuple[int, str, nn.Module, PreTrainedModel]]


def _in_init_order(
    module: nn.Module, name: str, owner: PreTrainedModel, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Children before parents, each with the innermost model around it: Transformers' `initialize_weights`."""
    if module in seen:
        return
    seen.add(module)
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _in_init_order(child, f"{name}.{child_name}" if name else child_name, child_owner, seen)
    yield name, module, owner


def _units(blueprint: PreTrainedModel) -> list[_Unit]:
    """Runs the recipe on the meta device, watches which tensors each module writes, and joins those that share one."""
    units: list[_Unit] = []
    written: set[str] = set()
    for place, (name, module, owner) in enumerate(_in_init_order(blueprint, "", blueprint, set())):
        below = _tensors(module, f"{name}." if name else "")
        versions = [tensor._version for _, tensor in below]
        owner._init_weights(module)
        writes = {key for (key, tensor), version in zip(below, versions, strict=True) if tensor._version != version}
        written |= writes
        unit = _Unit(writes, [(place, name, module, owner)])
        for other in [other for other in units if other.tensors & writes]:
            unit = _Unit(other.tensors | unit.tensors, other.modules + unit.modules)
            units.remove(other)
        if writes:
            units.append(unit)
    if never := sorted({key for key, _ in _tensors(blueprint)} - written):
        raise ValueError(
            f"{type(blueprint).__name__} gives no initial value to {', '.join(never[:4])}"
            f"{', ...' if len(never) > 4 else ''}, so it cannot be trained from scratch; start from a checkpoint"
        )
    return units


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _shard_like(placeholder: torch.Tensor, full: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's part of `full`, in memory of its own, as a DTensor if the placeholder is one."""
    if not isinstance(placeholder, DTensor):
        return full.detach().to(device)
    assert placeholder.shape == full.shape, f"sharding changed a shape: {placeholder.shape} from {full.shape}"
    local = DtensorShardOperation(placeholder).shard_tensor(full.detach(), device=device, dtype=full.dtype)
    assert local is not None
    return fsdp.dtensor_like(local.clone(memory_format=torch.contiguous_format), placeholder)
