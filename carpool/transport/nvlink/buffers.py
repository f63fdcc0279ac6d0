"""The symmetric memory that ranks write into: one owner per process group, shared by all layers.

A lease is one symmetric allocation per rank, cut into regions at the same byte offsets on every rank:

    signals   arrived, chosen (W x MAX_CTAS), written (W)                 int32
    sizes     counts (2 x W), begins ((MAX_PARTS + 1) x W)                int32
    tokens    a slab of `capacity` rows for each other rank               written by the dispatch of peers
    choices   K slots and K weights for each of R rows: those, and `most` of the own tokens
    partial   partial outputs of the experts, R rows                      read by the combine of peers
    dweight   K float32 for each partial output, in the backward

So a lease takes about (2 W - 1) * capacity * H * 2 bytes in bf16: 224 MiB for 4 ranks, 8192 tokens each, H 2048. By
default `capacity` is the largest number of tokens of any rank, the worst case: then no routing can overflow. Leases are
allocated when they are first needed. One suffices while every dispatch is followed by its combine; overlapping the
dispatch of one piece with the combine of another takes two.

Autograd must not save a view of a lease: saved activations are copied (`route.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from carpool.activations import Arena
from carpool.kernels import MAX_CTAS, MAX_PARTS
from carpool.transport.base import RankMissingError
from carpool.transport.token_capacity import PairCapacity

PAGE = 256  # bytes; regions start at multiples of it
# What a rank may be missing from; 0 is none.
VERBS = (
    "", "dispatch", "combine", "dispatch_gradients", "combine_gradients", "the exchange of experts' loads",
    "the fetch of replicas", "the sum of replicas' gradients",
)  # fmt: skip


@dataclass(frozen=True)
class Regions:
    """Byte offsets of the regions of a lease."""

    capacity: int
    most: int
    arrived: int
    chosen: int
    written: int
    counts: int
    begins: int
    tokens: int
    choices: int
    partial: int
    dweight: int
    total: int

    @classmethod
    def of(cls, num_ranks: int, most: int, capacity: int, row_bytes: int, top_k: int) -> Regions:
        """For hidden states of `row_bytes` bytes and K choices: `capacity` from each other rank, `most` own tokens."""
        away = (num_ranks - 1) * capacity
        rows = away + most
        sizes = {
            "arrived": num_ranks * MAX_CTAS * 4,
            "chosen": num_ranks * MAX_CTAS * 4,
            "written": num_ranks * 4,
            "counts": 2 * num_ranks * 4,
            "begins": (MAX_PARTS + 1) * num_ranks * 4,
            "tokens": away * row_bytes,
            "choices": rows * 2 * top_k * 4,
            "partial": rows * row_bytes,
            "dweight": rows * top_k * 4,
        }
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size // PAGE) * PAGE
        return cls(capacity=capacity, most=most, total=at, **offsets)


@dataclass
class SharedMemory:
    """Symmetric memory beside the leases: of spare slots (`peer_slots.py`). Freed with its owner.

    Attributes:
        bytes: this rank's part, uint8.
        bases: (W,) int64 on the device, where every rank's part begins.
        epoch: (1,) int32 on the device, the number of the use that is under way.
        busy: by the host's account.
    """

    bytes: torch.Tensor
    bases: torch.Tensor
    epoch: torch.Tensor
    busy: bool = False
    handle: Any = field(default=None, repr=False)


@dataclass
class Lease:
    """One buffer on every rank; see the module's docstring.

    Attributes:
        bytes: this rank's part, uint8.
        addresses, bases: where every rank's part begins; known to the host, and (W,) int64 on the device.
        epochs: (2,) int32 on the device: of the last finished combine, and of the last finished dispatch.
        regions: their offsets.
        busy: in use by a dispatch that is not combined yet.
    """

    bytes: torch.Tensor
    addresses: tuple[int, ...]
    bases: torch.Tensor
    epochs: torch.Tensor
    regions: Regions
    busy: bool = False
    handle: Any = field(default=None, repr=False)
    stream: torch.cuda.Stream | None = field(default=None, repr=False)

    def view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the region that starts at byte `at`."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        return self.bytes[at : at + size].view(dtype).view(shape)


class Buffers:
    """Leases, capacity and failures of one process group on one device.

    Args:
        group: the expert-parallel process group; None for one rank, whose buffers are ordinary memory.
        num_leases: dispatches that may be without their combine at one time.
        max_tokens: tokens of the largest rank. None: agreed on at the first `agree`, rounded up to a power of two.
        capacity: tokens of a slab, at most `max_tokens`, which is the default.
        timeout_seconds: how long a kernel waits for a peer.
        arena_bytes: size of the arena for saved activations; 0: there is none.

    Attributes:
        most, capacity: tokens of the largest rank, and of a slab; 0 before the first agreement.
        status, needed: int32 on the device: whether a wait has failed; the largest capacity that was needed so far.
        host_status: (1 + W,) int32 in pinned host memory, which kernels write when a wait times out.
        shared: symmetric memory beside the leases, by what it is for.
        pairs: the capacity of layers whose spare slots keep to a limit (`NVLinkOptions.balance_limit`).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        num_leases: int = 2,
        max_tokens: int | None = None,
        capacity: int | None = None,
        timeout_seconds: float = 300.0,
        arena_bytes: int = 0,
    ) -> None:
        self.group, self.device, self.num_leases = group, device, num_leases
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.most = self.capacity = 0
        self.timeout_seconds = timeout_seconds
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.needed = torch.zeros(1, dtype=torch.int32, device=device)
        self.host_status = torch.zeros(1 + self.num_ranks, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._row = (0, 0)  # bytes of the largest hidden state, and the largest K, of any layer
        self._leases: list[Lease] = []
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        self._fetch_stream: torch.cuda.Stream | None = None
        self.shared: dict[Any, list[SharedMemory]] = {}
        self.pairs: PairCapacity | None = None
        self.arena = Arena(arena_bytes, device) if arena_bytes else None
        if max_tokens is not None:
            self._set_sizes(max_tokens, capacity)

    @property
    def size(self) -> int:
        """Bytes on the device of this rank's leases and arenas."""
        return self.symmetric + sum(one.capacity for one in self.arenas if not one.host)

    @property
    def symmetric(self) -> int:
        """Bytes of this rank's symmetric memory, which PyTorch does not count among its tensors."""
        shared = sum(len(one.bytes) for several in self.shared.values() for one in several)
        return shared + sum(lease.regions.total for lease in self._leases)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of overlapped rides: one for all layers, so that rides run in the same order on every rank, and
        the rides on a lease one after the other."""
        if self._stream is None:
            # Before captured work (`carpool.kernels.capture`), which waits for rides.
            self._stream = torch.cuda.Stream(self.device, priority=-2)
        return self._stream

    @property
    def fetch_stream(self) -> torch.cuda.Stream:
        """The stream on which experts are sent to spare slots."""
        if self._fetch_stream is None:
            self._fetch_stream = torch.cuda.Stream(self.device, priority=-1)
        return self._fetch_stream

    @property
    def home_row(self) -> int:
        """The row at which a rank's own tokens begin."""
        return (self.num_ranks - 1) * self.capacity

    def agree(self, tokens: int) -> None:
        """Agree on a capacity. The first call is collective and waits for the device."""
        if self.most:
            return
        most = torch.tensor([max(1, tokens)], device=self.device)
        if self.group is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        self._set_sizes(1 << (int(most.item()) - 1).bit_length(), None)

    def grow(self, capacity: int) -> None:
        """Enlarge slabs to at least `capacity` tokens, and reset the overflow. Collective; between steps."""
        if self.busy:
            raise RuntimeError("buffers cannot grow between a dispatch and its combine; call grow() between steps")
        self._drop_leases()
        self._set_sizes(max(capacity, self.most), max(capacity, self.capacity))
        self.needed.zero_()

    def overflow(self) -> int:
        """The capacity that was needed, if slabs were too small since the last `grow`, else 0. The same on all ranks.
        Waits for the device."""
        needed = int(self.needed.item())
        return needed if needed > self.capacity else 0

    @property
    def arenas(self) -> list[Arena]:
        """The arena and its companions."""
        return [] if self.arena is None else [self.arena, *self.arena.companions]

    def arena_overflows(self) -> list[int]:
        """For each arena, the bytes that it would have needed, if it was too small since its allocation, else 0. Ranks
        may differ. Waits for the device."""
        if not self.arenas:
            return []
        needed = torch.cat([one.needed for one in self.arenas]).tolist()
        return [size if size > one.capacity else 0 for size, one in zip(needed, self.arenas, strict=True)]

    def arena_overflow(self) -> int:
        """The largest of `arena_overflows`."""
        return max(self.arena_overflows(), default=0)

    def overflowed(self) -> torch.Tensor:
        """Whether slabs or arenas have overflowed: a bool on the device, without a synchronisation."""
        found = self.needed.max() > self.capacity
        for one in self.arenas:
            found |= one.needed.max() > one.capacity
        return found

    @property
    def busy(self) -> bool:
        return any(lease.busy for lease in self._leases)

    def acquire(self, row_bytes: int, top_k: int) -> Lease:
        """The next lease, of at least these sizes. Collective when it must be allocated; in the same order on all
        ranks."""
        wanted = (row_bytes, top_k)
        if any(now < new for now, new in zip(self._row, wanted, strict=True)):
            if self.busy:
                raise RuntimeError(
                    f"a ride of rows of {row_bytes} bytes with {top_k} choices began while buffers for {self._row[0]} "
                    f"bytes and {self._row[1]} choices were in use; run the layer with the largest rows alone first"
                )
            self._row = tuple(max(pair) for pair in zip(self._row, wanted, strict=True))  # type: ignore[assignment]
            self._drop_leases()
        for _ in range(len(self._leases)):
            lease = self._leases[self._turn % len(self._leases)]
            self._turn += 1
            if not lease.busy:
                break
        else:
            if len(self._leases) >= self.num_leases:
                raise RuntimeError(
                    f"{self.num_leases} dispatches are without their combine, and there are no more leases; combine "
                    f"first, or raise num_leases (NVLinkOptions)"
                )
            lease = self._make()
            self._leases.append(lease)
            self._turn = 0
        self._after_last_use(lease)
        lease.busy = True
        return lease

    def release(self, lease: Lease) -> None:
        """Called after its combine was launched on the current stream."""
        lease.busy = False
        # Captured work runs when the graph is replayed, on a stream that is not known here.
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        lease.stream = None if self.device.type != "cuda" or capturing else torch.cuda.current_stream(self.device)

    def abandon(self) -> None:
        """After a failed capture of a graph: free the leases of dispatches that are never combined, and spare slots."""
        for lease in self._leases:
            lease.busy = False
        for several in self.shared.values():
            for one in several:
                one.busy = False

    def _after_last_use(self, lease: Lease) -> None:
        """Let the current stream wait for the stream that used the lease before."""
        if lease.stream is not None and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self.device)
            if lease.stream != current:
                current.wait_stream(lease.stream)

    def _set_sizes(self, most: int, capacity: int | None) -> None:
        capacity = most if capacity is None else capacity
        if not 1 <= capacity <= most:
            raise ValueError(f"capacity={capacity} must be between 1 and max_tokens={most}")
        self.most, self.capacity = most, capacity

    def _drop_leases(self) -> None:
        """Free all leases, once no rank accesses them any more."""
        if self._leases and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.group is not None:
                dist.barrier(group=self.group)
        self._leases.clear()

    def share(self, size: int) -> SharedMemory:
        """Allocate symmetric memory of `size` bytes on each rank, all zero. Collective."""
        # It outlives the call, which may be in inference mode.
        with torch.inference_mode(False):
            memory, addresses, handle = self._allocate(size, size)
            bases = torch.tensor(addresses, dtype=torch.int64, device=self.device)
            return SharedMemory(memory, bases, torch.zeros(1, dtype=torch.int32, device=self.device), handle=handle)

    def _make(self) -> Lease:
        regions = Regions.of(self.num_ranks, self.most, self.capacity, *self._row)
        memory, addresses, handle = self._allocate(regions.total, regions.tokens)
        bases = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        epochs = torch.zeros(2, dtype=torch.int32, device=self.device)
        return Lease(memory, tuple(addresses), bases, epochs, regions, handle=handle)

    def _allocate(self, size: int, zeroed: int) -> tuple[torch.Tensor, list[int], Any]:
        """(this rank's part, the addresses of all ranks' parts, what holds them); the first `zeroed` bytes are 0."""
        handle = None
        if self.group is not None:
            from torch.distributed import _symmetric_memory as symmetric_memory

            memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)
            handle = symmetric_memory.rendezvous(memory, self.group)
            addresses = list(handle.buffer_ptrs)
        else:
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            addresses = [memory.data_ptr()]
        memory[:zeroed].zero_()
        if self.group is not None:
            # No rank may signal before the memory is zero.
            dist.barrier(group=self.group)
        return memory, addresses, handle

    def check(self) -> None:
        """Raise if a wait of a kernel timed out. Reads host memory only.

        Raises:
            RankMissingError: names the missing ranks and the verb."""
        if not int(self.host_status[0]):
            return
        missing = {rank: int(verb) for rank, verb in enumerate(self.host_status[1:].tolist()) if verb}
        names = self._names(list(missing))
        verb = VERBS[next(iter(missing.values()), 0)]
        raise RankMissingError(
            f"{names} did not arrive at {verb} within {self.timeout_seconds:g} s; {self._names([self.rank])} waited in "
            "vain. Look for what stopped it (its log, its exit code); if it was only slow, raise "
            "parallelism.timeout_seconds (NVLinkOptions.timeout_seconds)",
            list(missing),
        )

    def _names(self, ranks: list[int]) -> str:
        if self.group is None:
            return "rank 0"
        world = [dist.get_global_rank(self.group, rank) for rank in ranks]
        return ("rank " if len(world) == 1 else "ranks ") + ", ".join(map(str, world))


# One owner per process group; freed with the group.
OWNERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Buffers] = weakref.WeakKeyDictionary()


def buffers_of(group: dist.ProcessGroup | None, device: torch.device, **options: Any) -> Buffers:
    """The buffers of a group, constructed at the first call. Later calls with larger `max_tokens`, `num_leases` or
    `arena_bytes` enlarge them."""
    if group is None:
        return Buffers(None, device, **options)
    if group not in OWNERS:
        OWNERS[group] = Buffers(group, device, **options)
    buffers = OWNERS[group]
    if (options.get("max_tokens") or 0) > buffers.most:
        buffers.grow(options["max_tokens"])
    buffers.num_leases = max(buffers.num_leases, options.get("num_leases", 0))
    if buffers.arena is None and options.get("arena_bytes", 0):
        buffers.arena = Arena(options["arena_bytes"], device)
    elif buffers.arena is not None and options.get("arena_bytes", 0) > buffers.arena.capacity:
        buffers.arena.grow(options["arena_bytes"])
    return buffers
