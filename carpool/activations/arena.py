"""An arena: memory for rows whose number only the device knows.

What a layer keeps for its backward pass has one row per arrival, or one per (arrival, expert). A transport that never
tells the host how many there are would force every layer to allocate for the worst case, which is W times the usual
one. Instead all layers share one block of memory and a *bump pointer* that lives on the device:

    reserve(count 3, 256 bytes a row)      start = 0      pointer -> 768
    reserve(count 5, 256 bytes a row)      start = 768    pointer -> 2048
    the second one is released             pointer -> 768, at the next reserve

so memory follows the rows that came. The host knows the order of reservations, not their sizes, and that is enough to
release them: backward passes run in the reverse order of forward passes, so what is released lies on top. What is
released out of order is given back as soon as everything above it is.

When the rows do not fit, the reservation's start is -1: nothing may be written or read there, what the step computes is
worthless, and `needed` says how many bytes it would have taken. Somebody has to look, once per step, and repeat it.
Other arenas that serve the same layers are *companions* of the first: whoever looks after it looks after them, too.

A pipeline has several micro-batches in flight, and the first one in is the first one out. In one block nothing would be
given back before the last one is done, so each has a block of its own, a *lane*, and in a lane what is released lies on
top:

    1F1B, 2 in flight     F0 F1 B0 F2 B1 F3 B2 B3
    in lane               0  1  0  0  1  1  0  1
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from carpool.activations.arrivals import Rows

ALIGNMENT = 256  # bytes; also what an allocation of torch is aligned to
COMPANION_BYTES = 64 * 2**20  # of a companion to start with; what the first step needs is measured in it


class _Held:
    """Whether a reservation is still wanted."""

    alive = True

    def release(self) -> None:
        self.alive = False


class Arena:
    """Bytes on one device, shared by all layers of a model.

    Args:
        capacity: bytes.
        device: where. On the CPU the same arithmetic runs in PyTorch.
        host: the bytes are in pinned host memory, which kernels of the device read and write; the pointer is on the
            device.

    Attributes:
        companions: other arenas that serve the same layers.
    """

    def __init__(self, capacity: int, device: torch.device, host: bool = False) -> None:
        self.device, self.host = device, host
        self.companions: list[Arena] = []
        self._allocate(capacity)
        # Those beside this one, and the one in use if it is one of them.
        self._lanes: list[Arena] = []
        self._lane: Arena | None = None
        # Where the next reservation starts, and the furthest that any has reached since `reset_peak`; in bytes.
        self.pointer = torch.zeros(1, dtype=torch.int64, device=device)
        self.peak = torch.zeros(1, dtype=torch.int64, device=device)
        # In order of reservation: where it began, and whether somebody holds it.
        self._stack: list[tuple[torch.Tensor, _Held]] = []
        # Where the starts of reservations that somebody holds lie in memory.
        self._starts: set[int] = set()

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        if self.host and self.device.type == "cuda":
            self.bytes = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=True)
        else:
            self.bytes = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)

    def companion(self, host: bool = False) -> Arena:
        """One more arena for the same layers, which grows with what steps need."""
        self.companions.append(Arena(min(self.capacity, COMPANION_BYTES), self.device, host))
        return self.companions[-1]

    def make_lanes(self, number: int) -> None:
        """Have so many, of no size yet. The first is this arena itself."""
        while len(self._lanes) < number - 1:
            self.companions.append(Arena(0, self.device, self.host))
            self._lanes.append(self.companions[-1])

    def use_lane(self, number: int) -> None:
        """Reserve there from now on."""
        self._lane = self._lanes[number - 1] if number else None

    def grow(self, capacity: int) -> None:
        """Take so many bytes instead, once nobody holds anything here: between steps."""
        del self.bytes  # first give back, then ask
        self._allocate(capacity)
        self.pointer.zero_()
        self.peak.zero_()
        self._stack.clear()

    def reserve(self, width: int, dtype: torch.dtype, count: torch.Tensor, slab: int = 0) -> Rows:
        """Room for rows; written by whoever asked.

        Args:
            width, dtype: of a row.
            count: (slabs,) integers on the device: how many rows there are in each slab.
            slab: see `Rows`.
        """
        if self._lane is not None:
            return self._lane.reserve(width, dtype, count, slab)
        element, row_bytes = dtype.itemsize, width * dtype.itemsize
        count, from_here = count.reshape(-1), self._drop_released()
        if self.device.type == "cuda":
            from carpool.activations.arena_kernels import reserve

            begin, start = reserve(
                self.pointer, self.peak, count, from_here, row_bytes, element, ALIGNMENT, self.capacity
            )
        else:
            begin = from_here.clone()
            size = (count.long() * row_bytes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
            ends = begin + size.cumsum(0)
            self.pointer.copy_(ends[-1:])
            torch.maximum(self.peak, self.pointer, out=self.peak)
            start = torch.where(self.pointer > self.capacity, -1, (ends - size) // element)
        held, where = _Held(), start.data_ptr()
        self._stack.append((begin, held))
        self._starts.add(where)

        def release() -> None:
            held.release()
            self._starts.discard(where)

        # On the storage: tensors that autograd and checkpointing hand back share it, but are not the same object.
        weakref.finalize(start.untyped_storage(), release).atexit = False
        return Rows(self.bytes.view(dtype), width, start, slab, count=count, arena=self)

    def holds(self, start: torch.Tensor) -> bool:
        """Whether it is the start of a reservation that is still held. A copy of one holds nothing."""
        return start.data_ptr() in self._starts

    def restart(self) -> None:
        """The next reservation, in each lane, begins at 0, whatever was there before. What a CUDA graph reserves must
        not depend on where an earlier step has left off, nor a later step on what a graph has reserved.

        Raises:
            RuntimeError: somebody still holds a reservation."""
        if any(held.alive for _, held in self._stack):
            raise RuntimeError("the arena cannot begin anew: a layer still keeps rows for a backward that has not run")
        self._stack.clear()
        self.pointer.zero_()
        for lane in self._lanes:
            lane.restart()

    @property
    def needed(self) -> torch.Tensor:
        """(1,) int64 on the device: the most bytes that were wanted at one time; more than `capacity`: repeat."""
        return self.peak

    def reset_peak(self) -> None:
        self.peak.zero_()

    def _drop_released(self) -> torch.Tensor:
        """Where the next reservation begins: past what is still held."""
        lowest = self.pointer
        while self._stack and not self._stack[-1][1].alive:
            lowest, _ = self._stack.pop()
        return lowest


def copy_rows(rows: Rows, arena: Arena) -> Rows:
    """The rows of one arena in another one: those that there are, and nothing else. On the current stream."""
    assert rows.start is not None and rows.count is not None
    kept = arena.reserve(rows.width, rows.data.dtype, rows.count, rows.slab)
    assert kept.start is not None
    if arena.device.type == "cuda":
        from carpool.activations.arena_kernels import copy_slabs

        copy_slabs(rows, kept)
    else:
        for source, target, count in zip(rows.start.tolist(), kept.start.tolist(), rows.count.tolist(), strict=True):
            if min(source, target) >= 0:
                # `.data`: what other layers keep in the arena must not look modified to autograd.
                size = count * rows.width
                kept.data.data[target : target + size] = rows.data[source : source + size]
    return replace(rows, data=kept.data, start=kept.start, arena=arena)
