"""Moving the experts of a transformers model to other layouts, and back for its checkpoints.

transformers shards the stacked weights of E experts by rows: row i of the whole tensor belongs to the i-th place,
counted over ranks. In the contiguous layout place i holds expert i. Any other layout of equal homes is a permutation of
rows, so moving experts is one all-to-all of rows, and a checkpoint, which is always in logical expert order, is the
inverse permutation away.

    4 experts on 2 ranks, homes [[2, 0], [1, 3]]: places hold experts [2, 0, 1, 3]
    physical[i] = logical[[2, 0, 1, 3][i]]

FSDP2 may shard a rank's experts once more. Then the places of an expert-parallel rank are divided among several, and an
expert whose place changes travels between those two alone: to the optimizer and to FSDP nothing has changed but values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from carpool.experts import ExpertWeights, FP8Experts
from carpool.hf.expert_function import weight_names
from carpool.hf.expert_parallel import ExpertRides, rides
from carpool.hf.states import states_lie
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.parallel import fsdp
from carpool.parallel.migrate import Moved, RowMove, Stopwatch, check_can_move, move_experts
from carpool.parallel.replicated import sharded_parameters
from carpool.parallel.slot_steps import Home, Homes, keep_slots, local

log = logging.getLogger("carpool")
LayoutsLike = Layouts | ExpertLayout


def set_layout(model: nn.Module, layouts: LayoutsLike, optimizer: torch.optim.Optimizer | None = None) -> Moved:
    """Move the experts of all MoE layers to their layouts, with all that `optimizer` keeps of them.

    All ranks together, between an optimizer's step and the next forward, gradients set to None.

    Args:
        layouts: one for each layer by name (`carpool.layout.layouts.Layouts`), or one for all.
        optimizer: None if it has no state yet. With state that stays behind, moments would be other experts'.

    Raises:
        ValueError: a layout that does not fit the model, or anything that cannot move, before anything has moved.
    """
    layers = rides(model)
    layouts = check_layouts(layers, layouts)
    changed = {name: own for name, own in layers.items() if layouts[name] != own.layout}
    moving = {name: own for name, own in changed.items() if layouts[name].homes != own.layout.homes}
    moved = Moved(layers=len(changed))
    if moving:
        with sharded_parameters(model, write=True):
            # FSDP shards all parameters of a module alike, and adapters are sharded alike.
            alike = {name: [list(own.experts.parameters()), own.adapter_parameters()] for name, own in moving.items()}
            everything = [parameter for both in alike.values() for one in both for parameter in one]
            watch = Stopwatch(everything[0].device)
            problem = next(filter(None, (own.why_not_move() for own in moving.values())), "")
            check_can_move(everything, optimizer, None, problem)
            for name, own in moving.items():
                for parameters in filter(None, alike[name]):
                    move = row_move(parameters[0], places(own.layout), places(layouts[name]))
                    experts = move.travelling if parameters is alike[name][0] else 0
                    moved += Moved(0, experts, move_experts(parameters, move, optimizer, None))
            moved += Moved(seconds=watch.seconds())
    for name, own in changed.items():
        own.move_to(layouts[name])
        _keep_states_logical(own)
    return moved


def check_layouts(layers: dict[str, ExpertRides], layouts: LayoutsLike) -> Layouts:
    """Raise ValueError unless each layer can compute under its layout."""
    layouts = layouts if isinstance(layouts, Layouts) else Layouts(layouts)
    where = f"{layouts.source}: " if layouts.source else ""
    if unknown := sorted(set(layouts) - layers.keys()):
        raise ValueError(
            f"{where}there is a layout for {unknown[0]!r}, but this model's layers are {', '.join(layers)}"
        )
    for name, own in layers.items():
        layout = layouts[name]
        try:
            own.check_layout(layout)
        except ValueError as error:
            raise ValueError(f"{where}layer {name}: {error}") from error
    return layouts


def current_layouts(model: nn.Module) -> Layouts:
    """Where the experts of each layer are now."""
    return Layouts({name: own.layout for name, own in rides(model).items()})


@contextmanager
def slots_kept(model: nn.Module, quantised: bool = False, prefetch: bool = True) -> Iterator[None]:
    """Inside, no weight changes: replicas are filled once and serve all forwards (micro-batches, what checkpointing
    computes again, batches of an evaluation). All ranks together.

    Args:
        quantised: FP8 experts keep their quantised weights, too, which takes as much memory as the weights in bf16.
        prefetch: slots are filled ahead of their layer, and no backward waits for replicas' gradients: these are
            complete at the end. The same bits (carpool/parallel/slot_steps.py)."""
    layers = list(rides(model).values())
    ahead = [homes(own) if prefetch else None for own in layers]
    if prefetch:
        _tell(layers, ahead)
    with ExitStack() as stack:
        for own in layers:
            if quantised and isinstance(own.compute, FP8Experts):
                stack.enter_context(own.compute.weights_unchanged())
        stack.enter_context(keep_slots([(own.filler, one) for own, one in zip(layers, ahead, strict=True)]))
        yield


def _tell(layers: Sequence[ExpertRides], ahead: Sequence[Homes | None]) -> None:
    """Say once in the log if slots cannot be filled ahead."""
    refused = [own for own, one in zip(layers, ahead, strict=True) if one is None and own.filler.travels]
    if refused and not any(own.told for own in layers) and dist.get_rank() == 0:
        log.info(
            "replicas are filled when their layer runs, not ahead of it: FSDP has divided a rank's experts among "
            "several, or keeps them on another device"
        )
    for own in refused:
        own.told = True


def homes(own: ExpertRides) -> Homes | None:
    """The parameters of a layer between two forwards; None if there is nothing to fill, or not ahead."""
    if not own.filler.travels:
        return None
    group = next(iter(fsdp.groups_of(own.experts)), None)
    found: dict[str, Home] = {}
    for field, name in zip(ExpertWeights._fields, weight_names(own.experts), strict=False):
        if name is None:
            continue
        parameter = own.experts._parameters.get(name)
        if parameter is None or not _has_all_rows(parameter, own, group):
            return None
        dtype = parameter.dtype if group is None else fsdp.dtype_of(group, parameter.dtype)
        found[field] = Home(parameter, dtype, 1.0 if group is None else fsdp.divisor_of(group, dtype))
    return found


def _has_all_rows(parameter: torch.Tensor, own: ExpertRides, group: Any) -> bool:
    sharded = group is None or (isinstance(parameter, DTensor) and parameter.device.type == group.device.type)
    return sharded and local(parameter).shape[0] == own.num_local_experts


def is_logical(model: nn.Module) -> bool:
    """Whether expert rows are in logical order as they are, so that checkpoints need no reordering."""
    return all(order == sorted(order) for order in (places(own.layout) for own in rides(model).values()))


def logical_order(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of the model or its optimizer with expert rows in logical order. Collective."""
    return _reorder(model, state, to_logical=True)


