"""Several ranks in one process: `NVLink` transports whose buffers are tensors of this process.

Triton's interpreter follows the int64 addresses between them as a GPU follows them over NVLink. Programs run one after
the other, so a verb is sent on all ranks before any of them receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from carpool.experts import ExpertWeights
from carpool.metrics.counters import LayerStats
from carpool.routing import Routing
from carpool.transport import Pending, make_transport
from carpool.transport.nvlink import Buffers, NVLink, NVLinkOptions
from carpool.transport.nvlink.buffers import Lease, Regions, SharedMemory

CPU = torch.device("cpu")
# (transport, x_TH, routing, weights, stats, rank or None) -> y_TH
Ride = Callable[[Any, torch.Tensor, Routing, ExpertWeights, LayerStats, int | None], torch.Tensor]


class Halves(NVLink):
    """Sends at the verb, and receives at `Pending.wait`."""

    def _run(self, launch: Any, *_: torch.Tensor) -> Any:
        return self._run_here(launch)

    def _run_here(self, launch: Any) -> Any:
        launch(True, False)
        return lambda: launch(False, True)

    def _awaited_by_readers(self, finish: Any) -> Any:
        return finish

    def _released(self, lease: Lease, finish: Any, value: Any) -> Pending:
        def wait() -> Any:
            finish()
            self.buffers.release(lease)
            return value()

        return Pending(wait)


def emulate(
    num_ranks: int,
    slots_per_rank: int,
    *,
    capacity: int,
    row_bytes: int,
    top_k: int,
    most: int | None = None,
    num_leases: int = 2,
    filled: int = 0xF9,
    **options: Any,
) -> list[NVLink]:
    """One transport for each rank. What no kernel has written has these bytes: garbage (-7 or NaN, mostly), or with
    0xFF NaN alone."""
    most = capacity if most is None else most
    regions = Regions.of(num_ranks, most, capacity, row_bytes, top_k)
    owners = []
    for rank in range(num_ranks):
        owner = Buffers(None, CPU, num_leases=num_leases, max_tokens=most, capacity=capacity)
        owner.num_ranks, owner.rank = num_ranks, rank
        owner.host_status = torch.zeros(1 + num_ranks, dtype=torch.int32)
        owner._row = (row_bytes, top_k)
        owners.append(owner)
    for _ in range(num_leases):
        parts = [torch.full((regions.total,), filled, dtype=torch.uint8) for _ in range(num_ranks)]
        for part in parts:
            part[: regions.tokens] = 0
        addresses = tuple(part.data_ptr() for part in parts)
        bases = torch.tensor(addresses)
        for owner, part in zip(owners, parts, strict=True):
            owner._leases.append(Lease(part, addresses, bases, torch.zeros(2, dtype=torch.int32), regions))
    options = {"dispatch_ctas": 3, "combine_ctas": 2} | options
    return [Halves(None, slots_per_rank, NVLinkOptions(**options), owner) for owner in owners]


def verb(ranks: list[NVLink], call: Callable[[int, NVLink], Any]) -> list[Any]:
    """A verb on all ranks: send everywhere, then receive everywhere."""
    pending = [call(rank, transport) for rank, transport in enumerate(ranks)]
    return [p.wait() for p in pending]


class Meeting:
    """Ranks in threads, of which one runs at a time, as the interpreter wants: a launch sends, meets the others, and
    receives.

    Args:
        parties: threads that meet.
        turn: of the interpreter, where several groups meet.
    """

    def __init__(self, parties: int, turn: threading.Lock | None = None) -> None:
        self.turn, self.barrier = turn or threading.Lock(), threading.Barrier(parties, timeout=240)

    def __call__(self, launch: Callable[[bool, bool], None], *tensors: torch.Tensor) -> Callable[[], None]:
        launch(True, False)
        self.meet()

        def receive() -> None:
            launch(False, True)
            # Nobody sends the next before all have received this.
            self.meet()

        return receive

    def meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


def connect(transports: list[NVLink], meeting: Meeting) -> None:
    """Give each transport to a thread of its own: verbs meet, and symmetric memory is that of all of them."""
    parts: list[torch.Tensor | None] = [None] * len(transports)

    def share_of(rank: int) -> Callable[[int], SharedMemory]:
        def share(size: int) -> SharedMemory:
            parts[rank] = torch.zeros(size, dtype=torch.uint8)
            meeting.meet()
            bases = torch.tensor([part.data_ptr() for part in parts if part is not None])
            memory = SharedMemory(parts[rank], bases, torch.zeros(1, dtype=torch.int32))
            meeting.meet()
            return memory

        return share

    for rank, transport in enumerate(transports):
        for name in ("_run", "_run_here", "_run_beside"):
            setattr(transport, name, meeting)
        transport.buffers.share = share_of(rank)  # type: ignore[method-assign]


def on_threads(ranks: int, work: Callable[[int], Any], *meetings: Meeting) -> list[Any]:
    """What `work` gives on each rank, in a thread of its own. `meetings`: of these, which have their turn in common."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with meetings[0].turn if meetings else nullcontext():
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                for meeting in meetings:
                    meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


class RideProblem:
    """Experts, a routing of several ranks, and what a ride makes of both there and on one rank that holds all experts.

    Args:
        tokens: of each rank.
        slots: experts of each rank.
        scale: divide matrices by the root of what they sum over.
    """

    def __init__(
        self, tokens: tuple[int, ...], top_k: int, slots: int, hidden: int, inner: int, scale: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.tokens, self.slots, self.ranks, self.experts = tokens, slots, len(tokens), slots * len(tokens)
        self.up, self.down = draw(self.experts, 2 * inner, hidden), draw(self.experts, hidden, inner)
        if scale:
            self.up, self.down = self.up / hidden**0.5, self.down / inner**0.5
        self.slot = torch.rand(sum(tokens), self.experts, generator=generator).argsort(1)[:, :top_k].int()
        self.slot[::4, 1] = -1
        self.x, self.dy, self.weight = (draw(sum(tokens), size) for size in (hidden, hidden, top_k))
        self.weight.abs_()
        self.stats = [LayerStats(self.experts, self.ranks, rank) for rank in range(self.ranks)]

    def rows_of(self, rank: int) -> slice:
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])

    def _run(self, call: Ride, transport: Any, rank: int | None) -> list[torch.Tensor]:
        """Output and gradients."""
        mine = homes = slice(None)
        if rank is not None:
            mine, homes = self.rows_of(rank), slice(rank * self.slots, (rank + 1) * self.slots)
        x, weight, up, down = leaves = [
            whole[part].clone().requires_grad_()
            for whole, part in zip((self.x, self.weight, self.up, self.down), (mine, mine, homes, homes), strict=True)
        ]
        stats = LayerStats(self.experts, 1, 0) if rank is None else self.stats[rank]
        y = call(transport, x, Routing(self.slot[mine], weight), ExpertWeights(up, down), stats, rank)
        y.backward(self.dy[mine])
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def on_one_rank(self, call: Ride) -> list[torch.Tensor]:
        return self._run(call, make_transport("dedup", None, self.experts), None)

    def on_ranks(self, call: Ride, transports: list[Any], *meetings: Meeting) -> list[torch.Tensor]:
        """Of all ranks together, as on one."""
        found = on_threads(self.ranks, lambda rank: self._run(call, transports[rank], rank), *meetings)
        assert not any(transport.buffers.busy for transport in transports)
        return [torch.cat(of_ranks) for of_ranks in zip(*found, strict=True)]
