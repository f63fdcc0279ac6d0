"""The order of a ride's verbs: in one piece, or in chunks, of which one is communicated while experts compute.

    forward    plan   dispatch x    experts              combine
    backward          dispatch dy   experts' backward    combine (dx, dweight), overlapped with the last weight gradient

With a transport that has a stream of its own, the up projection's weight gradient hides the backward's combine
(delayed weight gradients: Megatron's, and LANCET's, arXiv 2404.19429). In one piece, and with `RideSetup.deferred`, it
is not computed here at all.

A rank's tokens are cut into r equal chunks, each with a route of its own. The verbs run in this order (D: dispatch,
E: experts, C: combine; a transport with a stream of its own overlaps D and C with E):

    r = 1   D0                 E0                 C0
    r = 3   D0   D1            E0   C0   D2       E1   C1            E2   C2

With two hops, one more chunk is in flight, so that both links are busy (`carpool.transport.multi_hop`).

The backward runs from the last chunk to the first, because saved activations in an arena are released in reverse order:
dispatch of the gradients, the experts' backward, combine of the tokens' gradients. In each chunk the up projection's
weight gradient is computed after the combine has been launched, and hides it.

Forward and backward may have different numbers of chunks (FSMoE, arXiv 2501.10714, section 4: the best number for one
is not the best for the other). The experts then compute on *pieces*. Both numbers divide the number of pieces, and the
neighbouring pieces of one chunk share messages. With 2 chunks in the forward and 4 in the backward (E: the experts on
a piece):

    forward    D01  D23      E0  E1   C01       E2  E3   C23
    backward   D3   D2       E3  C3   D1        E2  C2   D0       E1  C1       E0  C0

Chunks cost more launches, smaller matrix products, and in the backward one weight gradient per piece, which are added
in the weights' dtype. So outputs and gradients of tokens are bit-identical to those of the plain ride where experts
compute each token independently; weight gradients are equal up to rounding.

Saved activations are held by autograd, in host memory, or in an arena:

    activations = offload_saved(activations, setup)    after the forward: start to copy offloaded ones to the host
    save(ctx, weights, activations, setup)             autograd saves the tensors
    weights, activations = saved(ctx)                  in the backward
    activations = bring_back(activations, setup)       offloaded ones are on the device again

The policies of `carpool.activations` are implemented here. If tokens are to be sent again, the tokens before the
dispatch are saved instead of those that arrived. If pre-activations are to be recomputed, experts do not save them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from carpool.activations import Arena, Arrivals, HiddenStates, Offloaded
from carpool.activations.whole_layers import offloaded
from carpool.experts import ExpertWeights, reads_packets
from carpool.experts.slot_ranges import RangeGradients, SlotRanges
from carpool.kernels.device import reserved
from carpool.metrics.counters import RideSpans
from carpool.ride.setup import NO_HOOKS, RideSetup, SavedActivations
from carpool.ride.turns import HALF, half_number, handover
from carpool.transport import Pending, Transport

# Of all slots, or of homes and spare slots.
Weights = ExpertWeights | SlotRanges
Gradients = ExpertWeights | RangeGradients


class Started(NamedTuple):
    """A ride whose first dispatches have been launched.

    Attributes:
        x_C: the tokens of each piece.
        routes: of each piece.
        coming: the dispatches in flight, by piece.
        spans: timing spans of this ride.
    """

    x_C: Sequence[torch.Tensor]
    routes: Sequence[Any]
    coming: dict[int, Pending]
    spans: RideSpans


class BackwardStarted(NamedTuple):
    """The dispatches of a piece's backward: the gradients; and the tokens, if they are sent again, with their route."""

    again: Any
    tokens: Pending | None
    gradients: Pending


