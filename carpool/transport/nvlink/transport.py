"""One ride per rank, over NVLink, without asking the host.

Every rank holds a buffer that all ranks of the group can write and read (PyTorch's symmetric memory). A sender owns a
slab of each, so its own prefix sum is the whole plan, and nothing has to be exchanged or read back before rows travel:

    token 0 of rank 1 of 4 chose experts on ranks 0 and 3; the slab of rank 1 is the first on rank 0, the second on 3

    plan       row_WT[0, 0] = 0, row_WT[3, 0] = capacity, the others -1
    dispatch   rank 1 loads x_0 once and stores it to ranks 0 and 3, with the slots and weights that each is to use
    experts    ranks 0 and 3 write their partial sums into the same rows of their own buffers
    combine    rank 1 reads both rows and adds them in float32

Shapes are static: R rows, of which each sender's slab is filled from the front; how many came is known to the device
alone. Cost per token: one row for each distinct rank, as for `dedup`, and one kernel launch per verb.

Lossy options, off by default: rows as FP8 on the way out (`forward_fp8`), gradients likewise (`backward_fp8`).

Needs CUDA, Triton, and ranks of one host whose GPUs reach each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from carpool.memory.arena import Arena, Rows
from carpool.numbered import Numbered
from carpool.stats import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, VERB_OF, Arrivals, Pending, Ready, Route
from carpool.transport.nvlink.buffers import MAX_CTAS, MAX_PARTS, OWNERS, VERBS, Awaited, Buffers, Lease, buffers_of
from carpool.transport.packets import packet_bytes

MAX_RANKS = 63  # one bit each in the plan
PART_TOKENS = 16  # parts are multiples of it, so that ranges of tokens begin where the kernels like it


@dataclass(frozen=True)
class NVLinkOptions:
    """How the `nvlink` transport works; the defaults are exact and were measured (docs/measurements.md).

    Attributes:
        dispatch_ctas, combine_ctas: thread blocks of a verb: SMs that the ride takes from the computation.
        num_leases: dispatches that may be without their combine at one time.
        max_tokens: tokens of the largest rank; None: agreed upon at the first forward, rounded up to a power of two.
        capacity: rows that a rank has room for from each other rank. None: `max_tokens`, which always suffices. If more
            come, sums are NaN and `Buffers.overflow` tells.
        timeout_seconds: how long a rank waits for another before it gives up and says which.
        forward_fp8, backward_fp8: rows (gradients) travel out as e4m3 with a scale for 128 columns. LOSSY.
        side_stream: run on a stream of its own; `Pending.wait` lets the caller's stream wait.
        keep: what a layer does about the rows that arrived, which its backward needs. "copy": it keeps a copy. "again":
            they are sent a second time in the backward, which takes a second lease and no memory.
        arena_bytes: memory for what layers keep for their backward, which then follows the rows that came; if it does
            not suffice, `Buffers.arena_overflow` tells. 0: none, every layer allocates for the worst case.
        parts: in how many parts rows travel for a computation that starts on what is there, 0: not
            (`carpool.schedule.tiles`).
        split: send at the verb, wait for the others at `Pending.wait`: two kernels instead of one.
    """

    dispatch_ctas: int = 16
    combine_ctas: int = 16
    num_leases: int = 2
    max_tokens: int | None = None
    capacity: int | None = None
    timeout_seconds: float = 300.0
    forward_fp8: bool = False
    backward_fp8: bool = False
    keep: Literal["copy", "again"] = "copy"
    arena_bytes: int = 0
    side_stream: bool = False
    parts: int = 0
    split: bool = False

    def __post_init__(self) -> None:
        for name in ("dispatch_ctas", "combine_ctas"):
            if not 1 <= getattr(self, name) <= MAX_CTAS:
                raise ValueError(f"{name}={getattr(self, name)} must be 1..{MAX_CTAS}")
        if self.keep not in ("copy", "again"):
            raise ValueError(f"keep={self.keep!r} must be 'copy' or 'again'")
        if self.keep == "again" and self.num_leases < 2:
            raise ValueError("keep='again' takes two leases at a time; set num_leases to 2 or more")
        if self.capacity is not None and not 1 <= self.capacity <= (self.max_tokens or 0):
            raise ValueError(f"capacity={self.capacity} must be between 1 and max_tokens={self.max_tokens}")
        if self.num_leases < 1:
            raise ValueError(f"num_leases={self.num_leases} must be at least 1")
        if not 0 <= self.parts <= MAX_PARTS:
            raise ValueError(f"parts={self.parts} must be 0..{MAX_PARTS}")
        if self.parts and (self.forward_fp8 or self.backward_fp8):
            raise ValueError(
                "rows that travel as FP8 do not ride in parts (schedule 'tiles'); use schedule 'chunks', or leave out "
                "forward_fp8 and backward_fp8"
            )
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} must be positive")

    @property
    def lossy_reasons(self) -> list[str]:
        """What changes the model's function, for logs and reports."""
        fp8 = {"rows travel as FP8": self.forward_fp8, "gradients of rows travel as FP8": self.backward_fp8}
        return [what for what, on in fp8.items() if on]


