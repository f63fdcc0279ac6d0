"""The tensors of a checkpoint: those of the model and of the optimizer. Each rank gives its own part of each.

DCP describes a rank's part of a DTensor as one rectangle of the global tensor: an offset and a size. That fails for
`_StridedShard`, the placement that FSDP2 gives to a parameter that something else has sharded before it, and so to
every expert: its meaning depends on the *order* of the axes. But the part itself is a rectangle. With 8 experts, ep 2
and efsdp 2, a rank holds (rank = efsdp coordinate f, ep coordinate e)

    mesh (efsdp, ep), placements (_StridedShard(0, split_factor=2), Shard(0))
    (f 0, e 0): 0 1     (f 0, e 1): 4 5     (f 1, e 0): 2 3     (f 1, e 1): 6 7

which means: first split over ep, then over efsdp. With the axes swapped, on mesh (ep, efsdp), the same parts are
(Shard(0), Shard(0)), which DCP can describe. So `as_rectangles` changes labels only: nothing is sent or copied, and
what DCP reads goes straight into the model's own memory. Fused weights under tensor parallelism have parts that are no
rectangles. They are redistributed, as Transformers does for all.

The state of all random generators is text. Without it a resumed run draws other dropout masks than the run that was
never interrupted. Each rank has its own.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from carpool.hf.seam.moved_experts import as_they_lie
from carpool.parallel.replicated import sharded_parameters

Tensors = dict[str, torch.Tensor]

# State that is all zeros before an optimizer has seen a parameter's first gradient (Adam and its kin).
_ZERO_AT_START = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def model_tensors(model: nn.Module) -> Tensors:
    """Parameters and persistent buffers by name: the model's own memory, DTensors where it is sharded. Of a model with
    adapters, without what is frozen.

    A tied weight comes once, under its first name; safetensors files do not hold two names for one tensor.
    """
    # First of all: this reshards. After a forward without a backward FSDP still shows whole parameters, which each
    # module has for itself, and a tied weight would count as two.
    with as_they_lie(), sharded_parameters(model):
        values = get_model_state_dict(model)
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    if hasattr(model, "peft_config"):
        again |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and name not in again}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by name, `state.<parameter>.exp_avg` and so on: the optimizer's own memory.

    State that the optimizer would only create at its first step is created now, as zeros, so that every rank, and
    every run with the same model, has the same names. Settings of the parameter groups (learning rate, betas) are not
    state: they follow from the configuration.
    """
    _create_missing_state(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    tensors: Tensors = {}
    with sharded_parameters(model):
        values = get_optimizer_state_dict(model, optimizer, options=options)
    for name, value in values.items():
        if not name.startswith("state."):
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{type(optimizer).__name__} keeps {name} as a {type(value).__name__}, not as a tensor")
        tensors[name] = value
    return tensors


def average_tensors(model: nn.Module, average: torch.optim.Optimizer) -> Tensors:
    """Averages of weights, by the names of the parameters (`carpool.optim.ema`): the average's own memory."""
    found = optimizer_tensors(model, average)
    return {name.removeprefix("state.").rpartition(".")[0]: tensor for name, tensor in found.items()}


def _create_missing_state(optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    examples = [p for p in parameters if optimizer.state.get(p)]
    missing = [p for p in parameters if not optimizer.state.get(p)]
    if not missing:
        return
    if not examples:
        # Only the optimizer knows what it keeps. A step with zero gradients and learning rate 0 makes it, and leaves
        # the parameters alone, but counts as a step.
        grads = [p.grad for p in parameters]
        rates = [group["lr"] for group in optimizer.param_groups]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in parameters:
            if "step" in optimizer.state[parameter]:
                optimizer.state[parameter]["step"].zero_()
        return
    example = examples[0]
    keys = optimizer.state[example].keys()
    if not getattr(optimizer, "starts_at_zero", keys <= _ZERO_AT_START):
        raise ValueError(
            f"{type(optimizer).__name__} has no state yet for a parameter of shape {tuple(missing[0].shape)}, and how "
            f"its {', '.join(sorted(keys - _ZERO_AT_START))} starts is not known; save after all had a gradient"
        )
    for parameter in missing:
        optimizer.state[parameter] = {
            key: torch.zeros_like(value) if key == "step" else torch.zeros_like(parameter, dtype=value.dtype)
            for key, value in optimizer.state[example].items()
        }


def as_rectangles(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same tensors with placements that DCP can describe, sharing their memory wherever that is possible."""
    meshes: dict[tuple[DeviceMesh, tuple[int, ...]], DeviceMesh] = {}
    return {
        name: _as_rectangle(tensor, meshes) if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def _as_rectangle(tensor: DTensor, meshes: dict[tuple[DeviceMesh, tuple[int, ...]], DeviceMesh]) -> DTensor:
    mesh, placements = tensor.device_mesh, tensor.placements
    if not any(isinstance(p, _StridedShard) for p in placements):
        return tensor
    plain = tuple(Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements)
    order = _axis_order(mesh, placements)
    if order is None:
        return _redistributed(tensor, plain)
    if (mesh, order) not in meshes:
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        meshes[mesh, order] = DeviceMesh.from_group(
            [mesh.get_group(axis) for axis in order],
            mesh.device_type,
            mesh=mesh.mesh.permute(order),
            mesh_dim_names=tuple(names[axis] for axis in order),
        )
    return DTensor.from_local(
        tensor.to_local(),
        meshes[mesh, order],
        [plain[axis] for axis in order],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _axis_order(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...] | None:
    """The axes in the order in which they really split the tensor, if there is one.

    A strided shard whose split factor is the number of pieces that later axes make of the same dimension means: those
    axes first, then this one.
    """
    order = list(range(mesh.ndim))
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, _StridedShard):
            continue
        # `dim` is there for both kinds of shards, and for nothing else.
        later = [o for o in range(axis + 1, mesh.ndim) if getattr(placements[o], "dim", None) == placement.dim]
        if placement.split_factor != math.prod(mesh.size(other) for other in later):
            return None
        if later:
            order.remove(axis)
            order.insert(max(order.index(other) for other in later) + 1, axis)
    return tuple(order)


def _redistributed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    if tensor.dtype == torch.int16:  # which neither gloo nor NCCL knows
        wide: DTensor = tensor.int()  # type: ignore[assignment]
        return wide.redistribute(placements=placements).short()  # type: ignore[return-value]
    return tensor.redistribute(placements=placements)


@torch.no_grad()
def copy_back(rectangles: Tensors, tensors: Tensors) -> None:
    """Copies rectangles back into the tensors that they were made of, where `as_rectangles` had to copy."""
    for name, tensor in tensors.items():
        rectangle = rectangles[name]
        if rectangle is tensor or not isinstance(tensor, DTensor) or not isinstance(rectangle, DTensor):
            continue
        if _axis_order(tensor.device_mesh, tensor.placements) is None:
            tensor.to_local().copy_(_redistributed(rectangle, tensor.placements).to_local())


@torch.no_grad()
def assign(tensors: Tensors, values: Tensors) -> None:
    """Copies `values` into the memory of `tensors`; names, shapes and placements are the same."""
    for name, tensor in tensors.items():
        value = values[name]
        if isinstance(tensor, DTensor):
            assert isinstance(value, DTensor) and value.placements == tensor.placements, name
            tensor, value = tensor.to_local(), value.to_local()
        tensor.copy_(value)


def _encode(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    # A copy: what frombuffer gives cannot be written to, which torch complains about.
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's, PyTorch's on the CPU and, where there is one, on this process's CUDA device."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    generator = numpy_state["state"]
    state = {
        "python": {"version": version, "words": _encode(np.array(words, dtype=np.uint32)), "gauss": gauss},
        "numpy": {
            "kind": numpy_state["bit_generator"],
            "key": _encode(generator["key"]),
            "pos": int(generator["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state().numpy())
    return state


def check_rng_state(state: dict[str, Any]) -> None:
    """Raises ValueError unless `set_rng_state` can put this back. Changes no generator."""
    try:
        python, numpy_state, torch_state = _decoded(state)
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(torch_state)
        _decode(state.get("cuda", ""), np.uint8)
    except Exception as error:  # each of them complains in its own way
        raise ValueError(f"the state of the random generators is damaged ({type(error).__name__}: {error})") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave; a CUDA state is ignored where there is no CUDA device."""
    python, numpy_state, torch_state = _decoded(state)
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_decode(state["cuda"], np.uint8)))


def _decoded(state: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """What Python's, NumPy's and PyTorch's generators take."""
    python, numpy_state = state["python"], state["numpy"]
    words = tuple(int(word) for word in _decode(python["words"], np.uint32))
    return (
        (python["version"], words, python["gauss"]),
        {
            "bit_generator": numpy_state["kind"],
            "state": {"key": _decode(numpy_state["key"], np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        },
        torch.from_numpy(_decode(state["torch"], np.uint8)),
    )
