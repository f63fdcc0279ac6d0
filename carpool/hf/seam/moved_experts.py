"""Moving the experts of a transformers model to other layouts, and back for its checkpoints.

transformers shards the stacked weights of E experts by rows: row i belongs to the i-th place, counted over ranks. In
the contiguous layout place i holds expert i. Any other layout of equal homes is a permutation of rows: moving experts
is one all-to-all, and a checkpoint, which is in logical order, is the inverse permutation away.

    4 experts on 2 ranks, homes [[2, 0], [1, 3]]: places hold experts [2, 0, 1, 3]
    physical[i] = logical[[2, 0, 1, 3][i]]

FSDP2 may shard a rank's experts once more. Then an expert whose place changes travels between two of those ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from carpool.experts import FP8Experts
from carpool.experts.slices import cut, join
from carpool.hf.seam.expert_rides import ExpertRides, rides
from carpool.hf.seam.experts_module import fields_of
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.parallel import fsdp
from carpool.parallel.replicated import sharded_parameters
from carpool.replicas.migrate import Moved, RowMove, Stopwatch, check_can_move, move_experts

LayoutsLike = Layouts | ExpertLayout


def set_layout(
    model: nn.Module,
    layouts: LayoutsLike,
    optimizer: torch.optim.Optimizer | None = None,
    average: torch.optim.Optimizer | None = None,
) -> Moved:
    """Move the experts of all MoE layers to their layouts, one for each layer by name or one for all, with all that
    `optimizer` keeps of them. All ranks together, between an optimizer's step and the next forward, gradients None.

    Args:
        optimizer: None if it has no state yet. With state that stays behind, moments would be other experts'.
        average: of the weights (`carpool.optim.ema`), if there is one.

    Raises:
        ValueError: a layout that does not fit the model, or anything that cannot move, before anything has moved.
    """
    layers = rides(model)
    layouts = check_layouts(layers, layouts)
    for own in layers.values():
        if own.layout.slices > 1:
            _keep_states_logical(own)
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
            group = next(iter(moving.values())).row_group
            check_can_move(everything, optimizer, group, problem)
            for name, own in moving.items():
                for parameters in filter(None, alike[name]):
                    move = row_move(parameters[0], places(own.layout), places(layouts[name]), group)
                    experts = move.travelling if parameters is alike[name][0] else 0
                    sent = move_experts(parameters, move, optimizer, group, average=average)
                    moved += Moved(0, experts, sent)
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
def weights_unchanged(layers: Sequence[ExpertRides]) -> Iterator[None]:
    """Inside, no weight changes: FP8 experts cache their quantised weights, which takes as much memory as the weights
    in bf16."""
    with ExitStack() as stack:
        for own in layers:
            if isinstance(own.compute, FP8Experts):
                stack.enter_context(own.compute.weights_unchanged())
        yield


def is_logical(model: nn.Module) -> bool:
    """Whether experts are whole and in logical order as they are, so that checkpoints need no change."""
    return all(lies_logically(own.layout) for own in rides(model).values())


def logical_order(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of the model or its optimizer with whole experts in logical order. Collective."""
    return _each_of_experts(model, state, _to_logical)


