"""Several ranks in one process: `NVLink` transports whose buffers are tensors of this process.

Triton's interpreter follows the int64 addresses between them as a GPU follows them over NVLink. Programs run one after
the other, so a verb is sent on all ranks before any of them receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from carpool.transport import Pending
from carpool.transport.nvlink import Buffers, NVLink, NVLinkOptions
from carpool.transport.nvlink.buffers import Lease, Regions, SharedMemory

CPU = torch.device("cpu")


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
    **options: Any,
) -> list[NVLink]:
    """One transport for each rank. What no kernel has written reads as garbage (-7 or NaN, mostly)."""
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
        parts = [torch.full((regions.total,), 0xF9, dtype=torch.uint8) for _ in range(num_ranks)]
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
    """A launch that sends, meets all other threads, and receives; one kernel at a time, as the interpreter wants.

    Args:
        parties: threads that meet.
        lock: of the interpreter, where several groups meet.
    """

    def __init__(self, parties: int, lock: threading.Lock | None = None) -> None:
        self.lock, self.barrier = lock or threading.Lock(), threading.Barrier(parties, timeout=240)

    def __call__(self, launch: Callable[[bool, bool], None], *tensors: torch.Tensor) -> Callable[[], None]:
        with self.lock:
            launch(True, False)
        self.barrier.wait()

        def receive() -> None:
            with self.lock:
                launch(False, True)
            # Nobody sends the next before all have received this.
            self.barrier.wait()

        return receive

    def locked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **settings: Any) -> Any:
            with self.lock:
                return call(*args, **settings)

        return alone


def connect(transports: list[NVLink], meeting: Meeting) -> None:
    """Give each transport to a thread of its own: verbs meet, and symmetric memory is that of all of them."""
    parts: list[torch.Tensor | None] = [None] * len(transports)

    def share_of(rank: int) -> Callable[[int], SharedMemory]:
        def share(size: int) -> SharedMemory:
            parts[rank] = torch.zeros(size, dtype=torch.uint8)
            meeting.barrier.wait()
            bases = torch.tensor([part.data_ptr() for part in parts if part is not None])
            memory = SharedMemory(parts[rank], bases, torch.zeros(1, dtype=torch.int32))
            meeting.barrier.wait()
            return memory

        return share

    for rank, transport in enumerate(transports):
        for name in ("_run", "_run_here", "_run_beside"):
            setattr(transport, name, meeting)
        transport.plan = meeting.locked(transport.plan)  # type: ignore[method-assign]
        transport.buffers.share = share_of(rank)  # type: ignore[method-assign]


def on_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
