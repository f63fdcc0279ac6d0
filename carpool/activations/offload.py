"""What rides keep, in host memory: copied there beside the computation, and back ahead of each ride's backward.

    computation   ride 0 | ride 1 | ride 2 | ride 3 || backward 3 | backward 2 | backward 1      | backward 0
    copies               | 0 out  | 1 out  | 2 out  |             |            | 1 in, from here | 0 in

What ride n keeps is copied while ride n + 1 computes, and its memory is free from ride n + 2 on: the device never holds
more than two rides' items. The last two are still there when the backward begins, and need no way back. From then on,
the items of ride n - 1 are under way while the backward of ride n computes.

Tensors whose sizes the host knows are copied by the copy engine. Of rows in an arena only the device knows how many
there are. They are written to one of two *staging* arenas in turn, and from there a kernel on the copy stream writes
the valid rows, and nothing else, into an arena in pinned host memory, whose bump pointer is on the device like any
other's. If an arena is too small, the device notices (`Arena.needed`), whoever looks after the arenas makes room, and
the step is repeated. So nothing is copied for the worst case, and the host waits for nothing.

Autograd saves a *ticket* in place of what was offloaded, a tensor of one number. When the ticket is gone, so are the
host's copies: after the backward, or when activation checkpointing has no use for them.

Host memory is of buffers that are used again and again (`HostPool`). So steps can be captured as a CUDA graph: the copy
stream is forked into the capture by the first copy, and joined at its end; addresses stay, and arenas begin anew.

On a CPU the same code copies at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from carpool.activations.arena import Arena, copy_rows
from carpool.activations.arrivals import Rows
from carpool.activations.host_memory import HostPool, event_now, on_stream, wait_for


@dataclass(frozen=True, kw_only=True)
class Away(Rows):
    """Rows that are in host memory, but for those at home. `data` is the ticket.

    Attributes:
        index: which of the items under this ticket.
    """

    index: int


@dataclass
class _Parcel:
    """What one ride has offloaded.

    Attributes:
        lane, number: of which rides, and the how manieth.
        device: where the items were.
        host: the items in host memory.
        buffers: of the pool, in which they are, but for rows in an arena.
        copied: when they are there. None on a CPU.
        back, ready: the items on the device again, if they have been asked for ahead, and when they are there.
    """

    lane: _Lane
    number: int
    device: torch.device
    host: list[Rows]
    buffers: list[torch.Tensor]
    copied: torch.cuda.Event | None
    back: list[Rows] | None = None
    ready: torch.cuda.Event | None = None


@dataclass
class _Lane:
    """Rides that follow each other: all of them, or those of one half of a batch (`carpool.ride.two_batch`).

    Attributes:
        number: of the next ride.
        staging: the two arenas that rides use in turn.
        here: by number, the items of rides that are still on the device, and when they have been copied.
        parcels: by number; they go with their tickets.
    """

    number: int = 0
    staging: tuple[Arena, Arena] | None = None
    here: dict[int, tuple[list[Rows], torch.cuda.Event | None]] = field(default_factory=dict)
    parcels: weakref.WeakValueDictionary[int, _Parcel] = field(default_factory=weakref.WeakValueDictionary)


class Offloader:
    """Host memory for what rides keep; see the module's docstring. All layers of a model on a device share one, so that
    the backward of a layer asks for the items of the layer before it."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._lanes: dict[int, _Lane] = {}
        self._host: Arena | None = None
        self._pool: HostPool | None = None
        # By the number on the ticket. What is gone from here is freed.
        self._parcels: dict[int, _Parcel] = {}
        self._tickets = itertools.count(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloader:
        """For copies of the layers: what rides of this one's have offloaded stays here."""
        return Offloader()

    def staging(self, arena: Arena | None, lane_number: int = 0) -> Arena | None:
        """Where the next ride writes what it will offload. None: into tensors of its own, as its transport has no
        arena. Called by each ride before it writes.

        Args:
            arena: of the ride's transport.
            lane_number: which rides follow each other."""
        lane = self._lanes.setdefault(lane_number, _Lane())
        self._free(lane, lane.number - 1)
        if arena is None:
            return None
        if lane.staging is None:
            lane.staging = arena.companion(), arena.companion()
        if self._host is None:
            self._host = arena.companion(host=True)
        return lane.staging[lane.number % 2]

    def put(self, items: Sequence[Rows], lane_number: int = 0) -> list[Away]:
        """Copy the items of a ride to host memory. Until they are there, they stay on the device."""
        lane = self._lanes[lane_number]
        # Rows at home are the rank's own tokens, which autograd keeps anyway.
        here = [replace(item, home=None) for item in items]
        device = items[0].data.device
        with self._copying(device):
            buffers: list[torch.Tensor] = []
            host = [self._to_host(item, buffers) for item in here]
            parcel = _Parcel(lane, lane.number, device, host, buffers, event_now(device))
        name = next(self._tickets)
        ticket = torch.tensor([name], device="cpu")
        self._parcels[name] = lane.parcels[lane.number] = parcel
        # On the storage: what autograd hands back shares it, but is not the same tensor.
        weakref.finalize(ticket.untyped_storage(), self._forget, name).atexit = False
        lane.here[lane.number] = here, parcel.copied
        lane.number += 1
        return [
            Away(ticket, item.width, home=item.home, home_row=item.home_row, gaps=item.gaps, index=index)
            for index, item in enumerate(items)
        ]

    def get(self, away: Sequence[Away]) -> list[Rows]:
        """The items of a ride, on the device again. Those that the next backward will want are under way afterwards.

        Raises:
            RuntimeError: a hook on saved tensors has put a copy in the place of the ticket."""
        parcel = self._parcels.get(int(away[0].data))
        if parcel is None:
            raise RuntimeError(
                "what a ride had offloaded was let go before its backward: a hook on saved tensors (save_on_cpu, "
                "offloading) put a copy in the place of its ticket; leave out that hook, or keep rows and hidden"
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
        return [replace(back[one.index], home=one.home) for one in away]

    def join(self) -> None:
        """Once all backwards have run: the current stream goes on when all copies are done, and nothing is left on the
        device. Around the capture of a CUDA graph, and at its end."""
        for lane in self._lanes.values():
            self._free(lane, -1)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def abandon(self) -> None:
        """A capture has failed: what it has offloaded is nobody's, and nobody may wait for its events any more."""
        for parcel in self._parcels.values():
            parcel.copied = parcel.ready = None
        for lane in self._lanes.values():
            lane.here.clear()

    # -- how ----------------------------------------------------------------------------------------------------

    def _to_host(self, item: Rows, buffers: list[torch.Tensor]) -> Rows:
        if item.start is not None:
            assert self._host is not None, "a ride asks for its staging arena before it writes"
            return copy_rows(item, self._host)
        data = item.data
        if self._pool is None:
            self._pool = HostPool(data.device)
        # Gaps between elements have places, too.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        size = extent * data.itemsize if data.numel() else 0
        buffers.append(self._pool.take(size))
        host = buffers[-1][:size].view(data.dtype).as_strided(data.shape, data.stride())
        return replace(item, data=host.copy_(data, non_blocking=True))

    def _fetch(self, parcel: _Parcel) -> None:
        """Let its items come back."""
        # Memory that the computation takes, and gives back when it has used it.
        tensors = [_empty(i.data, parcel.device) if i.start is None else None for i in parcel.host]
        back = []
        # After what is enqueued so far, which may still read the memory that the items will lie in.
        with self._copying(parcel.device):
            for item, tensor in zip(parcel.host, tensors, strict=True):
                if tensor is not None:
                    back.append(replace(item, data=tensor.copy_(item.data, non_blocking=True)))
                else:
                    assert parcel.lane.staging is not None
                    back.append(copy_rows(item, parcel.lane.staging[parcel.number % 2]))
            parcel.back, parcel.ready = back, event_now(parcel.device)

    def _free(self, lane: _Lane, number: int) -> None:
        """Let go of what is still on the device, but for one ride's. Whoever gets the memory comes after the copies."""
        for one in [one for one in lane.here if one != number]:
            wait_for(lane.here.pop(one)[1])

    def _forget(self, name: int) -> None:
        parcel = self._parcels.pop(name, None)
        if parcel is None:
            return
        if parcel.back is not None:
            wait_for(parcel.ready)  # nobody will use what is on its way back, but its memory is not free before it came
        for buffer in parcel.buffers:
            assert self._pool is not None
            self._pool.give(buffer)

    def _copying(self, device: torch.device) -> AbstractContextManager[object]:
        """What is enqueued inside runs on the copy stream, after what is enqueued so far."""
        if self._stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        return on_stream(self._stream, event_now(device))


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