def physical_order(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `logical_order`: rows as the model's present layout has them."""
    return _reorder(model, state, to_logical=False)


def _reorder(model: nn.Module, state: dict[str, torch.Tensor], to_logical: bool) -> dict[str, torch.Tensor]:
    result = dict(state)
    for name, own in rides(model).items():
        order = places(own.layout)
        if order == sorted(order):
            continue
        index = inverse(order) if to_logical else order
        for key, tensor in state.items():
            if f"{name}." in key and tensor.dim() and tensor.shape[0] == own.num_experts:
                result[key] = permute_rows(tensor, index)
    return result


def _keep_states_logical(own: ExpertRides) -> None:
    """Let the module's states be in logical order from now on, whatever its layout becomes."""
    if own.states_logical:
        return
    own.states_logical = True

    def reorder(state: dict[str, Any], prefix: str, to_logical: bool) -> None:
        order = places(own.layout)
        if order == sorted(order) or states_lie():
            return
        index = inverse(order) if to_logical else order
        for key, tensor in state.items():
            if key.startswith(prefix) and tensor.dim() and tensor.shape[0] == own.num_experts:
                state[key] = permute_rows(tensor, index)

    def after_state_dict(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        reorder(state, prefix, to_logical=True)

    def before_load(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        reorder(state, prefix, to_logical=False)

    own.experts.register_state_dict_post_hook(after_state_dict)
    own.experts.register_load_state_dict_pre_hook(before_load)


def places(layout: ExpertLayout) -> list[int]:
    """The expert in each place, over all ranks."""
    return [expert for rank in layout.homes for expert in rank]


def inverse(order: Sequence[int]) -> list[int]:
    """Where each number is: `inverse([2, 0, 1]) == [1, 2, 0]`."""
    where = [0] * len(order)
    for place, expert in enumerate(order):
        where[expert] = place
    return where


def permute_rows(tensor: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """`tensor[index]` along dimension 0, sharded as before. Collective over the world for a DTensor.

    Each rank keeps as many rows as it has; only rows that change rank travel, each once.
    """
    if not isinstance(tensor, DTensor):
        return tensor[list(index)]
    local = row_move(tensor, range(len(index)), index).apply(tensor.to_local().clone(), None)
    mesh = tensor.device_mesh
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def row_move(tensor: torch.Tensor, before: Sequence[int], after: Sequence[int]) -> RowMove:
    """From rows that are `before[place]` to rows that are `after[place]`, for this rank of the world.

    What replicates the rows elsewhere (HSDP) does the same among its own ranks.
    """
    if not isinstance(tensor, DTensor):
        return RowMove([before], [after], 0)
    mesh, me = tensor.device_mesh, dist.get_rank()
    coordinates = {int(rank): tuple(map(int, (mesh.mesh == rank).nonzero()[0])) for rank in mesh.mesh.flatten()}
    copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    held: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    for rank, place in coordinates.items():
        if all(place[axis] == coordinates[me][axis] for axis in copies):
            held[rank] = held_rows(tensor, place)
    return RowMove([[before[i] for i in rows] for rows in held], [[after[i] for i in rows] for rows in held], me)


def held_rows(tensor: DTensor, coordinate: tuple[int, ...]) -> list[int]:
    """The rows of the whole tensor that the rank at `coordinate` of its mesh holds, in order.

    FSDP shards what expert parallelism has sharded already, and marks that by a strided placement on its own mesh
    axis, which comes first in the mesh. So plain shards apply before strided ones.
    """
    rows = torch.arange(tensor.shape[0])
    axes = [(axis, p) for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if any(getattr(p, "dim", None) != 0 for _, p in axes):
        raise ValueError(f"experts must be sharded by rows only, not as {tensor.placements}")
    for axis, _ in sorted(axes, key=lambda item: type(item[1]) is not Shard):
        chunks = rows.chunk(tensor.device_mesh.size(axis))
        rows = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else rows[:0]
    return rows.tolist()