@dataclass(kw_only=True)
class NVLinkRoute(Route):
    """Attributes:
    row_WT: (W, T) int32, each token's row in rank w's buffer, -1: none.
    count_2W, choices_BW: int32, see plan_kernel.py.
    received_W: (W,) int32, rows in each rank's slab, once dispatched.
    parts, part_length: in how many parts the tokens ride, and tokens of each; 0: not in parts.
    begins_NW: (parts + 1, W) int32, the first row of each part in the slab on each rank.
    ready: of the rows that are under way to this rank.
    sums: of tokens, while parts are combined: rows, and gradients of weights.
    """

    slot_TK: torch.Tensor
    weight_TK: torch.Tensor
    row_WT: torch.Tensor
    count_2W: torch.Tensor
    choices_BW: torch.Tensor
    received_W: torch.Tensor
    lease: Lease | None = field(default=None, repr=False)
    parts: int = 0
    part_length: int = 0
    begins_NW: torch.Tensor | None = None
    ready: Ready | None = None
    sums: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def again(self) -> NVLinkRoute:
        return replace(self, partial_RH=None, lease=None, parts=0, ready=None)

    def tokens_of(self, part: int) -> slice:
        return slice(*(min(self.num_tokens, n * self.part_length) for n in (part, part + 1)))

    def new_partial(self, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self.lease is not None, "new_partial comes after dispatch"
        self.partial_RH = self.lease.view(self.lease.regions.partial, (self.num_rows, hidden), dtype)
        return self.partial_RH


class NVLink(Numbered):
    """See the module's docstring; J = K.

    Args:
        group: the expert-parallel process group; None for one rank.
        slots_per_rank: S of the layout.
        buffers: whose memory to use; by default the group's (`buffers_of`).
    """

    name = "nvlink"
    graphable = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots_per_rank: int,
        options: NVLinkOptions | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.options = options or NVLinkOptions()
        self.slots_per_rank = slots_per_rank
        if buffers is None:
            if reason := None if group in OWNERS else why_not(group):
                raise ValueError(f"transport 'nvlink' cannot be used here: {reason}; use 'auto' or 'dedup'")
            buffers = buffers_of(
                group,
                torch.device("cuda", torch.cuda.current_device()),
                num_leases=self.options.num_leases,
                max_tokens=self.options.max_tokens,
                capacity=self.options.capacity,
                timeout_seconds=self.options.timeout_seconds,
                arena_bytes=self.options.arena_bytes,
            )
        if buffers.num_ranks > MAX_RANKS:
            raise ValueError(
                f"transport 'nvlink' takes at most {MAX_RANKS} ranks, not {buffers.num_ranks}; use 'dedup'"
            )
        self.buffers = buffers
        self.num_ranks, self.rank = buffers.num_ranks, buffers.rank
        self.stream = buffers.stream if self.options.side_stream else None

    @property
    def arena(self) -> Arena | None:
        return self.buffers.arena

    @property
    def sends_again(self) -> bool:
        return self.options.keep == "again"

    @property
    def parts(self) -> int:
        return self.options.parts

    @property
    def processors(self) -> int:
        return max(self.options.dispatch_ctas, self.options.combine_ctas) if self.options.side_stream else 0

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic, parts: int = 0) -> NVLinkRoute:
        """parts: rows are to ride in so many, the same number on all ranks; who reads them waits by `Arrivals.ready`
        or `NVLinkRoute.ready`, and each part has a combine of its own."""
        from carpool.transport.nvlink.launch import launch_plan

        self.buffers.check()
        self.buffers.agree(slot_TK.shape[0])
        num_tokens, top_k = slot_TK.shape
        slot_TK, weight_TK = slot_TK.contiguous(), weight_TK.float().contiguous()
        length = -(-num_tokens // (max(1, parts) * PART_TOKENS)) * PART_TOKENS if parts else 0
        row_WT, count_2W, choices_BW, begins_NW = launch_plan(
            slot_TK, self.buffers, self.slots_per_rank, parts, max(1, length)
        )
        num_rows = self.buffers.home_row + self.buffers.most
        return NVLinkRoute(
            num_tokens=num_tokens,
            top_k=top_k,
            num_rows=num_rows,
            choices_per_row=top_k,
            # A row wants no slot twice.
            num_pairs=num_rows * min(top_k, self.slots_per_rank),
            traffic=traffic,
            slot_TK=slot_TK,
            weight_TK=weight_TK,
            row_WT=row_WT,
            count_2W=count_2W,
            choices_BW=choices_BW,
            received_W=count_2W.new_empty(self.num_ranks),
            parts=parts,
            part_length=length,
            begins_NW=begins_NW if parts else None,
        )

    def plan_parts(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[NVLinkRoute]:
        return [self.plan(slot_TK, weight_TK, traffic) for slot_TK, weight_TK in zip(slot_C, weight_C, strict=True)]

    def dispatch(self, x_TH: torch.Tensor, route: NVLinkRoute) -> Pending:
        slot_RJ = route.slot_TK.new_empty(route.num_rows, route.top_k)
        weight_RJ = route.weight_TK.new_empty(route.num_rows, route.top_k)
        fp8 = self.options.forward_fp8
        if route.parts:
            return self._dispatch_parts(x_TH, route, slot_RJ, weight_RJ)
        pending, packet_TB = self._dispatch(x_TH, route, CHOICE_BYTES, fp8, slot_RJ, weight_RJ)
        most = self.buffers.most
        return Pending(
            lambda: Arrivals(
                pending.wait(), slot_RJ, weight_RJ, route.num_pairs, leased=True, sums_unwanted=False,
                home_TH=x_TH[:most], home_row=self.buffers.home_row, slab=self.buffers.capacity,
                came_W=route.received_W, fp8_hidden=x_TH.shape[1] if fp8 else 0,
                home_packet_TB=None if packet_TB is None else packet_TB[:most],
            )
        )  # fmt: skip

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: NVLinkRoute) -> Pending:
        route.backward = True
        fp8 = self.options.backward_fp8
        if route.parts:
            self._after_rides()
        pending, packet_TB = self._dispatch(dy_TH, route, 0, fp8)
        if route.ready is not None:
            route.ready = replace(route.ready, awaited=self._awaited(route, "dispatch_gradients"))

        def finish() -> Rows:
            from carpool.transport.packet_kernel import launch_dequantise

            came, hidden, buffers = pending.wait(), dy_TH.shape[1], self.buffers
            if packet_TB is not None and route.packets:
                return Rows(came, came.shape[1], home=packet_TB[: buffers.most], home_row=buffers.home_row)
            if fp8:
                came = launch_dequantise(came, route.received_W, buffers.capacity, hidden, dy_TH.dtype)
            return Rows(came, hidden, home=dy_TH[: buffers.most], home_row=buffers.home_row)

        return Pending(finish)

    def combine(self, route: NVLinkRoute, part: int | None = None) -> Pending:
        """part: of a ride in parts. They come in order, and the last one's `wait()` gives all sums."""
        return self._combine(route, None, part)

    def combine_gradients(self, route: NVLinkRoute, dweight_RJ: torch.Tensor, part: int | None = None) -> Pending:
        """part: as in `combine`; dweight_RJ is complete from the first on."""
        return self._combine(route, dweight_RJ, part)

    def discard(self, route: NVLinkRoute, x_TH: torch.Tensor) -> Pending:
        """A combine of no tokens: it tells the peers that the rows have been read, and hears the same of theirs."""
        from carpool.transport.nvlink.launch import launch_combine

        lease, route.lease = route.lease, None
        assert lease is not None
        nothing_TH = x_TH.new_empty(0, x_TH.shape[1])
        nobody = replace(route, num_tokens=0, slot_TK=route.slot_TK[:0])
        unread = torch.zeros(2, self.num_ranks, dtype=torch.int64, device=x_TH.device)

        def launch(send: bool, receive: bool) -> None:
            launch_combine(
                nothing_TH, None, nobody, lease, unread, self.buffers, self.options.combine_ctas, self.rank,
                self.slots_per_rank, send, receive,
            )  # fmt: skip

        return self._released(lease, self._run(launch, nothing_TH), lambda: None)

    # -- how ----------------------------------------------------------------------------------------------------

    def _dispatch(
        self,
        x_TH: torch.Tensor,
        route: NVLinkRoute,
        choice_bytes: int,
        fp8: bool,
        slot_RJ: torch.Tensor | None = None,
        weight_RJ: torch.Tensor | None = None,
    ) -> tuple[Pending, torch.Tensor | None]:
        """The rows that come, and packets of the own ones if they travel as such."""
        from carpool.transport.nvlink.launch import launch_dispatch
        from carpool.transport.packet_kernel import launch_quantise

        self.buffers.check()
        x_TH = x_TH.contiguous()
        hidden, row_bytes = x_TH.shape[1], x_TH.shape[1] * x_TH.element_size()
        if row_bytes % 16:
            raise ValueError(
                f"transport 'nvlink' moves rows in pieces of 16 bytes, but {hidden} x {x_TH.dtype} are {row_bytes} "
                "bytes: use a hidden size that is a multiple of 8, or transport 'dedup'"
            )
        lease = self.buffers.acquire(row_bytes, route.top_k)
        route.lease = lease
        sent = launch_quantise(x_TH, packet_bytes(hidden)) if fp8 else x_TH
        sent_bytes = sent.shape[1] * sent.element_size()
        tally = self._tally("out", route, sent_bytes, row_bytes, choice_bytes)

        def launch(send: bool, receive: bool) -> None:
            launch_dispatch(
                sent, route, lease, tally, slot_RJ, weight_RJ, self.buffers, self.options.dispatch_ctas, self.rank,
                self.slots_per_rank, hidden // 4 if fp8 else 0, send, receive,
            )  # fmt: skip

        finish = self._run(launch, sent)

        def rows() -> torch.Tensor:
            # Rows in parts are waited for by those who read them, unless nobody can wait here.
            if not route.parts or self.options.split:
                finish()
            return lease.view(lease.regions.rows, (self.buffers.home_row, sent.shape[1]), sent.dtype)

        return Pending(rows), sent if fp8 else None

    def _dispatch_parts(
        self, x_TH: torch.Tensor, route: NVLinkRoute, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor
    ) -> Pending:
        """Rows on the stream of rides, choices before whatever the current stream does next."""
        from carpool.transport.nvlink.launch import launch_choices

        self._after_rides()
        rows, _ = self._dispatch(x_TH, route, CHOICE_BYTES, False)
        lease = route.lease
        assert lease is not None
        group_RJ = torch.empty_like(slot_RJ)
        begins_NW = slot_RJ.new_empty(route.parts + 1, self.num_ranks)
        ready = Ready(route.parts, begins_NW, self.buffers.capacity, group_RJ, awaited=self._awaited(route, "dispatch"))
        route.ready = ready

        def launch(send: bool, receive: bool) -> None:
            launch_choices(
                route, ready, lease, slot_RJ, weight_RJ, self.buffers, self.rank, self.slots_per_rank, send, receive
            )

        chosen = self._run_here(launch)

        def finish() -> Arrivals:
            chosen()
            return Arrivals(
                rows.wait(), slot_RJ, weight_RJ, route.num_pairs, leased=True, sums_unwanted=False,
                home_TH=x_TH[: self.buffers.most], home_row=self.buffers.home_row, slab=self.buffers.capacity,
                came_W=route.received_W, ready=ready,
            )  # fmt: skip

        return Pending(finish)

    def _after_rides(self) -> None:
        """Let the current stream wait for the rides before: those who wait in kernels, and peers' choices, count on the
        end of the lease's last ride."""
        if self.stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.stream)

    def _awaited(self, route: NVLinkRoute, verb: str) -> Awaited:
        assert route.lease is not None
        flags = route.lease.view(route.lease.regions.arrived, (self.num_ranks * MAX_CTAS,), torch.int32)
        return Awaited(
            flags, route.lease.epochs, self.buffers.status, self.buffers.host_status,
            int(1e9 * self.buffers.timeout_seconds), VERBS.index(verb), self.num_ranks, self.options.dispatch_ctas,
        )  # fmt: skip

    def _combine(self, route: NVLinkRoute, dweight_RJ: torch.Tensor | None, part: int | None) -> Pending:
        from carpool.transport.nvlink.launch import launch_combine

        self.buffers.check()
        lease, partial_RH = route.lease, route.partial_RH
        assert lease is not None and partial_RH is not None
        assert (part is None) == (route.parts == 0), "rides in parts are combined part by part, others at once"
        last = part is None or part == route.parts - 1
        if last:
            route.lease = route.partial_RH = None
        hidden, dtype = partial_RH.shape[1], partial_RH.dtype
        own = lease.view(lease.regions.partial, (route.num_rows, hidden), dtype)
        if own.data_ptr() != partial_RH.data_ptr():
            own.copy_(partial_RH)
        if not part:
            dweight_TK = None
            if dweight_RJ is not None:
                lease.view(lease.regions.dweight, tuple(dweight_RJ.shape), torch.float32).copy_(dweight_RJ)
                dweight_TK = torch.empty_like(route.weight_TK)
            route.sums = partial_RH.new_empty(route.num_tokens, hidden), dweight_TK
        assert route.sums is not None
        y_TH, dweight_TK = route.sums
        if last:
            route.sums = None
        row_bytes = hidden * dtype.itemsize
        choice_bytes = 0 if dweight_RJ is None else GRADIENT_BYTES
        tally = self._tally("back", route, row_bytes, row_bytes, choice_bytes)

        def launch(send: bool, receive: bool) -> None:
            launch_combine(
                y_TH, dweight_TK, route, lease, tally, self.buffers, self.options.combine_ctas, self.rank,
                self.slots_per_rank, send, receive, part,
            )  # fmt: skip

        finish = self._run(launch, y_TH)
        if not last:
            return Pending(finish)
        return self._released(lease, finish, lambda: y_TH if dweight_TK is None else (y_TH, dweight_TK))

    def _released(self, lease: Lease, finish: Any, value: Any) -> Pending:
        """What is pending after a verb that ends a ride: its lease is free once the verb has been launched."""

        def wait() -> Any:
            finish()
            if self.options.split:
                self.buffers.release(lease)
            return value()

        if not self.options.split:
            self.buffers.release(lease)
        return Pending(wait)

    def _run(self, launch: Any, *tensors: torch.Tensor) -> Any:
        """Launch a verb; what is returned lets the current stream wait for it."""
        if self.options.split or self.stream is None:
            return self._run_here(launch)
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            launch(True, True)
            done = self.stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return lambda: torch.cuda.current_stream().wait_event(done)

    def _run_here(self, launch: Any) -> Any:
        """The same, on the current stream."""
        if self.options.split:
            launch(True, False)
            return lambda: launch(False, True)
        launch(True, True)
        return lambda: None

    def _tally(
        self, way: Literal["out", "back"], route: NVLinkRoute, row_bytes: int, plain_bytes: int, choice_bytes: int
    ) -> torch.Tensor:
        """Where the kernel counts: see `Route.count`, which does it for rows that the host knows."""
        verb = ("combine_backward" if way == "out" else "dispatch_backward") if route.backward else VERB_OF[way]
        sent = row_bytes + route.top_k * choice_bytes
        return route.traffic.tally(verb, sent, plain_bytes + choice_bytes, route.row_WT.device)