def physical_order(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `logical_order`: rows as the model's present layout has them."""
    return _each_of_experts(model, state, _to_physical)


def logical_like(model: nn.Module, state: dict[str, torch.Tensor], meta: bool = False) -> dict[str, torch.Tensor]:
    """Tensors without values, of the shapes and placements of `logical_order`; `meta`: the shapes alone."""
    change = _logical_shape if meta else _logical_empty
    empty = {name: torch.empty_like(tensor, device="meta" if meta else None) for name, tensor in state.items()}
    return empty | _each_of_experts(model, state, change, only_changed=True)


Change = Callable[[ExpertRides, str, torch.Tensor], torch.Tensor]


def _each_of_experts(
    model: nn.Module, state: dict[str, torch.Tensor], change: Change, only_changed: bool = False
) -> dict[str, torch.Tensor]:
    """`state`, in which `change(layer, name of the parameter, tensor)` has changed what has a row for each expert, or
    slice, of a layer whose layout is not the logical one."""
    result = {} if only_changed else dict(state)
    for name, own in rides(model).items():
        if lies_logically(own.layout):
            continue
        for key, tensor in state.items():
            if f"{name}." in key and tensor.dim() and tensor.shape[0] in (own.num_experts, own.layout.num_rows):
                result[key] = change(own, key.split(f"{name}.")[-1].split(".")[0], tensor)
    return result


def lies_logically(layout: ExpertLayout) -> bool:
    """Whether its experts are whole and in logical order."""
    order = places(layout)
    return layout.slices == 1 and order == sorted(order)


def _to_logical(own: ExpertRides, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
    layout, order = own.layout, places(own.layout)
    if layout.slices == 1:
        return permute_rows(tensor, inverse(order), own.row_group)
    field, function = fields_of(own.experts)[parameter], own.function
    assert function is not None
    if not isinstance(tensor, DTensor):
        return join(field, tensor[inverse(order)], layout.slices, function)
    like = _logical_shape(own, parameter, tensor)
    rows = _between(tensor, order, own, back=False).apply(tensor.to_local().clone(), own.row_group)
    local = join(field, rows, layout.slices, function).contiguous()
    return _like(tensor, local, like.shape)


def _to_physical(own: ExpertRides, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
    layout, order = own.layout, places(own.layout)
    if layout.slices == 1:
        return permute_rows(tensor, order, own.row_group)
    field, function = fields_of(own.experts)[parameter], own.function
    assert function is not None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    rows = cut(field, local, layout.slices, function)
    if not isinstance(tensor, DTensor):
        return rows[order]
    rows = _between(tensor, order, own, back=True).apply(rows.contiguous(), own.row_group)
    return _like(tensor, rows, torch.Size([layout.num_rows, *rows.shape[1:]]))


def _logical_shape(own: ExpertRides, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
    rows = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if own.layout.slices == 1:
        return rows
    assert own.function is not None
    return join(fields_of(own.experts)[parameter], rows, own.layout.slices, own.function)


def _logical_empty(own: ExpertRides, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
    like = _logical_shape(own, parameter, tensor)
    if not isinstance(tensor, DTensor):
        return torch.empty_like(like, device=tensor.device)
    mine = _held(like.shape[0], tensor, own.row_group)[dist.get_rank(own.row_group)]
    local = torch.empty(len(mine), *like.shape[1:], dtype=tensor.dtype, device=tensor.to_local().device)
    return _like(tensor, local, like.shape)


def _like(tensor: DTensor, local: torch.Tensor, shape: torch.Size) -> DTensor:
    """A DTensor of another shape that is sharded as `tensor` is."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def _between(tensor: DTensor, order: Sequence[int], own: ExpertRides, back: bool) -> RowMove:
    """From rows of slices as they lie to whole experts as their tensor is sharded, slice by slice; or back."""
    layout, group, rank = own.layout, own.row_group, dist.get_rank(own.row_group)
    lie = [[order[place] for place in held] for held in _held(layout.num_rows, tensor, group)]
    each = range(layout.slices)
    whole = [[e * layout.slices + i for e in held for i in each] for held in _held(layout.num_experts, tensor, group)]
    return RowMove(whole, lie, rank) if back else RowMove(lie, whole, rank)


def _keep_states_logical(own: ExpertRides) -> None:
    """Let the module's states have whole experts in logical order from now on, whatever its layout becomes."""
    if own.states_logical:
        return
    own.states_logical = True

    def reorder(state: dict[str, Any], prefix: str, change: Change) -> None:
        if lies_logically(own.layout) or states_lie():
            return
        for key, tensor in state.items():
            rows = tensor.shape[0] if key.startswith(prefix) and tensor.dim() else -1
            if rows in (own.num_experts, own.layout.num_rows):
                state[key] = change(own, key.removeprefix(prefix), tensor)

    def after_state_dict(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        reorder(state, prefix, _to_logical)

    def before_load(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        reorder(state, prefix, _to_physical)

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


def permute_rows(tensor: torch.Tensor, index: Sequence[int], group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`tensor[index]` along dimension 0, sharded as before. Collective over `group` for a DTensor, whose ranks are
    among those of the group (None: all ranks). Only rows that change rank travel, each once."""
    if not isinstance(tensor, DTensor):
        return tensor[list(index)]
    rows = row_move(tensor, range(len(index)), index, group).apply(tensor.to_local().clone(), group)
    return fsdp.dtensor_like(rows, tensor)


def row_move(
    tensor: torch.Tensor, before: Sequence[int], after: Sequence[int], group: dist.ProcessGroup | None = None
) -> RowMove:
    """From rows that are `before[place]` to rows that are `after[place]`, for this rank of `group` (None: of all). What
    replicates the rows elsewhere (HSDP) does the same among its own ranks."""
    if not isinstance(tensor, DTensor):
        return RowMove([before], [after], 0)
    held = _held(tensor.shape[0], tensor, group)
    return RowMove(
        [[before[i] for i in rows] for rows in held], [[after[i] for i in rows] for rows in held], dist.get_rank(group)
    )


def _held(number: int, tensor: DTensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    """For each rank of `group` (None: of all), which of `number` rows it holds of a tensor that is sharded as this one
    is; none on ranks with another copy than this rank's."""
    mesh, me = tensor.device_mesh, dist.get_rank()
    coordinates = {int(rank): tuple(map(int, (mesh.mesh == rank).nonzero()[0])) for rank in mesh.mesh.flatten()}
    copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    held: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    for rank, place in coordinates.items():
        if all(place[axis] == coordinates[me][axis] for axis in copies):
            number_in_group = rank if group is None else dist.get_group_rank(group, rank)
            held[number_in_group] = held_rows(tensor, place, number)
    return held


def held_rows(tensor: DTensor, coordinate: tuple[int, ...], number: int | None = None) -> list[int]:
    """The rows of the whole tensor (as if it had `number`) that the rank at `coordinate` of its mesh holds, in order.
    FSDP shards what expert parallelism has sharded already, and marks that by a strided placement on its own mesh axis,
    which comes first in the mesh. So plain shards apply before strided ones."""
    rows = torch.arange(tensor.shape[0] if number is None else number)
    axes = [(axis, p) for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if any(getattr(p, "dim", None) != 0 for _, p in axes):
        raise ValueError(f"experts must be sharded by rows only, not as {tensor.placements}")
    for axis, _ in sorted(axes, key=lambda item: type(item[1]) is not Shard):
        chunks = rows.chunk(tensor.device_mesh.size(axis))
        rows = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else rows[:0]
    return rows.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Whether states of a model are as everybody else has them, or as they lie in this run.

_AS_THEY_LIE: ContextVar[bool] = ContextVar("carpool_as_they_lie", default=False)


@contextmanager
def as_they_lie() -> Iterator[None]:
    """Inside, `state_dict()` and `load_state_dict()` of a model take experts, and their adapters, as they lie.

    Outside, experts that have moved are in logical order, so that `save_pretrained` writes what any process reads, and
    adapters of experts are in peft's layout. Both are then collective: `state_dict()` is a copy, whose rows travel."""
    token = _AS_THEY_LIE.set(True)
    try:
        yield
    finally:
        _AS_THEY_LIE.reset(token)


def states_lie() -> bool:
    """Whether this is inside `as_they_lie`."""
    return _AS_THEY_LIE.get()
