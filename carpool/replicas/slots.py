"""Filling slots with the parameters of their homes, and summing the gradients of slots at the homes.

If every slot is a home, nothing is done. Otherwise each home sends its expert's parameters (a row of the stacked
parameters) to the slots of other ranks that replicate it. In the backward every slot sends its gradient to the home,
where they are added in float32 in order of (rank, slot). Without this reduction a replica would train on a part of its
tokens, and the loss would look normal, so the parity tests break it on purpose and must fail.

    homes 0: [0, 1]  1: [2, 3]      slots 0: [0, 1]  1: [2, 3, 1]
    forward    rank 0 sends row 1 to rank 1, which copies its own rows to the other slots
    backward   rank 1 sends the gradient of its slot 2 to rank 0, which adds it to that of its own slot 1

Slots of a home's own rank are copied, and a single gradient is not summed. So a replica costs its communication: one
expert's parameters in the forward, its gradients in the backward.

A layer waits for both, each time it runs. `carpool.ride.balanced` has replicas for a micro-batch, which are fetched
while tokens travel.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from carpool.experts import ExpertWeights
from carpool.kernels.device import on_gpu, ordered_sum
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Meter, in_recompute, new_counter


class _Indices(NamedTuple):
    """Indices of one rank, int64 except the last. Rows are rows of the homes' stacked parameters.

    send_rows: rows sent to other ranks, by rank, in the order of their slots;  arrival_slots: the slots of received
        rows.
    own_rows, own_slots: rows copied to slots of this rank. summed_rows: rows whose gradient is not just that of one
    slot of this rank. `order_N` selects the terms of their sums, row after row, each in order of (rank, slot), from the
    received gradients followed by `summed_slots`; `summed_N` has the row of each term, `starts` the first term of each
    row, and the end. first_S1: bool, whether a slot computes the first slice of its expert.
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
    first_S1: torch.Tensor


class SlotFiller:
    """Communicates expert parameters and gradients between the homes and slots of one layout.

    Args:
        layout: homes and slots.
        group: the expert-parallel process group; None for one rank.
        meter: of the layer; its span "fill" is the time that the layer waited for its slots.

    Attributes:
        send, receive: numbers of experts sent to and received from each rank, 0 for itself.
        travels: whether any rank sends anything.
        bytes_filled, bytes_summed: bytes of weights, and of gradients, sent to other ranks since `reset`.
        load_P: with replicas, choices of this rank's tokens for each slot of the group since `reset` (and one more
            entry for no expert), int64. None without replicas, where a slot's load is its expert's.
    """

    def __init__(self, layout: ExpertLayout, group: dist.ProcessGroup | None, meter: Meter | None = None) -> None:
        self.layout, self.group, self.meter = layout, group, meter
        self.rank = dist.get_rank(group) if group is not None else 0
        self.load_P: torch.Tensor | None = None
        self.reset()
        self.num_slots = len(layout.slots[self.rank])
        self.num_homes = len(layout.homes[self.rank])
        self._plan()

    def reset(self) -> None:
        """Reset the counters."""
        self._filled = self._summed = 0
        if self.load_P is not None:
            self.load_P.zero_()

    @property
    def bytes_filled(self) -> int:
        return self._filled

    @property
    def bytes_summed(self) -> int:
        return self._summed

    @property
    def hops(self) -> tuple[SlotFiller, ...]:
        """The fillers that run one after the other; the first has the homes."""
        return (self,)

    @torch.no_grad()
    def count(self, slot_TK: torch.Tensor) -> None:
        """Count the choices that each slot serves in a forward, if there are replicas. Recomputation is not counted."""
        if not self.layout.num_replicas or in_recompute():
            return
        places = self.layout.num_ranks * self.layout.slots_per_rank
        if self.load_P is None:
            self.load_P = new_counter((places + 1,), torch.int64, slot_TK.device)
        if not torch.compiler.is_compiling() and on_gpu(slot_TK):
            from carpool.layout.assign_kernel import count_slots

            count_slots(slot_TK, self.load_P)
            return
        index = torch.where(slot_TK < 0, places, slot_TK).reshape(-1).long()
        self.load_P.scatter_add_(0, index, torch.ones_like(index))

    def _plan(self) -> None:
        layout, me, ranks = self.layout, self.rank, range(self.layout.num_ranks)
        row_of = {e: row for row, e in enumerate(layout.homes[me])}
        # (rank, slot, home row) of each slot that computes an expert of this rank, in that order.
        served = [(w, slot, row_of[e]) for w in ranks for slot, e in enumerate(layout.slots[w]) if e in row_of]
        sends = [[row for w, _, row in served if w == rank != me] for rank in ranks]
        mine = [(slot, *layout.home_of[e]) for slot, e in enumerate(layout.slots[me]) if e != -1]
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
        self.travels = self.group is not None and any(
            w != layout.home_of[e][0] for w in ranks for e in layout.slots[w] if e != -1
        )
        # If own rows have the same order in homes and slots, they are copied as one range.
        straight = list(range(len(own)))
        self.prefix = len(own) if lists[2] == straight == lists[3] else None
        self.full = len(mine) == self.num_slots
        first_S1 = (layout.slice_WS[me, : self.num_slots] == 0).unsqueeze(1)
        self._indices = _Indices._make([*(torch.tensor(one, dtype=torch.int64) for one in lists), first_S1])
        self._on_device: dict[torch.device, _Indices] = {}

    def fill(self, home: torch.Tensor) -> torch.Tensor:
        """(homes of this rank, ...) -> (slots of this rank, ...), differentiable. Collective."""
        return home if self.layout.slot_is_home else _Fill.apply(home, self)

    def indices(self, device: torch.device) -> _Indices:
        """The indices on a device, cached."""
        if device not in self._on_device:
            self._on_device[device] = _Indices(*(one.to(device) for one in self._indices))
        return self._on_device[device]

    def send_rows(self, home: torch.Tensor) -> Transfer:
        """Start to send this rank's homes to other ranks' slots, where they arrive by rank, in the order of slots."""
        rows = home.detach()[self.indices(home.device).send_rows]
        self._filled += rows.nbytes
        return self._exchange(rows, self.send, self.receive)

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Wait for parameters of slots."""
        with self.meter.span("fill", transfer.out.device) if self.meter is not None else nullcontext():
            return transfer.wait()

    def send_gradients(self, dslots: torch.Tensor) -> Transfer:
        """Start to send the gradients of slots to homes on other ranks. They arrive in order of (rank, slot)."""
        rows = dslots[self.indices(dslots.device).arrival_slots]
        self._summed += rows.nbytes
        return self._exchange(rows, self.receive, self.send)

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

    def slots(self, home: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """The parameters of this rank's slots, from those of its homes and those that arrived."""
        index, shape = self.indices(home.device), (self.num_slots, *home.shape[1:])
        slots = home.new_empty(shape) if self.full else home.new_zeros(shape)
        if self.prefix is not None:
            slots[: self.prefix] = home[: self.prefix]
        else:
            slots[index.own_slots] = home[index.own_rows]
        slots[index.arrival_slots] = arrived
        return slots

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


