"""Offloading of saved activations to host memory, overlapped with computation, and prefetching for each backward.

    computation   ride 0 | ride 1 | ride 2 | ride 3 || backward 3 | backward 2 | backward 1      | backward 0
    copies               | 0 out  | 1 out  | 2 out  |             |            | 1 in, from here | 0 in

The activations of ride n are copied while ride n + 1 computes, and their device memory is free from ride n + 2 on: the
device never holds the activations of more than two rides. Those of the last two rides are still there when the backward
begins, and are not copied back. From then on, the activations of ride n - 1 are prefetched while the backward of ride n
computes.

The copy engine copies tensors whose sizes the host knows. For activations in an arena, only the device knows the number
of rows. They are written to one of two *staging* arenas in turn. From there a kernel on the copy stream writes the
valid rows, and nothing else, into an arena in pinned host memory, whose bump pointer is on the device too. If an arena
is too small, the device records it (`Arena.needed`), and the trainer enlarges the arena and repeats the step. So the
copies are never of the worst-case size, and the host never waits.

Autograd saves a *ticket*, a tensor of one number, in place of offloaded activations. When the ticket is freed, so is
the host memory: after the backward, or when activation checkpointing discards it.

Buffers in host memory are reused (`HostPool`), so steps can be captured as a CUDA graph: the copy stream is forked into
the capture by the first copy, and joined at its end; addresses stay, and arenas begin anew.

On a CPU the same code copies synchronously.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from carpool.activations.arena import Arena, copy_states
from carpool.activations.arrivals import HiddenStates
from carpool.activations.host_memory import HostPool, event_now, on_stream, wait_for


@dataclass(frozen=True, kw_only=True)
class Offloaded(HiddenStates):
    """Hidden states in host memory; those that did not leave their rank (`home`) stay. `data` is the ticket.

    Attributes:
        index: which of the matrices with this ticket.
    """

    index: int


@dataclass
class _Parcel:
    """The offloaded activations of one ride.

    Attributes:
        lane, number: the lane of the ride, and its number in the lane.
        host: the activations in host memory.
        buffers: their memory, of the pool; none for those in an arena.
        copied: the event after the copy to the host. None on a CPU.
        back, ready: the activations on the device again, if they were prefetched, and the event after that copy.
    """

    lane: _Lane
    number: int
    device: torch.device
    host: list[HiddenStates]
    buffers: list[torch.Tensor]
    copied: torch.cuda.Event | None
    back: list[HiddenStates] | None = None
    ready: torch.cuda.Event | None = None


@dataclass
class _Lane:
    """A sequence of rides: all of them, or those of one half of a batch (`carpool.ride.two_batch`).

    Attributes:
        number: of the next ride.
        staging: the two arenas that rides use in turn.
        here: by number, the activations of rides that are still on the device, and the event after their copy.
        parcels: by number; freed with their tickets.
    """

    number: int = 0
    staging: tuple[Arena, Arena] | None = None
    here: dict[int, tuple[list[HiddenStates], torch.cuda.Event | None]] = field(default_factory=dict)
    parcels: weakref.WeakValueDictionary[int, _Parcel] = field(default_factory=weakref.WeakValueDictionary)


class Offloader:
    """Offloads saved activations; see the module's docstring. All layers of a model on a device share one, so that the
    backward of a layer can prefetch for the layer before it."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._lanes: dict[int, _Lane] = {}
        self._host: Arena | None = None
        self._pool: HostPool | None = None
        # By the number on the ticket. Removing an entry frees its memory.
        self._parcels: dict[int, _Parcel] = {}
        self._tickets = itertools.count(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloader:
        """For copies of the layers, which have offloaded nothing yet."""
        return Offloader()

    def staging(self, arena: Arena | None, lane_number: int = 0) -> Arena | None:
        """The arena into which the next ride writes the activations that it will offload. None: its transport has no
        arena, and it writes into tensors of its own. Each ride calls this before it writes.

        Args:
            arena: of the ride's transport.
            lane_number: of the sequence of rides that this one belongs to."""
        lane = self._lanes.setdefault(lane_number, _Lane())
        self._free(lane, lane.number - 1)
        if arena is None:
            return None
        if lane.staging is None:
            lane.staging = arena.companion(), arena.companion()
        if self._host is None:
            self._host = arena.companion(host=True)
        return lane.staging[lane.number % 2]

    def put(self, items: Sequence[HiddenStates], lane_number: int = 0) -> list[Offloaded]:
        """Start to copy the activations of a ride to host memory. They stay on the device until the copy is done."""
        lane = self._lanes[lane_number]
        # Tokens that did not leave their rank are the layer's input, which autograd saves anyway.
        here = [replace(item, home=None) for item in items]
        device = items[0].data.device
        with self._copying(device):
            buffers: list[torch.Tensor] = []
            host = [self._to_host(item, buffers) for item in here]
            parcel = _Parcel(lane, lane.number, device, host, buffers, event_now(device))
        name = next(self._tickets)
        ticket = torch.tensor([name], device="cpu")
        self._parcels[name] = lane.parcels[lane.number] = parcel
        # On the storage: the tensor that autograd returns shares it, but is another object.
        weakref.finalize(ticket.untyped_storage(), self._forget, name).atexit = False
        lane.here[lane.number] = here, parcel.copied
        lane.number += 1
        return [
            Offloaded(ticket, item.width, home=item.home, home_row=item.home_row, gaps=item.gaps, index=index)
            for index, item in enumerate(items)
        ]

    def get(self, offloaded: Sequence[Offloaded]) -> list[HiddenStates]:
        """The activations of a ride, on the device again. Starts to prefetch those of the next backward.

        Raises:
            RuntimeError: a hook on saved tensors has replaced the ticket by a copy."""
        parcel = self._parcels.get(int(offloaded[0].data))
        if parcel is None:
            raise RuntimeError(
                "the offloaded activations of a ride were freed before its backward: a hook on saved tensors "
                "(save_on_cpu, offloading) replaced its ticket by a copy; leave out that hook, or save the activations"
            )
        lane, number = parcel.lane, parcel.number
        if number in lane.here:
            back, _ = lane.here.pop(number)
        else:
            if parcel.back is None:
                self._fetch(parcel)
            assert parcel.back is not None
            back, parcel.back = parcel.back, None
            wait_for(parcel.ready)
        self._free(lane, number - 1)
        before = lane.parcels.get(number - 1)
        if before is not None and before.back is None and before.number not in lane.here:
            self._fetch(before)
        return [replace(back[one.index], home=one.home) for one in offloaded]

    def join(self) -> None:
        """After all backwards: let the current stream wait for all copies, and free what is left on the device. Called
        before the capture of a CUDA graph, and at its end."""
        for lane in self._lanes.values():
            self._free(lane, -1)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def abandon(self) -> None:
        """After a failed capture: forget the activations that it has offloaded, and its events, which never occur."""
        for parcel in self._parcels.values():
            parcel.copied = parcel.ready = None
        for lane in self._lanes.values():
            lane.here.clear()

    # -- how ----------------------------------------------------------------------------------------------------

    def _to_host(self, item: HiddenStates, buffers: list[torch.Tensor]) -> HiddenStates:
        if item.start is not None:
            assert self._host is not None, "a ride asks for its staging arena before it writes"
            return copy_states(item, self._host)
        data = item.data
        if self._pool is None:
            self._pool = HostPool(data.device)
        # The extent includes gaps between elements.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        size = extent * data.itemsize if data.numel() else 0
        buffers.append(self._pool.take(size))
        host = buffers[-1][:size].view(data.dtype).as_strided(data.shape, data.stride())
        return replace(item, data=host.copy_(data, non_blocking=True))

    def _fetch(self, parcel: _Parcel) -> None:
        """Start to copy a ride's activations back to the device."""
        # Allocated on the computation's stream, which frees it after use.
        tensors = [_empty(i.data, parcel.device) if i.start is None else None for i in parcel.host]
        back = []
        # Behind the work queued so far, which may still read the memory that is written here.
        with self._copying(parcel.device):
            for item, tensor in zip(parcel.host, tensors, strict=True):
                if tensor is not None:
                    back.append(replace(item, data=tensor.copy_(item.data, non_blocking=True)))
                else:
                    assert parcel.lane.staging is not None
                    back.append(copy_states(item, parcel.lane.staging[parcel.number % 2]))
            parcel.back, parcel.ready = back, event_now(parcel.device)

    def _free(self, lane: _Lane, number: int) -> None:
        """Free the activations that are still on the device, except one ride's. The memory's next user waits for the
        copies."""
        for one in [one for one in lane.here if one != number]:
            wait_for(lane.here.pop(one)[1])

    def _forget(self, name: int) -> None:
        parcel = self._parcels.pop(name, None)
        if parcel is None:
            return
        if parcel.back is not None:
            wait_for(parcel.ready)  # the prefetched activations are not needed, but the copy still writes their memory
        for buffer in parcel.buffers:
            assert self._pool is not None
            self._pool.give(buffer)

    def _copying(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, work is queued on the copy stream, behind all work queued so far."""
        if self._stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        return on_stream(self._stream, event_now(device))


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
