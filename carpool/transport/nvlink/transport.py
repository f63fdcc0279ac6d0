"""Sends a token once to each rank over NVLink, without host synchronisation.

Every rank has a buffer that all ranks of the group can write and read (PyTorch's symmetric memory). Each sender owns a
slab of every buffer, so its own prefix sum is the whole plan, and nothing is exchanged or read back before the
dispatch:

    token 0 of rank 1 of 4 chose experts on ranks 0 and 3; the slab of rank 1 is the first on rank 0, the second on 3

    plan       row_WT[0, 0] = 0, row_WT[3, 0] = capacity, the others -1
    dispatch   rank 1 loads x_0 once and stores it to ranks 0 and 3, with the slots and weights for each
    experts    ranks 0 and 3 write their partial outputs into the same rows of their own buffers
    combine    rank 1 reads both partial outputs and adds them in float32

Shapes are static: R rows, of which each sender fills its slab from the front; only the device knows how far. Cost per
token: one send for each distinct rank, as for `dedup`, and one kernel launch per verb.

Codecs: "fp8" for dispatched tokens (`dispatch`) and gradients (`combine_backward`). Combine is not encoded, because its
kernels add while they read.

Needs CUDA, Triton, and ranks of one host whose GPUs reach each other's memory.

Streams:

    options          launched                    the caller's stream waits
    default          on the caller's stream      as for any kernel before it
    side_stream      on the stream of rides      at `Pending.wait`, for an event

Replicas for spare slots are sent on a further stream (`peer_slots.py`).

A verb has two halves, `launch(send, receive)`, and one kernel runs both. If ranks share a process, as in Triton's
interpreter, all of them send before any receives (tests/interpreted/emulated.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from carpool.activations import Arena, Arrivals, Ready
from carpool.kernels import MAX_CTAS, Awaited
from carpool.kernels.packets import packet_bytes
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import Meter, Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, BufferOverflowError, Pending, Transport
from carpool.transport.codecs import Codecs
from carpool.transport.exchange import ONE_HOP
from carpool.transport.nvlink.buffers import OWNERS, VERBS, Buffers, Lease, Regions, buffers_of
from carpool.transport.nvlink.options import NVLinkOptions, why_not
from carpool.transport.nvlink.peer_slots import PeerSlots
from carpool.transport.nvlink.route import LeasedStates, NVLinkRoute
from carpool.transport.token_capacity import PairCapacity, TokenCapacity
from carpool.transport.volume import Counts, one_send_per_rank, uniform_ranks_per_token


def _nothing() -> None:
    """The `finish` of verbs for which a stream or a kernel waits."""


class VerbRunner:
    """Base class of `NVLink`.

    Args:
        buffers: owner of the leases, and of the stream that `side_stream` uses.
    """

    def __init__(self, options: NVLinkOptions, buffers: Buffers) -> None:
        self.options, self.buffers = options, buffers
        self.stream = buffers.stream if options.side_stream else None

    def _run(self, launch: Any, *tensors: torch.Tensor) -> Any:
        """Launch a verb. Returns a function that lets the current stream wait for it."""
        if self.stream is None:
            return self._run_here(launch)
        return self._run_on(self.stream, lambda: launch(True, True), tensors)

    def _run_beside(self, launch: Any, *tensors: torch.Tensor) -> Any:
        """Send on the stream of fetches. Returns a function that receives on the current stream."""
        sent = self._run_on(self.buffers.fetch_stream, lambda: launch(True, False), tensors)

        def finish() -> None:
            sent()
            launch(False, True)

        return finish

    @staticmethod
    def _run_on(stream: torch.cuda.Stream, launch: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Launch on a stream. Returns a function that lets the current stream wait for it."""
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launch()
            done = stream.record_event()
        if torch.cuda.is_current_stream_capturing():
            # During a capture the allocator does not free memory that another stream has used.
            held = list(tensors)
        else:
            held = []
            for tensor in tensors:
                tensor.record_stream(stream)

        def finish() -> None:
            torch.cuda.current_stream().wait_event(done)
            held.clear()

        return finish

    def _run_here(self, launch: Any) -> Any:
        """As `_run`, on the current stream."""
        launch(True, True)
        return _nothing

    def _after_rides(self) -> None:
        """Let the current stream wait for earlier rides: kernels that wait for tokens, and peers that send choices,
        rely on the end of the lease's last ride."""
        if self.stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.stream)

    def _released(self, lease: Lease, finish: Any, value: Any) -> Pending:
        """The result of a verb that ends a ride. Its lease is free at once, because the next ride on it waits for the
        stream that used it (`Buffers`)."""
        self.buffers.release(lease)

        def wait() -> Any:
            finish()
            return value()

        return Pending(wait)


