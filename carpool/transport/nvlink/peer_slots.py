"""Replicas over peer memory: loads, experts and gradients of spare slots without the host (`SlotLinks`).

    loads        each rank writes its choices of every expert into the memory of all ranks, and waits for theirs
    fetch        homes write the experts that the plan names into spare slots of other ranks, by a few programs on a
                 stream of their own, while tokens travel and homes compute; a rank's stream waits before replicas do
    gradients    stay in the memory of the rank that computed them; homes read them, and add them in float32 in order of
                 (rank, slot), their own in its place

    expert 0 of rank 0 is also in the first spare slot of rank 2
    fetch        rank 0 -> slot 0 of rank 2, of each matrix, bias, factor of an adapter, code and scale
    gradients    rank 0: own term + slot 0 of rank 2

Shapes are static, signals carry an epoch that is counted on the device, and no call reads the device: so CUDA graphs
contain them. Only spare slots have memory here: experts at home read their parameters where these are, and compute
before the spare slots are waited for (`carpool.experts.slot_ranges`).

**Two sets of slots suffice,** for all layers of the same shapes. A set is taken by a fetch and released after the
experts that read it were launched; what overlaps rides decides how many are taken at a time:

    a layer, chunks of it        chunks share the ride's plan and its fetch: one
    backward, recomputation      a layer is computed again, then its backward fetches: one after the other, so one
    two micro-batches            each half has one ride under way, in the forward and in the backward: two
    forward beside backward      likewise two

So the second set is only allocated where two rides are under way. That no peer writes into a set before it has been
read does not follow from the order of rides, because a backward has no exchange of loads: each rank signals its
release to all, and homes wait for that on the device before they write. The wait is over when it begins, except where a
rank is a whole ride behind. Loads need no such signal: a rank that sends its loads of ride n + 2 has those of n + 1
from all ranks, who sent them after they had read n; two places suffice. Gradients have one place, and a signal.

A rank that is missing is found as in other verbs: waits are bounded, and `Buffers.check` raises at the next call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from carpool.kernels import MAX_CTAS
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Meter
from carpool.transport.base import Fetched
from carpool.transport.nvlink.buffers import PAGE, SharedMemory
from carpool.transport.token_capacity import PairCapacity

if TYPE_CHECKING:
    from carpool.transport.nvlink.transport import VerbRunner

# Signals of a piece of memory: `free` at its start, one for each program of each rank; then `came`, as many.
FREE_AT = 0
SETS = 2
LOADS, FETCH, SUM = 5, 6, 7  # of `buffers.VERBS`


class PeerSlots:
    """See the module's docstring; a `carpool.replicas.slot_links.SlotLinks`.

    Args:
        transport: in whose buffers and streams.
        layout: of the layer, whose slots are its homes.
        spare: spare slots of each rank.
        pairs: gets what each plan needs; None: experts allocate for any routing.
    """

    waits_for_host: ClassVar[bool] = False

    def __init__(
        self,
        transport: VerbRunner,
        layout: ExpertLayout,
        spare: int,
        meter: Meter | None = None,
        pairs: PairCapacity | None = None,
    ) -> None:
        self.transport, self.buffers, self.spare = transport, transport.buffers, spare
        self.meter, self.pairs = meter, pairs
        self.homes = layout.slots_per_rank
        places = [rank * self.homes + row for rank, row in layout.home_of]
        self._home_E = torch.tensor(places, dtype=torch.int32, device=self.buffers.device)
        self._came_at = _pages(self.buffers.num_ranks * MAX_CTAS * 4)

    def gather_loads(self, load_E: torch.Tensor) -> torch.Tensor:
        from carpool.transport.nvlink.launch import launch_loads

        self.buffers.check()
        memory, (at,) = self._memory("loads", [2 * self.buffers.num_ranks * load_E.nbytes])
        load_E, load_WE = load_E.contiguous(), load_E.new_empty(self.buffers.num_ranks, len(load_E))

        def launch(send: bool, receive: bool) -> None:
            launch_loads(load_E, load_WE, memory, self.buffers, LOADS, self._came_at, at, send, receive)

        self.transport._run_here(launch)()
        return load_WE

    def take(self, plan: Any) -> torch.Tensor:
        if self.pairs is not None:
            self.pairs.note(plan.load_W)
        expert_WS: torch.Tensor = plan.expert_WS
        return expert_WS.contiguous()

    def fetch(self, homes: Sequence[torch.Tensor], handle: torch.Tensor) -> Fetched:
        from carpool.transport.nvlink.launch import FETCH_CTAS, launch_gate, launch_push

        self.buffers.check()
        memory, places = self._memory("fetch", [self.spare * _row_bytes(home) for home in homes], homes, SETS)
        memory.busy = True
        slots = [_view(memory, at, self.spare, home) for at, home in zip(places, homes, strict=True)]
        rows = [home.detach().contiguous() for home in homes]

        def launch(send: bool, receive: bool) -> None:
            if send:
                launch_gate(memory, self.buffers, FETCH, wait_at=FREE_AT, following=True)
                for i, (row, at) in enumerate(zip(rows, places, strict=True)):
                    last = i == len(rows) - 1
                    launch_push(row, handle, self._home_E, memory, self.buffers, self.homes, at, self._came_at, last)
            if receive:
                launch_gate(memory, self.buffers, FETCH, wait_at=self._came_at, each=FETCH_CTAS)

        finish = self.transport._run_beside(launch, handle, *rows)

        def wait() -> list[torch.Tensor]:
            with nullcontext() if self.meter is None else self.meter.span("fill", self.buffers.device):
                finish()
            return slots

        def launch_release(send: bool, receive: bool) -> None:
            if send:
                launch_gate(memory, self.buffers, FETCH, send_at=FREE_AT)

        def release() -> None:
            self.transport._run_here(launch_release)()
            memory.busy = False

        return Fetched(wait, release)

    def send_home(
        self, dhomes: Sequence[torch.Tensor], dspare: Sequence[torch.Tensor], handle: torch.Tensor
    ) -> list[torch.Tensor]:
        from carpool.transport.nvlink.launch import SUM_CTAS, launch_gate, launch_sum

        self.buffers.check()
        memory, places = self._memory("sum", [self.spare * _row_bytes(one) for one in dspare], dspare)
        rows = [one.contiguous() for one in dhomes]

        def launch(send: bool, receive: bool) -> None:
            if send:
                launch_gate(memory, self.buffers, SUM, wait_at=FREE_AT, each=SUM_CTAS, following=True)
                for one, at in zip(dspare, places, strict=True):
                    _view(memory, at, self.spare, one).copy_(one)
                launch_gate(memory, self.buffers, SUM, send_at=self._came_at)
            if receive:
                for i, (row, at) in enumerate(zip(rows, places, strict=True)):
                    launch_sum(
                        row, handle, self._home_E, memory, self.buffers, SUM, self.homes, at, self._came_at, FREE_AT,
                        first=i == 0, last=i == len(rows) - 1,
                    )  # fmt: skip

        if rows:
            self.transport._run_here(launch)()
        return rows

    def sent(self, handle: torch.Tensor) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        replicas = (handle >= 0).sum() if self.buffers.rank == 0 else 0
        return replicas, replicas

    def _memory(
        self, what: str, sizes: Sequence[int], rows: Sequence[torch.Tensor] = (), most: int = 1
    ) -> tuple[SharedMemory, list[int]]:
        """Memory for signals and regions of these sizes, which all layers with such rows share, and where each region
        begins. Collective when it must be allocated; in the same order on all ranks.

        Args:
            most: pieces that may be busy at a time."""
        places, end = [], 2 * self._came_at
        for size in sizes:
            places.append(end)
            end += _pages(size)
        key = (what, tuple(sizes), tuple((row.shape[1:], row.dtype) for row in rows))
        several = self.buffers.shared.setdefault(key, [])
        for _ in several:
            # The one that was used longest ago comes first.
            several.append(several.pop(0))
            if not several[-1].busy:
                return several[-1], places
        if len(several) == most:
            raise RuntimeError(
                f"{most} rides with spare slots have not computed their experts yet, and there are no more slots: "
                "leave out the spare slots, or what overlaps more than two rides"
            )
        several.append(self.buffers.share(end))
        return several[-1], places


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _row_bytes(rows: torch.Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def _view(memory: SharedMemory, at: int, number: int, like: torch.Tensor) -> torch.Tensor:
    """(number, ...) rows like those of a tensor, in the region that starts at byte `at`."""
    end = at + number * _row_bytes(like)
    return memory.bytes[at:end].view(like.dtype).view(number, *like.shape[1:])