def why_not(group: dist.ProcessGroup | None) -> str | None:
    """Why the ranks of a group cannot use this transport, or None if they can. Collective over the group."""
    reason = None
    try:
        import triton  # noqa: F401
    except ImportError:
        reason = "Triton is not installed"
    if not torch.cuda.is_available():
        reason = "there is no CUDA device"
    if group is None:
        return reason
    if reason is None and dist.get_backend(group) != "nccl":
        reason = f"the process group's backend is {dist.get_backend(group)}, not nccl"
    return _agree_why_not(group, reason)


def _agree_why_not(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The first reason of any rank, or what their hosts and links say."""
    import socket

    index = torch.cuda.current_device() if reason is None else -1
    mine = (reason, socket.gethostname(), index)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for _, (theirs, _, _) in enumerate(everyone):
        if theirs is not None:
            return str(theirs)
    hosts = {host for _, host, _ in everyone}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts ({', '.join(sorted(hosts))})"
    apart = [(index, other) for _, _, other in everyone
             if other != index and not torch.cuda.can_device_access_peer(index, other)]  # fmt: skip
    reached: list[Any] = [None] * len(everyone)
    dist.all_gather_object(reached, apart, group=group)
    for pairs in reached:
        if pairs:
            return f"GPU {pairs[0][0]} cannot reach the memory of GPU {pairs[0][1]}"
    return None
