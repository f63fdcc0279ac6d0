"""Filling slots with the parameters of their homes, and summing the gradients of slots at the homes, by collectives.

Each home sends its expert's parameters (a row of the stacked parameters) to the slots of other ranks that replicate it.
In the backward every slot sends its gradient to the home, where they are added in float32 in order of (rank, slot).
Without this reduction a replica would train on a part of its tokens, and the loss would look normal, so the parity
tests break it on purpose and must fail.

    homes 0: [0, 1]  1: [2, 3]      slots 0: [0, 1]  1: [2, 3, 1]
    forward    rank 0 sends row 1 to rank 1, which copies its own rows to the other slots
    backward   rank 1 sends the gradient of its slot 2 to rank 0, which adds it to that of its own slot 1

Slots of a home's own rank are copied, and a single gradient is not summed. So a replica costs its communication: one
expert's parameters in the forward, its gradients in the backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from carpool.kernels.device import on_gpu, ordered_sum
from carpool.metrics.counters import Meter


class _Indices(NamedTuple):
    """Indices of one rank, int64. Rows are rows of the homes' stacked parameters.

    send_rows: rows sent to other ranks, by rank, in the order of their slots;  arrival_slots: the slots of received
        rows.
    own_rows, own_slots: rows copied to slots of this rank. summed_rows: rows whose gradient is not just that of one
    slot of this rank. `order_N` selects the terms of their sums, row after row, each in order of (rank, slot), from the
    received gradients followed by `summed_slots`; `summed_N` has the row of each term, `starts` the first term of each
    row, and the end.
    """

    send_rows: torch.Tensor
    arrival_slots: torch.Tensor
    own_rows: torch.Tensor
    own_slots: torch.Tensor
    summed_rows: torch.Tensor
    summed_slots: torch.Tensor
    order_N: torch.Tensor
    summed_N: torch.Tensor
    starts: torch.Tensor


class SlotFiller:
    """Communicates expert parameters and gradients between homes and slots.

    Args:
        homes: for each rank of the group, the experts whose parameters it has, in row order.
        slots: for each rank, the experts in its slots, -1: an empty one. Every expert has a home, and is in a slot.
        meter: of the layer; its span "fill" is the time that the layer waited for its slots.

    Attributes:
        send, receive: numbers of experts sent to and received from each rank, 0 for itself.
        travels: whether any rank sends anything.
    """

    def __init__(
        self,
        homes: Sequence[Sequence[int]],
        slots: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        meter: Meter | None = None,
    ) -> None:
        self.group, self.meter = group, meter
        me, ranks = dist.get_rank(group), range(len(homes))
        self.num_slots, self.num_homes = len(slots[me]), len(homes[me])
        home_of = {e: (rank, row) for rank, experts in enumerate(homes) for row, e in enumerate(experts)}
        row_of = {e: row for row, e in enumerate(homes[me])}
        # (rank, slot, home row) of each slot that computes an expert of this rank, in that order.
        served = [(w, slot, row_of[e]) for w in ranks for slot, e in enumerate(slots[w]) if e in row_of]
        sends = [[row for w, _, row in served if w == rank != me] for rank in ranks]
        mine = [(slot, *home_of[e]) for slot, e in enumerate(slots[me]) if e != -1]
        arriving = [[slot for slot, home, _ in mine if home == rank != me] for rank in ranks]
        own = [(slot, row) for slot, home, row in mine if home == me]
        self.send, self.receive = [len(rows) for rows in sends], [len(slots) for slots in arriving]

        slots_of_row = {row: [(w, slot) for w, slot, r in served if r == row] for row in row_of.values()}
        summed = [row for row, places in slots_of_row.items() if [w for w, _ in places] != [me]]
        place = {row: i for i, row in enumerate(summed)}
        own_summed = [slot for slot, row in own if row in place]
        came = iter(range(sum(self.send)))
        summands = []
        for w, slot, row in served:
            back = next(came) if w != me else sum(self.send) + own_summed.index(slot) if row in place else -1
            if row in place:
                summands.append((place[row], back))
        summands.sort(key=lambda one: one[0])
        target = [row for row, _ in summands]
        lists = (
            [row for rows in sends for row in rows],
            [slot for slots in arriving for slot in slots],
            [row for _, row in own],
            [slot for slot, _ in own],
            summed,
            own_summed,
            [back for _, back in summands],
            target,
            [bisect_left(target, row) for row in range(len(summed) + 1)],
        )
        self.travels = any(w != home_of[e][0] for w in ranks for e in slots[w] if e != -1)
        # If own rows have the same order in homes and slots, they are copied as one range.
        straight = list(range(len(own)))
        self.prefix = len(own) if lists[2] == straight == lists[3] else None
        self.own_slots = lists[3]
        self.full = len(mine) == self.num_slots
        self._indices = _Indices._make(torch.tensor(one, dtype=torch.int64) for one in lists)
        self._on_device: dict[torch.device, _Indices] = {}

    def indices(self, device: torch.device) -> _Indices:
        """The indices on a device, cached."""
        if device not in self._on_device:
            self._on_device[device] = _Indices(*(one.to(device) for one in self._indices))
        return self._on_device[device]

    def send_rows(self, home: torch.Tensor) -> Transfer:
        """Start to send this rank's homes to other ranks' slots, where they arrive by rank, in the order of slots."""
        return self._exchange(home.detach()[self.indices(home.device).send_rows], self.send, self.receive)

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Wait for parameters of slots."""
        with self.meter.span("fill", transfer.out.device) if self.meter is not None else nullcontext():
            return transfer.wait()

    def send_gradients(self, dslots: torch.Tensor, first: int = 0) -> Transfer:
        """Start to send the gradients of slots to homes on other ranks. They arrive in order of (rank, slot).

        Args:
            dslots: from slot `first` on; none before is a replica."""
        return self._exchange(dslots[self.indices(dslots.device).arrival_slots - first], self.receive, self.send)

    def add_up(self, back: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The gradients of `summed_rows`, from the received ones and those of this rank's own slots."""
        index = self.indices(back.device)
        rows, count = torch.cat([back, own]).flatten(1), len(index.summed_rows)
        if not torch.compiler.is_compiling() and on_gpu(rows):
            # As `ordered_sum`, without its sort and its copy into order.
            from carpool.kernels.ordered_sum_kernel import launch

            wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
            total = torch.empty(count, rows.shape[1], dtype=wide, device=rows.device)
            launch(rows, index.order_N, index.starts, None, total)
        else:
            total = ordered_sum(rows[index.order_N], index.summed_N, count)
        return total.view(-1, *own.shape[1:]).to(own.dtype)

    def slots(self, home: torch.Tensor, arrived: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The parameters of this rank's slots from `first` on, from those of its homes and those that arrived; before
        `first` there are only homes."""
        index, shape = self.indices(home.device), (self.num_slots - first, *home.shape[1:])
        slots = home.new_empty(shape) if self.full else home.new_zeros(shape)
        if self.prefix is not None:
            slots[: max(0, self.prefix - first)] = home[first : self.prefix]
        else:
            own = bisect_left(self.own_slots, first)
            slots[index.own_slots[own:] - first] = home[index.own_rows[own:]]
        slots[index.arrival_slots - first] = arrived
        return slots

    def add_to(self, dhome: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """As `homes`, in place, where the first slots are the homes in their order: `dhome` is their part."""
        index = self.indices(dhome.device)
        if len(index.summed_rows):
            dhome[index.summed_rows] = self.add_up(back, dhome[index.summed_slots])
        return dhome

    def homes(self, dslots: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """The gradients of this rank's homes, from those of its slots and those that came back."""
        index = self.indices(dslots.device)
        dhome = dslots.new_empty(self.num_homes, *dslots.shape[1:])
        if self.prefix is not None:
            dhome[: self.prefix] = dslots[: self.prefix]
        else:
            dhome[index.own_rows] = dslots[index.own_slots]
        if len(index.summed_rows):
            dhome[index.summed_rows] = self.add_up(back, dslots[index.summed_slots])
        return dhome

    def _exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> Transfer:
        if not self.travels:
            return Transfer(rows, rows, None)
        out, rows = rows.new_empty(sum(receive), *rows.shape[1:]), rows.contiguous()
        # torch.compile supports only the synchronous one.
        under_way = not torch.compiler.is_compiling()
        work = dist.all_to_all_single(out, rows, receive, send, group=self.group, async_op=under_way)
        return Transfer(out, rows, work)


class Transfer:
    """An asynchronous all-to-all, with its receive buffer `out`."""

    def __init__(self, out: torch.Tensor, sent: torch.Tensor, work: dist.Work | None) -> None:
        self.out = out
        self._sent: torch.Tensor | None = sent
        self._work = work

    def wait(self) -> torch.Tensor:
        """Let the current stream wait, and return `out`. On CUDA the host does not wait."""
        if self._work is not None:
            self._work.wait()
            if self.out.is_cuda:
                # If another stream started the transfer, it must not reuse the memory too early.
                stream = torch.cuda.current_stream(self.out.device)
                for tensor in (self.out, self._sent):
                    assert tensor is not None
                    tensor.record_stream(stream)
        self._work = self._sent = None
        return self.out
