"""Room for rows: how large the buffers of transport nvlink are in a run, and more of it when a step needs more.

By default a slab has a place for each token of its sender, and no routing can overflow. A smaller `nvlink.capacity`
saves memory, and then a step may not fit: sums are NaN, and every rank has counted how much would have been enough.

    step 7, slabs of 512 rows:  forward, backward -> 700 rows were needed
    gradients thrown away, slabs of 1024 rows, random state of before step 7
    step 7 again, on the same batches:  forward, backward -> all had a place -> optimizer

The device is asked once per step, and not at all while slabs have the worst case's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from carpool.train.schema import Config, Degrees
from carpool.transport import NVLinkOptions
from carpool.transport.nvlink import Buffers
from carpool.transport.nvlink.buffers import Regions

RandomState = tuple[torch.Tensor, torch.Tensor | None]


def most_tokens(config: Config, degrees: Degrees) -> int:
    """Tokens of a rank in the largest forward of a run, of training or evaluation. Ranks of a tensor-parallel group
    share theirs."""
    training = config.training
    sequences = max(training.per_device_train_batch_size, training.per_device_eval_batch_size)
    return -(-sequences * config.data.sequence_length // degrees.tp_size)


def nvlink_options(config: Config, degrees: Degrees) -> NVLinkOptions:
    """What the sections [nvlink] and [parallelism] say to the transport."""
    chosen = config.nvlink
    share = 1.0 if chosen.capacity is None else chosen.capacity
    # Not less than one sequence: a sample of text cannot be drawn from NaN and repeated.
    least = -(-config.data.sequence_length // degrees.tp_size)
    return NVLinkOptions(
        dispatch_ctas=chosen.dispatch_ctas,
        combine_ctas=chosen.combine_ctas,
        num_leases=chosen.leases,
        max_tokens=max(least, math.ceil(share * most_tokens(config, degrees))),
        timeout_seconds=float(config.parallelism.timeout_seconds),
        forward_fp8=chosen.forward_fp8,
        backward_fp8=chosen.backward_fp8,
    )


def lease_bytes(options: NVLinkOptions, num_ranks: int, hidden: int, element_size: int, top_k: int) -> int:
    """Bytes of one buffer on each rank, before it has grown."""
    assert options.max_tokens is not None
    return Regions.of(num_ranks, options.max_tokens, hidden * element_size, top_k).total


def make_room(buffers: Sequence[Buffers], most: int, device: torch.device) -> int:
    """If rows had no place since the last call, enlarge the slabs of all ranks.

    Collective over all ranks of the run: they decide alike, also where only one of several expert-parallel groups
    overflowed. Waits for the device.

    Args:
        most: rows that suffice in any case.

    Returns:
        The new capacity: what was computed since the last call is void. 0: all rows had a place.
    """
    if min(one.capacity for one in buffers) >= most:
        return 0
    needed = max(one.overflow() for one in buffers)
    if dist.is_initialized():
        # Afterwards all ranks have come here, so nobody reads any more what is about to be freed.
        anybody = torch.tensor(needed, device=device)
        dist.all_reduce(anybody, op=dist.ReduceOp.MAX)
        needed = int(anybody.item())
    if not needed:
        return 0
    # Powers of two: few repetitions until it fits.
    capacity = max(needed, min(most, 1 << (needed - 1).bit_length()))
    for one in buffers:
        one.grow(capacity)
    return capacity


def random_state(device: torch.device) -> RandomState:
    """Of the default generators of this process: the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
