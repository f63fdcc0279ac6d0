"""Gradient clipping by the norm of the whole model's gradient, whatever each parameter is sharded over.

Clipping asks for one number: the norm of the gradient of *all* parameters, `sqrt(Σ g²)`. Under expert parallelism no
rank sees that gradient. The parameters live on different meshes, and each mesh splits them differently. With 4 ranks,
fsdp 4 and ep 2 (so efsdp 2):

    parameter                placements                                     a rank holds   copies of an element
    attention, embeddings    fsdp: Shard(0)                                 1/4            1
    experts                  efsdp: _StridedShard(0), ep: Shard(0)          1/4            1
    something not sharded    a plain tensor, the same on every rank         all of it      4
    with dp_replicate 2      dp_replicate: Replicate, fsdp (2): Shard(0)    1/2            2

The recurring bug is a sum over the wrong group. If each rank takes the norm of what it holds and the sum runs over the
FSDP group alone, every rank counts its own experts and forgets those of the others: the ranks then clip by
*different* coefficients, replicas drift apart, and the loss curve looks normal. If instead every rank adds everything
and the sum runs over the world, what is replicated is counted once per copy, and the norm is too large.

Here each element counts exactly once. A rank adds the squares of what it holds, divided by the number of ranks that
hold the same element, `ranks / (product of the sizes of the mesh axes that shard it)`, and a single all-reduce over
the world adds the ranks. With one copy of everything, as in the first two rows, nothing is divided.

With a pipeline each stage has parameters of its own. Copies of an element are then on the ranks of one stage only, so
`ranks` are those of a stage; they are all ranks of the world otherwise. The all-reduce adds the stages.

Sums are in float32 (float64 for float64 gradients), in the order of the parameters; the same inputs give the same bits.
Nothing is read back to the host: the norm stays a tensor on the device, and so does the factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# Elements from which on a tensor's norm is a launch of its own: of one for many tensors such a large one takes several,
# each of which ends before the next begins.
LARGE = 2**24


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, ranks: int | None = None) -> torch.Tensor:
    """Scales the gradients of `parameters` in place so that their global norm is at most `max_norm`.

    An optimizer that takes a factor (`carpool.optim.AdamW`) does without this second pass over the
    gradients: give it `clip_factor(grad_norm(parameters), max_norm)`.

    Args:
        parameters: see `grad_norm`.
        max_norm: see `clip_factor`.
        ranks: see `grad_norm`.

    Returns:
        The norm before clipping. If it is not finite, the gradients are left as they are, so that whoever called can
        look for the layer that broke.

    Raises:
        ValueError: if `max_norm` is not positive.
    """
    _check_max_norm(max_norm)
    unique = _unique(parameters)
    with torch.no_grad():
        shards = _gradient_shards(unique, ranks)
        norm = _sum_of_squares(shards, _accumulator(unique)).sqrt()
        if math.isfinite(max_norm):
            factor = clip_factor(norm, max_norm).nan_to_num(1.0)
            for (device, _, _), local in shards.items():
                torch._foreach_mul_(local, factor.to(device))
    return norm


@torch.no_grad()
def grad_norm(parameters: Iterable[torch.Tensor], ranks: int | None = None) -> torch.Tensor:
    """The norm of the gradient of `parameters`, over all ranks.

    Every rank of the world calls it, with the parameters of its stage in the same order, also a rank whose shards are
    empty or whose parameters have no gradient: it adds zero, but it joins the all-reduce.

    Args:
        parameters: plain tensors (taken to be the same on every rank of the stage) and DTensors on any mesh of it.
        ranks: of a stage of the pipeline; None: all, without a pipeline.

    Returns:
        0-dimensional, on the gradients' device; it is the same number on every rank.
    """
    unique = _unique(parameters)
    return _sum_of_squares(_gradient_shards(unique, ranks), _accumulator(unique)).sqrt()


@torch.no_grad()
def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By what gradients of this norm are multiplied: 1 if it is at most `max_norm`, NaN if it is not finite.

    Args:
        max_norm: the largest norm that is left as it is; `math.inf` only measures.

    Raises:
        ValueError: if `max_norm` is not positive.
    """
    _check_max_norm(max_norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return torch.where(torch.isfinite(norm), factor, math.nan)


def _check_max_norm(max_norm: float) -> None:
    """Raise a ValueError unless it is positive."""
    if math.isnan(max_norm) or max_norm <= 0:
        raise ValueError(f"max_norm is {max_norm}, but a norm to clip by is positive; use math.inf to only measure it")


def _unique(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


# Local gradient shards by device, dtype and number of ranks that hold the same elements: one fused kernel for each key.
Shards = dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]]


def copies_of(tensor: torch.Tensor, ranks: int) -> int:
    """How many of these ranks hold the same elements of a tensor: all, or those along axes that replicate it."""
    if not isinstance(tensor, DTensor):
        return ranks
    # An axis either replicates or shards (`Shard`, and `_StridedShard`, which is no subclass of it everywhere).
    mesh, placements = tensor.device_mesh, tensor.placements
    split = [size for size, placement in zip(mesh.shape, placements, strict=True) if not placement.is_replicate()]
    copies, rest = divmod(ranks, math.prod(split))
    assert rest == 0, f"mesh {mesh} does not tile {ranks} ranks"
    return copies


def _gradient_shards(parameters: list[torch.Tensor], ranks: int | None) -> Shards:
    """What this rank holds of the gradients, in the order of the parameters; empty shards are left out."""
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    shards: Shards = {}
    known: dict[object, int] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        copies = ranks
        if isinstance(grad, DTensor):
            # Many parameters are placed alike.
            placed = grad.device_mesh, grad.placements
            if placed not in known:
                if any(placement.is_partial() for placement in grad.placements):
                    raise ValueError(
                        f"a gradient of shape {tuple(grad.shape)} is still a partial sum over its mesh "
                        f"{grad.placements}; reduce it before clipping, a norm of partial sums means nothing"
                    )
                known[placed] = copies_of(grad, ranks)
            copies = known[placed]
            grad = grad.to_local()
        if grad.numel() > 0:
            shards.setdefault((grad.device, grad.dtype, copies), []).append(grad)
    return shards


def _accumulator(parameters: list[torch.Tensor]) -> torch.Tensor:
    """A zero to add to. Its device and dtype follow from the parameters, not from the gradients that happen to exist
    on this rank: all ranks bring the same kind of tensor to the all-reduce."""
    dtype = torch.float64 if torch.float64 in {p.dtype for p in parameters} else torch.float32
    device = parameters[0].device if parameters else torch.device("cpu")
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:
            # Parameters that are offloaded to the host; the ranks still talk through the accelerator.
            device = torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
            break
    return torch.zeros((), dtype=dtype, device=device)


def _sum_of_squares(shards: Shards, total: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of the squares of all gradients, each element counted once."""
    for (_, _, copies), local in shards.items():
        small = [one for one in local if one.numel() < LARGE]
        norms = [torch.linalg.vector_norm(one, dtype=total.dtype) for one in local if one.numel() >= LARGE]
        norms += torch._foreach_norm(small, 2, dtype=total.dtype) if small else ()
        total += (torch.stack(norms).square().sum() / copies).to(total.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total
