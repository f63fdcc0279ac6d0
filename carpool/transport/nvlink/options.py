"""Options of the `nvlink` transport; `transport.py` explains the terms.

    NVLinkOptions()                                   exact, and on the caller's stream
    NVLinkOptions(capacity=2048, max_tokens=8192)     less memory, where no rank sends another more than 2048 tokens
    NVLinkOptions(side_stream=True)                   rides overlap computation (`carpool.ride.schedule`)
    NVLinkOptions(codecs=Codecs(dispatch="fp8"))      LOSSY: tokens are dispatched in FP8

Invalid values are refused here, before any memory is allocated.

The transport needs Triton and CUDA on every rank, a group whose backend is nccl, and GPUs that can access each other's
memory: those of a node or of an NVLink domain (`Topology.why_no_peer_memory`). Each rank examines itself, and all
exchange their results, so that every rank gets the same answer:

    why_not(group)      None                                      the group can use it
                        "GPU 0 cannot reach the memory of GPU 1"  the reason, for the error message
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from carpool.kernels import MAX_CTAS
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.nodes import topology_of
from carpool.transport.options import RunSizes, TransportOptions

if TYPE_CHECKING:
    from carpool.ride.schedule import Schedule


# Initial size of a run's arena. The first step measures its need in it, and is repeated.
ARENA_BYTES = 64 * 2**20


@dataclass(frozen=True)
class NVLinkOptions(TransportOptions):
    """How the `nvlink` transport works; the defaults are exact and were measured (docs/measurements.md).

    Attributes:
        dispatch_ctas, combine_ctas: thread blocks of a verb, which are the SMs that it takes from the computation.
        num_leases: dispatches that may be without their combine at one time.
        max_tokens: None: agreed on at the first forward, rounded up to a power of two.
        capacity: tokens that a rank can receive from each other rank. None: `max_tokens`, which always suffices. If
            more arrive, MoE outputs are NaN, and `Buffers.overflow` is positive.
        timeout_seconds: how long a rank waits for another before it raises an error that names it.
        side_stream: run on a stream of its own; `Pending.wait` lets the caller's stream wait.
        arena_bytes: size of the arena for saved activations, whose use follows the tokens that arrived. If it does not
            suffice, `Buffers.arena_overflow` is positive. 0: no arena; every layer allocates for the worst case.
        balance_limit: the load of a rank, over the mean, for which experts of layers with spare slots allocate. For
            those who repeat what does not fit: if a plan exceeds it, MoE outputs are NaN. None: for any routing.
    """

    dispatch_ctas: int = 16
    combine_ctas: int = 16
    num_leases: int = 2
    capacity: int | None = None
    timeout_seconds: float = 300.0
    arena_bytes: int = 0
    side_stream: bool = False
    balance_limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("dispatch_ctas", "combine_ctas"):
            if not 1 <= getattr(self, name) <= MAX_CTAS:
                raise ValueError(f"{name}={getattr(self, name)} must be 1..{MAX_CTAS}")
        if self.capacity is not None and not 1 <= self.capacity <= (self.max_tokens or 0):
            raise ValueError(f"capacity={self.capacity} must be between 1 and max_tokens={self.max_tokens}")
        if self.num_leases < 1:
            raise ValueError(f"num_leases={self.num_leases} must be at least 1")
        if self.balance_limit is not None and self.balance_limit < 1:
            raise ValueError(f"balance_limit={self.balance_limit} is a load over the mean, which is 1 at least")
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} must be positive")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], sizes: RunSizes, codecs: Codecs = PLAIN) -> Self:
        """From the section [nvlink], whose `capacity` is a share. The capacity is at least one sequence, because text
        generation cannot repeat a step that overflows."""
        most, share, capacity, others = sizes.max_tokens, settings["capacity"], None, dict(settings)
        if share is not None:
            capacity = min(most, max(sizes.sequence_tokens, math.ceil(share * most)))
        others |= {"capacity": capacity, "num_leases": others.pop("leases"), "codecs": codecs}
        others |= {"timeout_seconds": sizes.timeout_seconds, "balance_limit": sizes.balance_limit}
        return cls(max_tokens=most, arena_bytes=ARENA_BYTES, **others)

    def under(self, schedule: Schedule, resend: bool = False) -> Self:
        """With a stream of its own, buffers for a chunk, and enough leases.

        Raises:
            ValueError: see `ScheduleKind.check_options`."""
        # Tokens that are sent again need a lease of their own.
        leases = max(self.num_leases, schedule.rides_under_way * (2 if resend else 1))
        if not schedule.kind.beside:
            return replace(self, num_leases=leases)
        schedule.kind.check_options(self)
        most = None if self.max_tokens is None else -(-self.max_tokens // schedule.pieces)
        capacity = None if self.capacity is None else min(self.capacity, most or self.capacity)
        # A chunk may be as unbalanced as it likes: its ride is not.
        limit = None if self.balance_limit is None else self.balance_limit * schedule.pieces
        sizes = replace(self, max_tokens=most, capacity=capacity, balance_limit=limit)
        return replace(sizes, side_stream=True, num_leases=leases)


def why_not(group: dist.ProcessGroup | None) -> str | None:
    """Why the ranks of a group cannot use this transport, or None if they can. Collective over the group."""
    reason = None
    try:
        import triton  # noqa: F401
    except ImportError:
        reason = "Triton is not installed"
    if not torch.cuda.is_available():
        reason = "there is no CUDA device"
    if group is None:
        return reason
    if reason is None and dist.get_backend(group) != "nccl":
        reason = f"the process group's backend is {dist.get_backend(group)}, not nccl"
    return _agree_why_not(group, reason)


def _agree_why_not(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The first reason of any rank, or a reason from their topology and devices."""
    index = torch.cuda.current_device() if reason is None else -1
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (reason, index), group=group)
    for theirs, _ in everyone:
        if theirs is not None:
            return str(theirs)
    try:
        topology = topology_of(group)
    except ValueError as error:
        return str(error)
    if (far := topology.why_no_peer_memory()) is not None:
        return far
    beside = topology.ranks_of(topology.node_of[dist.get_rank(group)])
    apart = [(index, other) for rank, (_, other) in enumerate(everyone)
             if rank in beside and other != index and not torch.cuda.can_device_access_peer(index, other)]  # fmt: skip
    reached: list[Any] = [None] * len(everyone)
    dist.all_gather_object(reached, apart, group=group)
    for pairs in reached:
        if pairs:
            return f"GPU {pairs[0][0]} cannot reach the memory of GPU {pairs[0][1]}"
    return None
