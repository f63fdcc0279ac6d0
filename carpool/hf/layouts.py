"""Moving the experts of a transformers model to another layout, and back for its checkpoints.

transformers shards the stacked weights of E experts by rows: row i of the whole tensor belongs to the i-th place,
counted over ranks. In the contiguous layout place i holds expert i. Any other layout of equal homes is a permutation of
rows, so moving experts is one all-to-all of rows, and a checkpoint, which is always in logical expert order, is the
inverse permutation away.

    4 experts on 2 ranks, homes [[2, 0], [1, 3]]: places hold experts [2, 0, 1, 3]
    physical[i] = logical[[2, 0, 1, 3][i]]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from carpool.hf.expert_parallel import rides
from carpool.layout import ExpertLayout


def set_layout(model: nn.Module, layout: ExpertLayout) -> None:
    """Move the experts of all MoE layers to `layout`. All ranks together, between steps.

    Only parameters move: call it before an optimizer has state, or move that with `physical_order`.

    Raises:
        ValueError: a layout that does not fit the model, before anything has moved.
    """
    layers = rides(model)
    for own in layers.values():
        own.check_layout(layout)
    with torch.no_grad():
        for own in layers.values():
            # From the places under the old layout to logical order to the places under the new one.
            index = compose(inverse(places(own.layout)), places(layout))
            for parameter in own.experts.parameters():
                if index != sorted(index):
                    local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
                    moved = permute_rows(parameter.data, index)
                    local.copy_(moved.to_local() if isinstance(moved, DTensor) else moved)
            own.set_layout(layout)


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


def places(layout: ExpertLayout) -> list[int]:
    """The expert in each place, over all ranks."""
    return [expert for rank in layout.homes for expert in rank]


def inverse(order: Sequence[int]) -> list[int]:
    """Where each number is: `inverse([2, 0, 1]) == [1, 2, 0]`."""
    where = [0] * len(order)
    for place, expert in enumerate(order):
        where[expert] = place
    return where


def compose(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The index that does `t[first]` and then `[second]`: `t[first][second] == t[compose(first, second)]`."""
    return [first[i] for i in second]


def permute_rows(tensor: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """`tensor[index]` along dimension 0, sharded as before. Collective over the world for a DTensor.

    Each rank keeps as many rows as it has; only rows that change rank travel, each once.
    """
    if not isinstance(tensor, DTensor):
        return tensor[list(index)]
    mesh = tensor.device_mesh
    rows_of = {
        int(rank): held_rows(tensor, tuple(int(c) for c in (mesh.mesh == rank).nonzero()[0]))
        for rank in mesh.mesh.flatten()
    }
    me, local = dist.get_rank(), tensor.to_local()
    mine = {row: place for place, row in enumerate(rows_of[me])}
    # What replicates the rows elsewhere (HSDP) does the same among its own ranks.
    send = [
        [mine[index[row]] for row in rows_of.get(rank, []) if index[row] in mine]
        for rank in range(dist.get_world_size())
    ]
    owner = {row: rank for rank, rows in rows_of.items() for row in rows}
    wanted = [(owner[index[row]], place) for place, row in enumerate(rows_of[me])]
    receive = [[place for rank, place in wanted if rank == source] for source in range(dist.get_world_size())]
    out = torch.empty_like(local)
    arrived = local.new_empty(sum(map(len, receive)), *local.shape[1:])
    rows = local[[place for places_ in send for place in places_]].contiguous()
    dist.all_to_all_single(arrived, rows, [len(r) for r in receive], [len(s) for s in send])
    out[[place for places_ in receive for place in places_]] = arrived
    return DTensor.from_local(out, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


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