MAX_RANKS = 63  # one bit each in the plan
PART_TOKENS = 16  # parts are multiples of it, for alignment


class NVLink(VerbRunner, Transport):
    """See the module's docstring; J = K.

    Args:
        group: the expert-parallel process group; None for one rank.
        slots_per_rank: S of the layout.
        buffers: whose memory to use; by default the group's (`buffers_of`).
    """

    name = "nvlink"
    options_class = NVLinkOptions
    automatic = True
    anywhere = False
    one_send_per_rank = True
    writes_to_peers = True
    needs_nvlink = True
    rides_in_parts = True
    knows_counts = False
    graphable = True
    links_slots = True

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        return one_send_per_rank(rank_TK, topology.num_ranks)

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return uniform_ranks_per_token(num_experts, top_k, num_ranks)

    @classmethod
    def buffer_bytes(cls, options: NVLinkOptions, num_ranks: int, hidden: int, element_size: int, top_k: int) -> int:
        """One lease, before it has grown. The options say `max_tokens`."""
        assert options.max_tokens is not None
        capacity = options.capacity or options.max_tokens
        return Regions.of(num_ranks, options.max_tokens, capacity, hidden * element_size, top_k).total

    @classmethod
    def planned_buffer_bytes(cls, tokens: int, num_ranks: int, row_bytes: int, top_k: int) -> int:
        """Received tokens; partial outputs, choices and weights of these and of the own tokens (`Regions`)."""
        away = (num_ranks - 1) * tokens
        return away * row_bytes + (away + tokens) * (row_bytes + 12 * top_k)

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        return why_not(group)

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        return topology.why_no_peer_memory()

    @classmethod
    def why_not_hidden(cls, hidden: int, element_size: int) -> str | None:
        row = hidden * element_size
        return (
            f"hidden states are sent in units of 16 bytes, and {row} bytes ({hidden} elements) are not a multiple"
            if row % 16
            else None
        )

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        if codecs.plain:
            return None
        if codecs.inter_node != "all":
            return ONE_HOP
        if codecs.merge != "none":
            return "how many rows are left of those that are merged is known to the host alone"
        out = {codecs.dispatch, codecs.combine_backward} <= {"none", "fp8"}
        if out and codecs.combine == codecs.dispatch_backward == "none":
            return None
        return "it has FP8 for what travels out to experts (dispatch, combine_backward) and no other codec"

    @classmethod
    def why_not_automatic(cls, options: NVLinkOptions) -> str | None:
        return "nobody said how many tokens a rank may have (max_tokens)" if options.max_tokens is None else None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots_per_rank: int,
        options: NVLinkOptions | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        options = options or NVLinkOptions()
        self.slots_per_rank = slots_per_rank
        if buffers is None:
            if reason := None if group in OWNERS else why_not(group):
                raise ValueError(f"transport 'nvlink' cannot be used here: {reason}; use 'auto' or 'dedup'")
            buffers = buffers_of(
                group,
                torch.device("cuda", torch.cuda.current_device()),
                num_leases=options.num_leases,
                max_tokens=options.max_tokens,
                capacity=options.capacity,
                timeout_seconds=options.timeout_seconds,
                arena_bytes=options.arena_bytes,
            )
        if buffers.num_ranks > MAX_RANKS:
            raise ValueError(
                f"transport 'nvlink' takes at most {MAX_RANKS} ranks, not {buffers.num_ranks}; use 'dedup'"
            )
        super().__init__(options, buffers)
        self.num_ranks, self.rank = buffers.num_ranks, buffers.rank
        self.pairs: PairCapacity | None = None

    @property
    def arena(self) -> Arena | None:
        return self.buffers.arena

    @property
    def capacities(self) -> tuple[TokenCapacity, ...]:
        return (self.buffers,) if self.pairs is None else (self.buffers, self.pairs)

    def check(self) -> None:
        """Raises:
        RankMissingError: a rank did not arrive at a verb.
        BufferOverflowError: more tokens than the capacity of the buffers: MoE outputs are NaN. On all ranks of a group.
        """
        self.buffers.check()
        if needed := self.buffers.overflow():
            raise BufferOverflowError(
                f"tokens did not fit: the buffers of transport 'nvlink' hold {self.buffers.capacity} tokens of a rank, "
                f"and {needed} were needed. The outputs and gradients since then are NaN. State the largest number of "
                f"tokens that a rank will have, max_tokens={needed} or more, or use transport 'dedup', which has no "
                "such limit",
                needed,
            )
        if self.pairs is not None and bool(self.pairs.overflowed()):
            needed = int(self.pairs.needed)
            raise BufferOverflowError(
                f"spare slots could not keep ranks to the limit: one serves {needed} choices, and experts allocate for "
                f"{self.pairs.capacity}. The outputs and gradients since then are NaN. Leave out balance_limit "
                "(NVLinkOptions), so that they allocate for any routing, or raise it",
                needed,
            )

    def slot_links(self, layout: ExpertLayout, spare: int, meter: Meter | None = None) -> PeerSlots:
        if (limit := self.options.balance_limit) is not None:
            self.buffers.pairs = self.pairs = self.buffers.pairs or PairCapacity(limit, self.buffers.device)
        return PeerSlots(self, layout, spare, meter, self.pairs)

    @property
    def processors(self) -> int:
        return max(self.options.dispatch_ctas, self.options.combine_ctas) if self.options.side_stream else 0

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic, parts: int = 0) -> NVLinkRoute:
        """parts: dispatch in so many parts, the same number on all ranks. Kernels that read the tokens wait with
        `Arrivals.ready` or `NVLinkRoute.ready`, and each part has a combine of its own."""
        from carpool.transport.nvlink.launch import launch_plan

        self.buffers.check()
        self.buffers.agree(slot_TK.shape[0])
        num_tokens, top_k = slot_TK.shape
        num_rows = self.buffers.home_row + self.buffers.most
        # A token chooses no slot twice.
        num_pairs, pairs = num_rows * min(top_k, self.slots_per_rank), self.pairs
        if pairs is not None:
            num_pairs = pairs.of_ride(top_k * self.buffers.most, num_pairs)
            pairs = None if pairs.whole else pairs
        if pairs is not None:
            slot_TK = torch.where(pairs.needed > pairs.capacity, -1, slot_TK)
        slot_TK, weight_TK = slot_TK.contiguous(), weight_TK.float().contiguous()
        length = -(-num_tokens // (max(1, parts) * PART_TOKENS)) * PART_TOKENS if parts else 0
        row_WT, count_2W, choices_BW, begins_NW = launch_plan(
            slot_TK, self.buffers, self.slots_per_rank, parts, max(1, length)
        )
        return NVLinkRoute(
            num_tokens=num_tokens,
            top_k=top_k,
            num_rows=num_rows,
            choices_per_send=top_k,
            num_pairs=num_pairs,
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
            pairs=pairs,
        )

    def dispatch(self, x_TH: torch.Tensor, route: NVLinkRoute) -> Pending:
        slot_RJ = route.slot_TK.new_empty(route.num_rows, route.top_k)
        weight_RJ = route.weight_TK.new_empty(route.num_rows, route.top_k)
        if route.parts:
            return self._dispatch_parts(x_TH, route, slot_RJ, weight_RJ)
        rows = self._dispatch(x_TH, route, CHOICE_BYTES, self.options.codecs.dispatch == "fp8", slot_RJ, weight_RJ)
        return Pending(lambda: Arrivals(rows.wait(), slot_RJ, weight_RJ, route.num_pairs))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: NVLinkRoute) -> Pending:
        route.backward = True
        if route.parts:
            self._after_rides()
        rows = self._dispatch(dy_TH, route, 0, self.options.codecs.combine_backward == "fp8")
        if route.ready is not None:
            route.ready = replace(route.ready, awaited=self._awaited(route, "dispatch_gradients"))
        return rows

    def combine(self, route: NVLinkRoute, partial_RH: torch.Tensor, part: int | None = None) -> Pending:
        """part: of a ride in parts. They are combined in order, and the last one's `wait()` gives all MoE outputs."""
        return self._combine(route, partial_RH, None, part)

    def combine_gradients(
        self, route: NVLinkRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor, part: int | None = None
    ) -> Pending:
        """part: as in `combine`; dweight_RJ must be complete before the first part."""
        return self._combine(route, dx_RH, dweight_RJ, part)

    def discard(self, route: NVLinkRoute, x_TH: torch.Tensor) -> Pending:
        """A combine of no tokens, by which all ranks signal that the dispatched tokens have been read."""
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

        return self._released(lease, self._run(launch, nothing_TH, unread), lambda: None)

    # -- implementation -----------------------------------------------------------------------------------------

    def _dispatch(
        self,
        x_TH: torch.Tensor,
        route: NVLinkRoute,
        choice_bytes: int,
        fp8: bool,
        slot_RJ: torch.Tensor | None = None,
        weight_RJ: torch.Tensor | None = None,
    ) -> Pending:
        """`wait()` gives the tokens that arrive, as `LeasedStates`."""
        from carpool.kernels.packet_kernel import launch_quantise
        from carpool.transport.nvlink.launch import launch_dispatch

        self.buffers.check()
        x_TH = x_TH.contiguous()
        hidden, row_bytes = x_TH.shape[1], x_TH.shape[1] * x_TH.element_size()
        if row_bytes % 16:
            raise ValueError(
                f"transport 'nvlink' sends hidden states in units of 16 bytes, but {hidden} x {x_TH.dtype} are "
                f"{row_bytes} bytes: use a hidden size that is a multiple of 8, or transport 'dedup'"
            )
        lease = self.buffers.acquire(row_bytes, route.top_k)
        route.lease = lease
        sent = launch_quantise(x_TH, packet_bytes(hidden)) if fp8 else x_TH
        sent_bytes = sent.shape[1] * sent.element_size()
        tally = route.tally("out", sent_bytes, row_bytes, choice_bytes)

        def launch(send: bool, receive: bool) -> None:
            launch_dispatch(
                sent, route, lease, tally, slot_RJ, weight_RJ, self.buffers, self.options.dispatch_ctas, self.rank,
                self.slots_per_rank, hidden // 4 if fp8 else 0, send, receive,
            )  # fmt: skip

        finish = self._run(launch, sent)
        if route.parts:  # the kernels that read the tokens wait for them
            finish = _nothing

        def rows() -> LeasedStates:
            finish()
            buffers, width = self.buffers, sent.shape[1]
            return LeasedStates(
                lease.view(lease.regions.tokens, (buffers.home_row, width), sent.dtype), width,
                home=sent[: buffers.most], home_row=buffers.home_row, came_W=route.received_W,
                capacity=buffers.capacity, wide_home=x_TH[: buffers.most] if fp8 else None,
            )  # fmt: skip

        return Pending(rows)

    def _dispatch_parts(
        self, x_TH: torch.Tensor, route: NVLinkRoute, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor
    ) -> Pending:
        """Send tokens on the stream of rides, and choices on the current stream, before its next work."""
        from carpool.transport.nvlink.launch import launch_choices

        self._after_rides()
        rows = self._dispatch(x_TH, route, CHOICE_BYTES, False)
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
            return Arrivals(rows.wait(), slot_RJ, weight_RJ, route.num_pairs, ready)

        return Pending(finish)

    def _awaited(self, route: NVLinkRoute, verb: str) -> Awaited:
        assert route.lease is not None
        flags = route.lease.view(route.lease.regions.arrived, (self.num_ranks * MAX_CTAS,), torch.int32)
        return Awaited(
            flags, route.lease.epochs, self.buffers.status, self.buffers.host_status,
            int(1e9 * self.buffers.timeout_seconds), VERBS.index(verb), self.num_ranks, self.options.dispatch_ctas,
        )  # fmt: skip

    def _combine(
        self, route: NVLinkRoute, partial_RH: torch.Tensor, dweight_RJ: torch.Tensor | None, part: int | None
    ) -> Pending:
        from carpool.transport.nvlink.launch import launch_combine

        self.buffers.check()
        lease = route.lease
        assert lease is not None
        assert (part is None) == (route.parts == 0), "rides in parts are combined part by part, others at once"
        last = part is None or part == route.parts - 1
        if last:
            route.lease = None
        hidden, dtype = partial_RH.shape[1], partial_RH.dtype
        own = lease.view(lease.regions.partial, (route.num_rows, hidden), dtype)
        if own.data_ptr() != partial_RH.data_ptr():
            own.copy_(partial_RH)
        if not part:
            dweight_TK = None
            if dweight_RJ is not None:
                lease.view(lease.regions.dweight, tuple(dweight_RJ.shape), torch.float32).copy_(dweight_RJ)
                dweight_TK = torch.empty_like(route.weight_TK)
            route.outputs = partial_RH.new_empty(route.num_tokens, hidden), dweight_TK
        assert route.outputs is not None
        y_TH, dweight_TK = route.outputs
        if last:
            route.outputs = None
        row_bytes = hidden * dtype.itemsize
        choice_bytes = 0 if dweight_RJ is None else GRADIENT_BYTES
        tally = route.tally("back", row_bytes, row_bytes, choice_bytes)

        def launch(send: bool, receive: bool) -> None:
            launch_combine(
                y_TH, dweight_TK, route, lease, tally, self.buffers, self.options.combine_ctas, self.rank,
                self.slots_per_rank, send, receive, part,
            )  # fmt: skip

        finish = self._run(launch, y_TH)
        if not last:
            return Pending(finish)
        return self._released(lease, finish, lambda: y_TH if dweight_TK is None else (y_TH, dweight_TK))