def fill_slots(home: ExpertWeights, filler: SlotFiller) -> ExpertWeights:
    """The weights of this rank's slots from those of its homes, differentiable. Collective unless slots are homes.

    Raises:
        ValueError: sliced experts with adapters or quantised weights, which cannot be sliced."""
    if filler.layout.slot_is_home and filler.layout.slices == 1:
        return home
    slots = ExpertWeights._make([None if rows is None else filler.fill(rows) for rows in home])
    if filler.layout.slices == 1:
        return slots
    if slots.adapted or slots.quantised:
        what = "adapters" if slots.adapted else "a quantised base"
        raise ValueError(
            f"experts with {what} cannot be cut into slices ({filler.layout.slices} of each expert here): use expert "
            "parallelism alone (etp_size = 1)"
        )
    if slots.down_bias_SH is not None:
        # The biases of other slices than the first are zero, but would get a gradient each.
        slots = slots._replace(down_bias_SH=_OfFirstSlices.apply(slots.down_bias_SH, filler))
    return slots


class _OfFirstSlices(torch.autograd.Function):
    """Zeros for other slices than the first. Autograd saves nothing: a product would save its factor, and a deferred
    weight gradient (`carpool.ride.setup`) would cause another recomputation of a checkpointed layer."""

    @staticmethod
    def forward(ctx: Any, rows_SH: torch.Tensor, filler: SlotFiller) -> torch.Tensor:
        ctx.filler = filler
        return rows_SH * filler.indices(rows_SH.device).first_S1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_SH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return drows_SH * ctx.filler.indices(drows_SH.device).first_S1, None


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, filler: SlotFiller) -> torch.Tensor:
        ctx.filler = filler
        return filler.slots(home, filler.wait(filler.send_rows(home)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dslots: torch.Tensor) -> tuple[torch.Tensor, None]:
        filler: SlotFiller = ctx.filler
        return filler.homes(dslots, filler.send_gradients(dslots).wait()), None
