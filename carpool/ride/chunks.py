"""In which order a ride calls its verbs: in one piece, or in chunks, of which one travels while experts compute.

    forward    plan   dispatch x    experts              combine
    backward          dispatch dy   experts' backward    combine (dx, dweight), beside it the last weight gradient

With a transport that works on a stream of its own, the up projection's weight gradient hides the backward's combine
(delayed weight gradients: Megatron's, and LANCET's, arXiv 2404.19429). In one piece, and with `RideSetup.deferred`, it
is not computed here at all.

A rank's tokens are cut into r equal chunks, each with a route of its own. The verbs run in this order (D: dispatch,
E: experts, C: combine; a transport that works on a stream of its own runs D and C beside E):

    r = 1   D0                 E0                 C0
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

What the forward saves for its backward goes through autograd, to host memory, or into an arena:

    kept = offload_saved(kept, setup)       after the forward: what is to be offloaded is under way to host memory
    save(ctx, weights, kept, setup)    autograd holds the tensors
    weights, kept = saved(ctx)         in the backward
    kept = bring_back(kept, setup)     what was offloaded is on the device again

What the policies of `carpool.activations` say is done here. Rows that will be sent again are not saved: an order
keeps what it sends instead. Pre-activations that will be computed again are not saved either: experts do not keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from carpool.activations import Arena, Arrivals, HiddenStates, Offloaded
from carpool.activations.whole_layers import offloaded
from carpool.experts import ExpertWeights, reads_packets
from carpool.kernels.device import reserved
from carpool.metrics.counters import RideSpans
from carpool.ride.setup import NO_HOOKS, RideSetup, SavedActivations
from carpool.ride.turns import HALF, half_number, handover
from carpool.transport import Pending, Transport


class Started(NamedTuple):
    """A ride whose first dispatches are under way.

    Attributes:
        x_C: the rows of each piece.
        routes: of each piece, as planned.
        coming: the dispatches that have been launched, by piece.
        spans: of this ride.
    """

    x_C: Sequence[torch.Tensor]
    routes: Sequence[Any]
    coming: dict[int, Pending]
    spans: RideSpans


class BackwardStarted(NamedTuple):
    """What a backward waits for: the gradients; and the rows if they are sent again, by a route of their own."""

    again: Any
    rows: Pending | None
    gradients: Pending


@dataclass(frozen=True)
class ChunkedOrder:
    """A `carpool.ride.setup.Order`; see the module's docstring.

    Attributes:
        chunks, backward_chunks: of the forward and of the backward.
        pieces: in how many experts compute.
        together: how many of these are a chunk, in the forward and in the backward.
    """

    chunks: int = 1
    backward_chunks: int = 1
    pieces: int = field(init=False)
    together: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        pieces = math.lcm(self.chunks, self.backward_chunks)
        object.__setattr__(self, "pieces", pieces)
        object.__setattr__(self, "together", (pieces // self.chunks, pieces // self.backward_chunks))

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> Started:
        stats, transport = setup.stats, setup.transport
        spans = stats.meter.ride(x_TH.device, "forward", self.pieces)
        stats.tokens_dispatched += x_TH.shape[0]
        spans.begin("dispatch")
        if self.pieces == 1:
            route = transport.plan(slot_TK, weight_TK, stats.traffic)
            started = Started((x_TH,), (route,), {0: transport.dispatch(x_TH, route)}, spans)
        else:
            # All plans first: where the host waits for one, it must not wait for a dispatch as well.
            given = slot_TK.tensor_split(self.pieces), weight_TK.tensor_split(self.pieces)
            routes = transport.plan_pieces(*given, stats.traffic, self.together)
            started = Started(x_TH.tensor_split(self.pieces), routes, {}, spans)
            self._dispatch(started, 0, transport)
        spans.end()
        return started

    def _dispatch(self, started: Started, piece: int, transport: Transport) -> None:
        """Launch the dispatch of a piece's chunk, and of those that are to travel beside its experts."""
        begin = piece - piece % self.together[0]
        # From this piece on: those before it in its chunk have arrived.
        for other in range(piece, min(begin + (1 + transport.num_hops) * self.together[0], self.pieces)):
            if other not in started.coming:
                with started.spans.named("dispatch", other):
                    started.coming[other] = transport.dispatch(started.x_C[other], started.routes[other])

    def forward(
        self, started: Started, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        x_C, routes, coming, spans = started
        transport, experts = setup.transport, setup.experts
        assert experts is not None
        packets = reads_packets(experts)
        kept, sums = [], []
        for piece, (x_TH, route) in enumerate(zip(x_C, routes, strict=True)):
            if piece:
                spans.begin("dispatch", piece)
                self._dispatch(started, piece, transport)
                spans.end()
            if HALF.get() is not None:
                handover()
            spans.begin("dispatch", piece)
            arrivals = coming.pop(piece).wait().readable(packets, x_TH.dtype)
            spans.begin("experts", piece)
            with self._beside(transport):
                partial_RH = route.new_partial(x_TH.shape[1], x_TH.dtype, x_TH.device)
                arena = arena_for("expert_activations", setup, backward)
                saved = experts.forward(arrivals, weights, partial_RH, arena, backward)
                if backward:
                    kept.append(SavedActivations(route, saved_inputs(x_TH, arrivals, setup), saved))
            spans.begin("combine", piece)
            sums.append(transport.combine(route, partial_RH))
            spans.end()
        if HALF.get() is not None:
            handover()
        spans.begin("combine")
        y_TH = sums[0].wait() if self.pieces == 1 else torch.cat([one.wait() for one in sums])
        spans.end()
        return y_TH.to(x_C[0].dtype), tuple(kept) if backward else None

    def _beside(self, transport: Transport) -> AbstractContextManager[None]:
        """Around experts: while another chunk travels they leave it the processors that it needs."""
        return NOTHING_BESIDE if self.pieces == 1 else reserved(transport.processors)

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        kept: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        transport, experts, together = setup.transport, setup.experts, self.together[1]
        assert experts is not None
        packets, dtype = reads_packets(experts), dy_TH.dtype
        spans = setup.stats.meter.ride(dy_TH.device, "backward", self.pieces)
        dy_C: Sequence[torch.Tensor] = (dy_TH,) if self.pieces == 1 else dy_TH.tensor_split(self.pieces)
        dweights: ExpertWeights | Callable[[], ExpertWeights] | None = None
        sums: list[Pending] = []
        coming: dict[int, BackwardStarted] = {}
        for piece in reversed(range(self.pieces)):
            route, x, saved = kept[piece]
            spans.begin("dispatch", piece)
            # What is left of this chunk, and the next one; with several hops, as many more.
            ahead = max(piece - piece % together - transport.num_hops * together, 0)
            for other in range(piece, ahead - 1, -1):
                if other not in coming:
                    with spans.named("dispatch", other):
                        coming[other] = start_backward(kept[other], dy_C[other].contiguous(), setup)
            spans.end()
            if HALF.get() is not None:
                handover()
            spans.begin("dispatch", piece)
            again, rows, gradients = coming.pop(piece)
            if rows is not None:
                x = readable(rows.wait(), packets, dtype)
            dpartial = readable_gradients(gradients.wait(), packets, dtype)
            if piece == 0 and setup.hooks is not NO_HOOKS:
                spans.end()
                setup.hooks.before_experts()
            spans.begin("experts", piece)
            with self._beside(transport):
                dx_RH = route.new_partial(dy_TH.shape[1], dtype, dy_TH.device)
                dweight_RJ, last = experts.backward(saved, x, weights, dpartial, dx_RH, needs_dweights)
                if again is not None and last is not None:
                    # These rows are in a buffer of the transport's, which others get next.
                    dweights, last = _sum(dweights, last()), None
            spans.begin("combine", piece)
            if again is not None:
                transport.discard(again, kept[piece].x.data).wait()
            sums.append(transport.combine_gradients(route, dx_RH, dweight_RJ))
            spans.end()
            if last is not None:
                compute = partial(_last_gradients, last, spans, piece, transport.processors)
                # Only in one piece: and rows that were offloaded are in memory that the next backward's get.
                waits = setup.deferred is not None and self.pieces == 1 and setup.policies.expert_inputs == "save"
                dweights = compute if waits else _sum(dweights, compute())
        return Pending(partial(_finish, sums, spans, dtype)), dweights


PLAIN = ChunkedOrder()
NOTHING_BESIDE = nullcontext()


def _last_gradients(last: Callable[[], ExpertWeights], spans: RideSpans, piece: int, processors: int) -> ExpertWeights:
    spans.begin("experts", piece)
    with spans.named("weight-gradients", piece), reserved(processors):
        dweights = last()
    spans.end()
    return dweights


def _finish(sums: list[Pending], spans: RideSpans, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """dx_TH and dweight_TK, of combines that were launched from the last piece to the first."""
    if HALF.get() is not None:
        handover()
    spans.begin("combine")
    if len(sums) == 1:
        dx_TH, dweight_TK = sums[0].wait()
    else:
        sums_C = [one.wait() for one in reversed(sums)]
        dx_TH, dweight_TK = (torch.cat(pieces) for pieces in zip(*sums_C, strict=True))
    spans.end()
    return dx_TH.to(dtype), dweight_TK


def _sum(one: Any, other: ExpertWeights) -> ExpertWeights:
    if one is None:
        return other
    for total, more in zip(one, other, strict=True):
        if total is not None and more is not None:
            total.add_(more)
    return one  # type: ignore[no-any-return]


def saved_inputs(x_TH: torch.Tensor, arrivals: Arrivals, setup: RideSetup) -> HiddenStates:
    """The rows that a ride keeps: those that arrived; of rows that will be sent again, those that are sent."""
    if setup.policies.expert_inputs == "resend":
        return HiddenStates.of(x_TH)
    return arrivals.tokens.saved(arena_for("expert_inputs", setup))


def start_backward(kept: SavedActivations, dy_TH: torch.Tensor, setup: RideSetup) -> BackwardStarted:
    """Send the gradients to the experts, and the rows once more if they are not kept."""
    again = rows = None
    transport = setup.transport
    if setup.policies.expert_inputs == "resend":
        again = kept.route.again()
        rows = transport.dispatch_again(kept.x.data, again)
    return BackwardStarted(again, rows, transport.dispatch_gradients(dy_TH, kept.route))


def readable(rows: HiddenStates, packets: bool, dtype: torch.dtype) -> HiddenStates:
    """Rows as the experts read them."""
    return rows.packed() if packets else rows.widened(dtype)


def readable_gradients(dpartial: HiddenStates, packets: bool, dtype: torch.dtype) -> HiddenStates:
    """Gradients as the experts read them: as packets of FP8 only if they travelled so, else in `dtype`."""
    return dpartial if packets else dpartial.widened(dtype)


def arena_for(
    item: Literal["expert_inputs", "expert_activations"], setup: RideSetup, backward: bool = True
) -> Arena | None:
    """Where a ride writes an item whose rows only the device can count."""
    if not backward or getattr(setup.policies, item) != "offload":
        return setup.transport.arena
    assert setup.offloader is not None
    return setup.offloader.staging(setup.transport.arena, half_number())


def offload_saved(kept: tuple[SavedActivations, ...], setup: RideSetup) -> tuple[SavedActivations, ...]:
    """The same, with `Offloaded` in the place of what is offloaded."""
    policies = setup.policies
    if setup.offloader is None:
        return kept
    items = [one.x for one in kept if policies.expert_inputs == "offload"]
    if policies.expert_activations == "offload":
        items += [item for one in kept for item in one.saved if isinstance(item, HiddenStates)]
    if not items:
        return kept
    away = dict(zip(map(id, items), setup.offloader.put(items, half_number()), strict=True))
    return tuple(_replaced(one, lambda item: away.get(id(item), item)) for one in kept)


def bring_back(kept: tuple[SavedActivations, ...], setup: RideSetup) -> tuple[SavedActivations, ...]:
    """The same, with rows on the device in the place of `Offloaded`."""
    if setup.offloader is None:
        return kept
    away = [item for one in kept for item in (one.x, *one.saved) if isinstance(item, Offloaded)]
    if not away:
        return kept
    back = dict(zip(map(id, away), setup.offloader.get(away), strict=True))
    return tuple(_replaced(one, lambda item: back.get(id(item), item)) for one in kept)


def _replaced(one: SavedActivations, change: Any) -> SavedActivations:
    return SavedActivations(one.route, change(one.x), tuple(map(change, one.saved)))


def save(ctx: Any, weights: ExpertWeights, kept: tuple[SavedActivations, ...], setup: RideSetup) -> None:
    """Save what a ride keeps through autograd, which lets checkpointing and offloading see the tensors.

    Of rows in an arena they see where these begin. Its memory is all layers': a hook would copy it for each of them.
    Where a layer's activations are offloaded (`carpool.activations.whole_layers`), weights stay on the device, and so
    does what a policy of the ride keeps."""
    tensors: list[torch.Tensor | None] = list(weights)
    stay: list[torch.Tensor | None] = list(weights)
    # Of each `SavedActivations`, its route and items: `HiddenStates` without tensors, or the place of a tensor.
    plan: list[tuple[Any, list[HiddenStates | None]]] = []
    for one in kept:
        items: list[HiddenStates | None] = []
        for item in (one.x, *one.saved):
            if not isinstance(item, HiddenStates):
                tensors.append(item)
                items.append(None)
                continue
            shared = item.arena is not None
            tensors += (None if shared else item.data, item.start, item.home, item.count)
            data: Any = item.data if shared else None
            items.append(replace(item, data=data, start=None, home=None, count=None))
            policy = setup.policies.expert_inputs if item is one.x else setup.policies.expert_activations
            stay += (item.start, item.data if policy == "save" or isinstance(item, Offloaded) else None)
        plan.append((one.route, items))
    if (layer := offloaded.get()) is not None:
        layer.stay_on_device(stay)
    ctx.plan, ctx.setup = plan, setup
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[ExpertWeights, tuple[SavedActivations, ...]]:
    """What `save` was given.

    Raises:
        RuntimeError: a hook has put a copy in the place of where rows in an arena begin."""
    # Read once: with checkpointing each reading would run the forward again, and torch refuses the second.
    tensors = ctx.saved_tensors
    place = len(ExpertWeights._fields)
    weights, kept = ExpertWeights._make(tensors[:place]), []
    for route, items in ctx.plan:
        found: list[Any] = []
        for item in items:
            if item is None:
                found.append(tensors[place])
                place += 1
                continue
            data, start, home, count = tensors[place : place + 4]
            place += 4
            if item.arena is None:
                item = replace(item, data=data)
            elif start is not None and not item.arena.holds(start):
                raise RuntimeError(
                    "saved activations in an arena were freed before their backward: a hook on saved tensors "
                    "(save_on_cpu, offloading) replaced their handle by a copy; leave out that hook, and offload by "
                    "carpool.ActivationPolicies (carpool train: memory.expert_inputs and memory.expert_activations)"
                )
            found.append(replace(item, start=start, home=home, count=count))
        kept.append(SavedActivations(route, found[0], tuple(found[1:])))
    return weights, tuple(kept)
