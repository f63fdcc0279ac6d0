"""A ride in chunks: the rows of one chunk travel while the experts compute on another.

A rank's tokens are cut into r equal chunks, each with a route of its own. The verbs run in this order (D: dispatch,
E: experts, C: combine; a transport that works on a stream of its own runs D and C beside E):

    r = 1   D0                 E0                 C0                          the plain ride: carpool/ride/plain.py
    r = 3   D0   D1            E0   C0   D2       E1   C1            E2   C2

Rows that take two hops have one more chunk under way, so that both links are busy (`carpool.transport.multi_hop`).

The backward runs the same from the last chunk to the first, because what layers keep in an arena is released from the
top: dispatch of the gradients, the experts' backward, combine of the rows' gradients. In each chunk the up projection's
weight gradient is computed after the combine has been launched, and hides it.

Forward and backward may have different numbers of chunks (FSMoE, arXiv 2501.10714, section 4: the best number for one
is not the best for the other). The experts then compute on *pieces*. Both numbers divide the number of pieces, and the
neighbouring pieces of one chunk travel together. With 2 chunks in the forward and 4 in the backward (E: the experts on
a piece):

    forward    D01  D23      E0  E1   C01       E2  E3   C23
    backward   D3   D2       E3  C3   D1        E2  C2   D0       E1  C1       E0  C0

What chunks cost: more launches, smaller matrix products, and in the backward a weight gradient for each piece, which
are added in the weights' dtype. So outputs and gradients of rows are those of the plain ride bit by bit where experts
compute each row alone; weight gradients are equal to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from carpool.experts import ExpertWeights, reads_packets
from carpool.kernels.device import reserved
from carpool.observe.meter import RideSpans
from carpool.ride.kept import arena_for
from carpool.ride.plain import BackwardStarted, kept_rows, readable, readable_gradients, start_backward
from carpool.ride.setup import Kept, RideSetup
from carpool.ride.turns import handover
from carpool.transport import Pending, Transport


class Started(NamedTuple):
    """A ride whose first dispatches are under way.

    Attributes:
        x_C: the rows of each piece.
        routes: of each piece, as planned.
        coming: the dispatches that have been launched, by piece.
        span: of this ride.
    """

    x_C: tuple[torch.Tensor, ...]
    routes: Sequence[Any]
    coming: dict[int, Pending]
    span: RideSpans


@dataclass(frozen=True)
class ChunkedOrder:
    """A `carpool.ride.setup.Order`; see the module's docstring.

    Attributes:
        chunks, backward_chunks: of the forward and of the backward.
    """

    chunks: int
    backward_chunks: int

    @property
    def pieces(self) -> int:
        return math.lcm(self.chunks, self.backward_chunks)

    @property
    def together(self) -> tuple[int, int]:
        """Pieces of a chunk, in the forward and in the backward."""
        return self.pieces // self.chunks, self.pieces // self.backward_chunks

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> Started:
        stats, transport = setup.stats, setup.transport
        span = stats.meter.ride(x_TH.device, "forward", self.pieces)
        stats.tokens_dispatched += x_TH.shape[0]
        with span("dispatch", 0):
            # All plans first: where the host waits for one, it must not wait for a dispatch as well.
            given = slot_TK.tensor_split(self.pieces), weight_TK.tensor_split(self.pieces)
            routes = transport.plan_pieces(*given, stats.traffic, self.together)
            started = Started(x_TH.tensor_split(self.pieces), routes, {}, span)
            self._dispatch(started, 0, transport)
        return started

    def _dispatch(self, started: Started, piece: int, transport: Transport) -> None:
        """Launch the dispatch of a piece's chunk, and of those that are to travel beside its experts."""
        begin = piece - piece % self.together[0]
        # From this piece on: those before it in its chunk have arrived.
        for other in range(piece, min(begin + (1 + transport.num_hops) * self.together[0], self.pieces)):
            if other not in started.coming:
                with started.span.named("dispatch", other):
                    started.coming[other] = transport.dispatch(started.x_C[other], started.routes[other])

    def forward(
        self, started: Started, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[Kept, ...] | None]:
        x_C, routes, coming, span = started
        transport, experts = setup.transport, setup.experts
        assert experts is not None
        packets = reads_packets(experts)
        kept, sums = [], []
        for piece, (x_TH, route) in enumerate(zip(x_C, routes, strict=True)):
            if piece:
                with span("dispatch", piece):
                    self._dispatch(started, piece, transport)
            handover()
            with span("dispatch", piece):
                arrivals = coming.pop(piece).wait().readable(packets, x_TH.dtype)
            with span("experts", piece), reserved(transport.processors):
                partial_RH = route.new_partial(x_TH.shape[1], x_TH.dtype, x_TH.device)
                arena = arena_for("hidden", setup, backward)
                saved = experts.forward(arrivals, weights, partial_RH, arena, backward)
                if backward:
                    kept.append(Kept(route, kept_rows(x_TH, arrivals, setup), saved))
            with span("combine", piece):
                sums.append(transport.combine(route, partial_RH))
        handover()
        with span("combine"):
            y_TH = torch.cat([one.wait() for one in sums])
        return y_TH.to(x_C[0].dtype), tuple(kept) if backward else None

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        kept: tuple[Kept, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | None]:
        transport, experts, hooks, together = setup.transport, setup.experts, setup.hooks, self.together[1]
        assert experts is not None
        span = setup.stats.meter.ride(dy_TH.device, "backward", self.pieces)
        dy_C = [dy.contiguous() for dy in dy_TH.tensor_split(self.pieces)]
        dweights: ExpertWeights | None = None
        sums: list[Pending] = []
        coming: dict[int, BackwardStarted] = {}
        packets = reads_packets(experts)
        for piece in reversed(range(self.pieces)):
            route, x, saved = kept[piece]
            with span("dispatch", piece):
                # What is left of this chunk, and the next one; with several hops, as many more.
                ahead = max(piece - piece % together - transport.num_hops * together, 0)
                for other in range(piece, ahead - 1, -1):
                    if other not in coming:
                        with span.named("dispatch", other):
                            coming[other] = start_backward(kept[other], dy_C[other], setup)
            handover()
            with span("dispatch", piece):
                again, rows, gradients = coming.pop(piece)
                if rows is not None:
                    x = readable(rows.wait(), packets, dy_TH.dtype)
                dpartial = readable_gradients(gradients.wait(), packets, dy_TH.dtype)
            if piece == 0:
                hooks.before_experts()
            with span("experts", piece), reserved(transport.processors):
                dx_RH = route.new_partial(dy_TH.shape[1], dy_TH.dtype, dy_TH.device)
                dweight_RJ, last = experts.backward(saved, x, weights, dpartial, dx_RH, needs_dweights)
                if again is not None and last is not None:
                    # These rows are in a buffer of the transport's, which others get next.
                    dweights, last = _sum(dweights, last()), None
            with span("combine", piece):
                if again is not None:
                    transport.discard(again, kept[piece].x.data).wait()
                sums.append(transport.combine_gradients(route, dx_RH, dweight_RJ))
            if last is not None:
                with span("experts", piece), span.named("weight-gradients", piece), reserved(transport.processors):
                    dweights = _sum(dweights, last())
        dtype = dy_TH.dtype

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            handover()
            with span("combine"):
                sums_C = [one.wait() for one in reversed(sums)]
                dx_TH, dweight_TK = (torch.cat(pieces) for pieces in zip(*sums_C, strict=True))
            return dx_TH.to(dtype), dweight_TK

        return Pending(finish), dweights


def _sum(one: ExpertWeights | None, other: ExpertWeights) -> ExpertWeights:
    if one is None:
        return other
    for total, more in zip(one, other, strict=True):
        if total is not None and more is not None:
            total.add_(more)
    return one
