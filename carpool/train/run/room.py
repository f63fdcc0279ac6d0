"""Room for rows: how large the buffers of transport nvlink are in a run, and more of it when a step needs more.

By default a slab has a place for each token of its sender, and no routing can overflow. A smaller `nvlink.capacity`
saves memory, and then a step may not fit: sums are NaN, and every rank has counted how much would have been enough.

    step 7, slabs of 512 rows:  forward, backward -> 700 rows were needed
    gradients thrown away, slabs of 1024 rows, random state of before step 7
    step 7 again, on the same batches:  forward, backward -> all had a place -> optimizer

The same for the arena in which layers keep what their backward needs: it starts small, and after the first step it has
the size that this step would have taken, and a quarter more. The device is asked once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from carpool.parallel.degrees import Degrees
from carpool.train.config.schema import Config
from carpool.transport import TransportOptions, find_transport
from carpool.transport.nvlink import Buffers

RandomState = tuple[torch.Tensor, torch.Tensor | None]


def most_tokens(config: Config, degrees: Degrees) -> int:
    """Tokens of a rank in the largest forward of a run, of training or evaluation. Ranks of a tensor-parallel group
    share theirs."""
    training = config.training
    largest = max(config.parallelism.batch_sizes(training.per_device_train_batch_size, degrees))
    sequences = max(largest, training.per_device_eval_batch_size)
    return degrees.tokens_per_rank(sequences * config.data.sequence_length)


def transport_options(config: Config, degrees: Degrees, name: str) -> TransportOptions:
    """What the configuration says to the transport of that name.

    Raises:
        ValueError: values that cannot be."""
    options_class, most = find_transport(name).options_class, most_tokens(config, degrees)
    codecs = config.codec.codecs
    if options_class is None:
        return TransportOptions(most, codecs)
    return options_class.from_settings(
        config.settings_of_transport(name),
        max_tokens=most,
        sequence_tokens=degrees.tokens_per_rank(config.data.sequence_length),
        timeout_seconds=float(config.parallelism.timeout_seconds),
        codecs=codecs,
    )


class Room(NamedTuple):
    """What buffers hold after they have grown: rows of a slab, and bytes of the largest arena that has grown."""

    capacity: int
    arena_bytes: int


def make_room(
    buffers: Sequence[Buffers], most: int, device: torch.device, before: Callable[[], None] = lambda: None
) -> Room | None:
    """If rows had no place since the last call, enlarge the slabs, or the arena, of all ranks.

    Collective over all ranks of the run: they decide alike, also where only one of several expert-parallel groups
    overflowed. Waits for the device.

    Args:
        most: rows that suffice in any case.
        before: is called before anything grows.

    Returns:
        The new sizes: what was computed since the last call is void. None: all rows had a place.
    """
    if min(one.capacity for one in buffers) >= most and not any(one.arena for one in buffers):
        return None
    # Arenas serve the same layers on all ranks, so there are equally many.
    arenas = [arena for one in buffers if one.arena for arena in one.arenas]
    needs = [
        max(one.overflow() for one in buffers),
        *(n for one in buffers if one.arena for n in one.arena_overflows()),
    ]
    if dist.is_initialized():
        # Afterwards all ranks have come here, so nobody reads any more what is about to be freed.
        anybody = torch.tensor(needs, device=device)
        dist.all_reduce(anybody, op=dist.ReduceOp.MAX)
        needs = anybody.tolist()
    needed, arena_needs = needs[0], needs[1:]
    if not any(needs):
        return None
    before()
    for one in buffers:
        if needed:
            # Powers of two: few repetitions until it fits.
            one.grow(max(needed, min(most, 1 << (needed - 1).bit_length())))
    for arena, size in zip(arenas, arena_needs, strict=True):
        if size:
            # Loads change from step to step.
            arena.grow(int(1.25 * size))
    return Room(buffers[0].capacity, int(1.25 * max(arena_needs, default=0)))


def random_state(device: torch.device) -> RandomState:
    """Of the default generators of this process: the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