@dataclass(frozen=True)
class ChunkedOrder:
    """A `carpool.ride.setup.Order`; see the module's docstring.

    Attributes:
        chunks, backward_chunks: number of chunks in the forward and in the backward.
        pieces: number of pieces on which experts compute.
        together: pieces per chunk, in the forward and in the backward.
    """

    # Weights may be `SlotRanges`, of which spare slots are waited for when experts need them.
    takes_ranges: ClassVar[bool] = True

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
            # All plans first: if the host waits for a plan, it must not wait for a dispatch as well.
            given = slot_TK.tensor_split(self.pieces), weight_TK.tensor_split(self.pieces)
            routes = transport.plan_pieces(*given, stats.traffic, self.together)
            started = Started(x_TH.tensor_split(self.pieces), routes, {}, spans)
            self._dispatch(started, 0, transport)
        spans.end()
        return started

    def _dispatch(self, started: Started, piece: int, transport: Transport) -> None:
        """Launch the dispatch of a piece's chunk, and those that its experts overlap."""
        begin = piece - piece % self.together[0]
        # From this piece on: earlier pieces of its chunk have arrived.
        for other in range(piece, min(begin + (1 + transport.num_hops) * self.together[0], self.pieces)):
            if other not in started.coming:
                with started.spans.named("dispatch", other):
                    started.coming[other] = transport.dispatch(started.x_C[other], started.routes[other])

    def forward(
        self, started: Started, weights: Weights, setup: RideSetup, backward: bool, *deferred: Any
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        """As `Order`. `deferred`: of experts (`Experts`), where combine returns what these write."""
        x_C, routes, coming, spans = started
        transport, experts = setup.transport, setup.experts
        assert experts is not None
        packets = reads_packets(experts)
        activations, combines = [], []
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
            given: Any = weights
            if isinstance(weights, SlotRanges) and not getattr(experts, "computes_ranges", False):
                given = weights.stacked()
            with self._reserving(transport):
                partial_RH = route.new_partial(x_TH.shape[1], x_TH.dtype, x_TH.device)
                arena = arena_for("expert_activations", setup, backward)
                saved = experts.forward(arrivals, given, partial_RH, arena, backward, *deferred)
                if backward:
                    activations.append(SavedActivations(route, saved_inputs(x_TH, arrivals, setup), saved))
            spans.begin("combine", piece)
            combines.append(transport.combine(route, partial_RH))
            spans.end()
        if HALF.get() is not None:
            handover()
        spans.begin("combine")
        y_TH = combines[0].wait() if self.pieces == 1 else torch.cat([one.wait() for one in combines])
        spans.end()
        return y_TH.to(x_C[0].dtype), tuple(activations) if backward else None

    def _reserving(self, transport: Transport) -> AbstractContextManager[None]:
        """Context of the experts: reserves the multiprocessors that overlapped communication needs."""
        return NOTHING_RESERVED if self.pieces == 1 else reserved(transport.processors)

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: Weights,
        activations: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        transport, experts, together = setup.transport, setup.experts, self.together[1]
        assert experts is not None
        packets, dtype = reads_packets(experts), dy_TH.dtype
        spans = setup.stats.meter.ride(dy_TH.device, "backward", self.pieces)
        dy_C: Sequence[torch.Tensor] = (dy_TH,) if self.pieces == 1 else dy_TH.tensor_split(self.pieces)
        dweights: Any = None
        combines: list[Pending] = []
        coming: dict[int, BackwardStarted] = {}
        for piece in reversed(range(self.pieces)):
            route, x, saved = activations[piece]
            spans.begin("dispatch", piece)
            # The rest of this chunk, and the next one; with several hops, as many more.
            ahead = max(piece - piece % together - transport.num_hops * together, 0)
            for other in range(piece, ahead - 1, -1):
                if other not in coming:
                    with spans.named("dispatch", other):
                        coming[other] = start_backward(activations[other], dy_C[other].contiguous(), setup)
            spans.end()
            if HALF.get() is not None:
                handover()
            spans.begin("dispatch", piece)
            again, tokens, gradients = coming.pop(piece)
            if tokens is not None:
                x = readable(tokens.wait(), packets, dtype)
            dpartial = gradients.wait()
            if not packets:  # only what was sent so is read as packets of FP8
                dpartial = dpartial.widened(dtype)
            if piece == 0 and setup.hooks is not NO_HOOKS:
                spans.end()
                setup.hooks.before_experts()
            spans.begin("experts", piece)
            given: Any = weights
            if isinstance(weights, SlotRanges) and not getattr(experts, "computes_ranges", False):
                given = weights.stacked()
            with self._reserving(transport):
                dx_RH = route.new_partial(dy_TH.shape[1], dtype, dy_TH.device)
                dweight_RJ, last = experts.backward(saved, x, given, dpartial, dx_RH, needs_dweights)
                if again is not None and last is not None:
                    # These tokens are in a buffer of the transport, which later rides overwrite.
                    dweights, last = _sum(dweights, last()), None
            spans.begin("combine", piece)
            if again is not None:
                transport.discard(again, activations[piece].x.data).wait()
            combines.append(transport.combine_gradients(route, dx_RH, dweight_RJ))
            spans.end()
            if last is not None:
                compute = partial(_last_gradients, last, spans, piece, transport.processors)
                # Deferred only with one piece, and with saved inputs: offloaded ones are in memory that is reused.
                waits = setup.deferred is not None and self.pieces == 1 and setup.policies.expert_inputs == "save"
                dweights = compute if waits else _sum(dweights, compute())
        return Pending(partial(_finish, combines, spans, dtype)), dweights


PLAIN = ChunkedOrder()
NOTHING_RESERVED = nullcontext()


def _last_gradients(last: Callable[[], Gradients], spans: RideSpans, piece: int, processors: int) -> Gradients:
    spans.begin("experts", piece)
    with spans.named("weight-gradients", piece), reserved(processors):
        dweights = last()
    spans.end()
    return dweights


def _finish(combines: list[Pending], spans: RideSpans, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """dx_TH and dweight_TK from the combines, which were launched from the last piece to the first."""
    if HALF.get() is not None:
        handover()
    spans.begin("combine")
    if len(combines) == 1:
        dx_TH, dweight_TK = combines[0].wait()
    else:
        combined_C = [one.wait() for one in reversed(combines)]
        dx_TH, dweight_TK = (torch.cat(pieces) for pieces in zip(*combined_C, strict=True))
    spans.end()
    return dx_TH.to(dtype), dweight_TK


def _sum(one: Any, other: Any) -> Any:
    if one is None:
        return other
    for total, more in zip(one, other, strict=True):
        if isinstance(total, tuple):
            _sum(total, more)
        elif total is not None and more is not None:
            total.add_(more)
    return one


def saved_inputs(x_TH: torch.Tensor, arrivals: Arrivals, setup: RideSetup) -> HiddenStates:
    """The tokens to save: those that arrived, or, if they are to be sent again, those before the dispatch."""
    if setup.policies.expert_inputs == "resend":
        return HiddenStates.of(x_TH)
    return arrivals.tokens.saved(arena_for("expert_inputs", setup))


def start_backward(activations: SavedActivations, dy_TH: torch.Tensor, setup: RideSetup) -> BackwardStarted:
    """Dispatch the gradients, and the tokens again if those that arrived were not saved."""
    again = tokens = None
    transport = setup.transport
    if setup.policies.expert_inputs == "resend":
        again = activations.route.again()
        tokens = transport.dispatch_again(activations.x.data, again)
    return BackwardStarted(again, tokens, transport.dispatch_gradients(dy_TH, activations.route))


def readable(tokens: HiddenStates, packets: bool, dtype: torch.dtype) -> HiddenStates:
    """Tokens as the experts read them: as packets of FP8, or in `dtype`."""
    return tokens.packed() if packets else tokens.widened(dtype)


def arena_for(
    item: Literal["expert_inputs", "expert_activations"], setup: RideSetup, backward: bool = True
) -> Arena | None:
    """The arena for activations whose number of rows only the device knows; None: tensors are allocated."""
    if not backward or getattr(setup.policies, item) != "offload":
        return setup.transport.arena
    assert setup.offloader is not None
    return setup.offloader.staging(setup.transport.arena, half_number())


def offload_saved(activations: tuple[SavedActivations, ...], setup: RideSetup) -> tuple[SavedActivations, ...]:
    """Start to offload, as the policies say. Returns the activations with `Offloaded` in place of offloaded ones."""
    policies = setup.policies
    if setup.offloader is None:
        return activations
    items = [one.x for one in activations if policies.expert_inputs == "offload"]
    if policies.expert_activations == "offload":
        items += [item for one in activations for item in one.saved if isinstance(item, HiddenStates)]
    if not items:
        return activations
    offloaded_states = dict(zip(map(id, items), setup.offloader.put(items, half_number()), strict=True))
    return tuple(_replaced(one, lambda item: offloaded_states.get(id(item), item)) for one in activations)


def bring_back(activations: tuple[SavedActivations, ...], setup: RideSetup) -> tuple[SavedActivations, ...]:
    """The activations on the device again, in place of `Offloaded`."""
    if setup.offloader is None:
        return activations
    offloaded_states = [item for one in activations for item in (one.x, *one.saved) if isinstance(item, Offloaded)]
    if not offloaded_states:
        return activations
    back = dict(zip(map(id, offloaded_states), setup.offloader.get(offloaded_states), strict=True))
    return tuple(_replaced(one, lambda item: back.get(id(item), item)) for one in activations)


def _replaced(one: SavedActivations, change: Any) -> SavedActivations:
    return SavedActivations(one.route, change(one.x), tuple(map(change, one.saved)))


def save(ctx: Any, weights: ExpertWeights, activations: tuple[SavedActivations, ...], setup: RideSetup) -> None:
    """Save a ride's activations through autograd, so that checkpointing and hooks on saved tensors work.

    Of activations in an arena, autograd saves the `start` tensor only. All layers share the arena's memory, and a hook
    would copy all of it for each layer. If a layer's activations are offloaded (`carpool.activations.whole_layers`),
    weights stay on the device, and so do activations that a policy of the ride saves."""
    tensors: list[torch.Tensor | None] = list(weights)
    stay: list[torch.Tensor | None] = list(weights)
    # For each `SavedActivations`, its route and items: `HiddenStates` without tensors, or None for a tensor.
    plan: list[tuple[Any, list[HiddenStates | None]]] = []
    for one in activations:
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
    """The weights and activations that `save` was given.

    Raises:
        RuntimeError: a hook on saved tensors has replaced the handle of activations in an arena by a copy."""
    # Read once: with checkpointing each reading would run the forward again, and torch refuses the second.
    tensors = ctx.saved_tensors
    place = len(ExpertWeights._fields)
    weights, activations = ExpertWeights._make(tensors[:place]), []
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
        activations.append(SavedActivations(route, found[0], tuple(found[1:])))
    return weights, tuple(activations)
