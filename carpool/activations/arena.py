"""An arena: memory for saved activations whose number of rows only the device knows.

The activations that a layer saves have one row per arrived token, or one per (token, expert) pair. With a transport
that does not report these numbers to the host, every layer would have to allocate for the worst case, which is W times
the usual one. Instead all layers share one block of memory and a *bump pointer* on the device:

    reserve(count 3, 256 bytes a row)      start = 0      pointer -> 768
    reserve(count 5, 256 bytes a row)      start = 768    pointer -> 2048
    the second one is released             pointer -> 768, at the next reserve

so memory use follows the tokens that arrived. The host knows the order of reservations, not their sizes. That suffices
to release them: backward passes run in the reverse order of forward passes, so the last reservation is released first.
One that is released out of order is reclaimed as soon as all reservations after it are.

When the activations do not fit, the reservation's start is -1: nothing may be written or read there, the step's results
are invalid, and `needed` is the number of bytes that it would have taken. The caller checks this once per step and
repeats the step. Other arenas that serve the same layers are *companions* of the first, and are checked with it.

A pipeline has several micro-batches in flight, and the first one in is the first one out. In one block nothing could be
reclaimed before the last one is done, so each micro-batch has a block of its own, a *lane*, in which reservations are
released in reverse order:

    1F1B, 2 in flight     F0 F1 B0 F2 B1 F3 B2 B3
    in lane               0  1  0  0  1  1  0  1
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from carpool.activations.arrivals import HiddenStates

ALIGNMENT = 256  # bytes; also what an allocation of torch is aligned to
COMPANION_BYTES = 64 * 2**20  # initial size of a companion; it grows after the first step has measured its need


class _Held:
    """Whether a reservation is still in use."""

    alive = True

    def release(self) -> None:
        self.alive = False


class Arena:
    """Bytes on one device, shared by all layers of a model.

    Args:
        capacity: bytes.
        device: of the pointer, and of the bytes. On the CPU the same arithmetic runs in PyTorch.
        host: the bytes are in pinned host memory, which kernels of the device read and write.

    Attributes:
        companions: other arenas that serve the same layers.
    """

    def __init__(self, capacity: int, device: torch.device, host: bool = False) -> None:
        self.device, self.host = device, host
        self.companions: list[Arena] = []
        self._allocate(capacity)
        # All lanes but the first, which is this arena; and the one in use, None if it is the first.
        self._lanes: list[Arena] = []
        self._lane: Arena | None = None
        # Start of the next reservation, and the largest end since `reset_peak`; in bytes.
        self.pointer = torch.zeros(1, dtype=torch.int64, device=device)
        self.peak = torch.zeros(1, dtype=torch.int64, device=device)
        # In order of reservation: its begin, and whether it is in use.
        self._stack: list[tuple[torch.Tensor, _Held]] = []
        # Addresses of the `start` tensors of reservations in use.
        self._starts: set[int] = set()

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        if self.host and self.device.type == "cuda":
            self.bytes = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=True)
        else:
            self.bytes = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)

    def companion(self, host: bool = False) -> Arena:
        """Make one more arena for the same layers, which grows with the need of steps."""
        self.companions.append(Arena(min(self.capacity, COMPANION_BYTES), self.device, host))
        return self.companions[-1]

    def make_lanes(self, number: int) -> None:
        """Make lanes up to this number, empty at first. The first lane is this arena itself."""
        while len(self._lanes) < number - 1:
            self.companions.append(Arena(0, self.device, self.host))
            self._lanes.append(self.companions[-1])

    def use_lane(self, number: int) -> None:
        """Make all further reservations in a lane."""
        self._lane = self._lanes[number - 1] if number else None

    def grow(self, capacity: int) -> None:
        """Replace the memory by so many bytes. Between steps, when no reservation is in use."""
        del self.bytes  # free before allocating: both would not fit
        self._allocate(capacity)
        self.pointer.zero_()
        self.peak.zero_()
        self._stack.clear()

    def reserve(self, width: int, dtype: torch.dtype, count: torch.Tensor, slab: int = 0) -> HiddenStates:
        """Reserve memory for a matrix; the caller writes it.

        Args:
            width, dtype: of a row.
            count: (slabs,) integers on the device: rows of each slab.
            slab: see `HiddenStates`.
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
        return HiddenStates(self.bytes.view(dtype), width, start, slab, count=count, arena=self)

    def holds(self, start: torch.Tensor) -> bool:
        """Whether `start` belongs to a reservation in use. A copy of the tensor does not keep one in use."""
        return start.data_ptr() in self._starts

    def restart(self) -> None:
        """Let the next reservation of each lane begin at 0. The reservations of a CUDA graph must not depend on those
        of earlier steps, nor those of a later step on the graph's.

        Raises:
            RuntimeError: a reservation is still in use."""
        if any(held.alive for _, held in self._stack):
            raise RuntimeError("the arena cannot begin anew: a layer still keeps rows for a backward that has not run")
        self._stack.clear()
        self.pointer.zero_()
        for lane in self._lanes:
            lane.restart()

    @property
    def needed(self) -> torch.Tensor:
        """(1,) int64 on the device: the peak of requested bytes. If it exceeds `capacity`, the step must be
        repeated."""
        return self.peak

    def reset_peak(self) -> None:
        self.peak.zero_()

    def _drop_released(self) -> torch.Tensor:
        """Begin of the next reservation: behind the last one that is in use."""
        lowest = self.pointer
        while self._stack and not self._stack[-1][1].alive:
            lowest, _ = self._stack.pop()
        return lowest


def copy_states(rows: HiddenStates, arena: Arena) -> HiddenStates:
    """Copy the valid rows of a matrix from its arena into another one, on the current stream."""
    assert rows.start is not None and rows.count is not None
    kept = arena.reserve(rows.width, rows.data.dtype, rows.count, rows.slab)
    assert kept.start is not None
    if arena.device.type == "cuda":
        from carpool.activations.arena_kernels import copy_slabs

        copy_slabs(rows, kept)
    else:
        for source, target, count in zip(rows.start.tolist(), kept.start.tolist(), rows.count.tolist(), strict=True):
            if min(source, target) >= 0:
                # `.data`: autograd must not see other layers' saved activations in the arena as modified.
                size = count * rows.width
                kept.data.data[target : target + size] = rows.data[source : source + size]
    return replace(rows, data=kept.data, start=kept.start, arena=arena)
