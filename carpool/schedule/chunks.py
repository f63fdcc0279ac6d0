"""A ride in chunks: the rows of one chunk travel while the experts compute on another.

A rank's tokens are cut into r equal chunks, each with a route of its own, and the verbs are asked for in this order
(D: dispatch, E: experts, C: combine; a transport that works on a stream of its own runs D and C beside E):

    r = 1   D0                 E0                 C0
    r = 3   D0   D1            E0   C0   D2       E1   C1            E2   C2

With r = 1 this is the plain ride. The backward does the same from the last chunk to the first, because what layers
keep in an arena is released from the top: dispatch of the gradients, the experts' backward, combine of the rows'
gradients. In each, the up projection's weight gradient comes after the combine has been asked for, so that it
hides that (delayed weight gradients: Megatron's, and LANCET's, arXiv 2404.19429).

Whoever has independent work beside the ride, such as experts that serve every token (`carpool.ride.function.ride`),
does it between `depart`, which asks for the first dispatches, and `ride_forward`; in the backward between
`ride_backward` and what it returns, which waits for the last combines.

Forward and backward may have different numbers of chunks (FSMoE, arXiv 2501.10714, section 4: what is best for one is
not for the other). Experts then compute on parts, of which both numbers are multiples, and neighbouring parts that are
one chunk travel together. Chunks of 2 in the forward and 4 in the backward (P: the experts on a part):

    forward    D01  D23      P0  P1   C01       P2  P3   C23
    backward   D3   D2       P3  C3   D1        P2  C2   D0       P1  C1       P0  C0

What chunks cost: more launches, smaller matrix products, and in the backward a weight gradient for each, which are
added in the weights' dtype. So outputs and gradients of rows are those of the plain ride bit by bit where experts
compute rows alone, weight gradients to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from carpool.experts import Experts, ExpertWeights, reads_packets
from carpool.kernels.processors import reserved
from carpool.memory import Rows
from carpool.memory.keep import keep_rows
from carpool.observe.stats import LayerStats, RideSpans
from carpool.ride.turns import handover
from carpool.transport import Arrivals, Transport
from carpool.transport.base import Pending

Arrival = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Kept(NamedTuple):
    """What the forward of a part keeps for its backward, besides the parameters.

    Attributes:
        route: as planned.
        x: the rows that arrived; the rows that were sent, if they will be sent again.
        saved: what the experts keep: tensors, `Rows` and Nones.
    """

    route: Any
    x: Rows
    saved: tuple[Any, ...]


class Departed(NamedTuple):
    """A ride whose first dispatches are under way.

    Attributes:
        x_C: the rows of each part.
        routes: of each part, as planned.
        together: parts of a chunk.
        coming: the dispatches that have been asked for, by part.
        span: of this ride.
    """

    x_C: tuple[torch.Tensor, ...]
    routes: Sequence[Any]
    together: int
    coming: dict[int, Pending]
    span: RideSpans


def depart(
    x_TH: torch.Tensor,
    weight_TK: torch.Tensor,
    slot_TK: torch.Tensor,
    transport: Transport,
    stats: LayerStats,
    chunks: int = 1,
    backward_chunks: int | None = None,
) -> Departed:
    """Plan a ride, and ask for what can leave at once."""
    parts = math.lcm(chunks, backward_chunks or chunks)
    together = parts // chunks, parts // (backward_chunks or chunks)
    span = stats.meter.ride(x_TH.device, "forward", parts)
    stats.tokens_dispatched += x_TH.shape[0]
    with span("dispatch", 0):
        # All plans first: where the host waits for one, it must not wait for a dispatch as well.
        given = slot_TK.tensor_split(parts), weight_TK.tensor_split(parts)
        routes = transport.plan_parts(*given, stats.traffic, together)
        for route in routes:
            route.together = together
        departed = Departed(x_TH.tensor_split(parts), routes, together[0], {}, span)
        _ask(departed, 0, transport)
    return departed


def _ask(departed: Departed, part: int, transport: Transport) -> None:
    """Ask for the dispatch of a part's chunk, and for the one that is to be under way beside its experts."""
    begin = part - part % departed.together
    # From this part on: those before it in its chunk have come already.
    for other in range(part, min(begin + 2 * departed.together, len(departed.routes))):
        if other not in departed.coming:
            with departed.span.named("dispatch", other):
                departed.coming[other] = transport.dispatch(departed.x_C[other], departed.routes[other])


def ride_forward(
    departed: Departed,
    weights: ExpertWeights,
    transport: Transport,
    experts: Experts,
    backward: bool,
) -> tuple[torch.Tensor, tuple[Kept, ...] | None]:
    """(y_TH, what each part keeps if a backward will follow), without autograd."""
    x_C, routes, _, coming, span = departed
    kept, sums = [], []
    for part, (x_TH, route) in enumerate(zip(x_C, routes, strict=True)):
        if part:
            with span("dispatch", part):
                _ask(departed, part, transport)
        route.packets = reads_packets(experts)
        handover()
        with span("dispatch", part):
            arrivals = _readable(coming.pop(part).wait(), route.packets, x_TH.dtype)
        with span("experts", part), reserved(transport.processors if len(routes) > 1 else 0):
            partial_RH = route.new_partial(x_TH.shape[1], x_TH.dtype, x_TH.device)
            saved = experts.forward(arrivals, weights, partial_RH, transport.arena, backward)
            if backward:
                # Rows that will be sent again need nothing but what is sent.
                x = Rows.of(x_TH) if transport.sends_again else keep_rows(arrivals, transport.arena)
                kept.append(Kept(route, x, saved))
        with span("combine", part):
            sums.append(transport.combine(route))
    handover()
    with span("combine"):
        y_TH = _joined([one.wait() for one in sums])
    return y_TH.to(x_C[0].dtype), tuple(kept) if backward else None


def ride_backward(
    dy_TH: torch.Tensor,
    weights: ExpertWeights,
    kept: tuple[Kept, ...],
    transport: Transport,
    experts: Experts,
    stats: LayerStats,
    needs_dweights: bool,
) -> tuple[Arrival, ExpertWeights | None]:
    """(what waits for the last combines and gives dx_TH and dweight_TK, gradients of the weights if needed)."""
    parts, together = len(kept), kept[0].route.together[1]
    span, beside = stats.meter.ride(dy_TH.device, "backward", parts), stats.beside
    dy_C = [dy.contiguous() for dy in dy_TH.tensor_split(parts)]
    dweights: ExpertWeights | None = None
    sums: list[Pending] = []
    coming: dict[int, _Coming] = {}
    for part in reversed(range(parts)):
        route, x, saved = kept[part]
        beside.links_taken()
        with span("dispatch", part):
            # What is left of this chunk, and the next one.
            for other in range(part, max(part - part % together - together, 0) - 1, -1):
                if other not in coming:
                    with span.named("dispatch", other):
                        coming[other] = _start_backward(kept[other], dy_C[other], transport)
        handover()
        with reserved(transport.processors):
            beside.gradients_asked()
        with span("dispatch", part):
            again, rows, gradients = coming.pop(part)
            if rows is not None:
                x = _readable(rows.wait(), route.packets, dy_TH.dtype).rows
            dpartial = gradients.wait()
        if part == 0:
            beside.gradients_came(links_free=parts == 1)
        with span("experts", part), reserved(transport.processors if parts > 1 else 0):
            dx_RH = route.new_partial(dy_TH.shape[1], dy_TH.dtype, dy_TH.device)
            dweight_RJ, rest = experts.backward(saved, x, weights, dpartial, dx_RH, needs_dweights)
            if again is not None and rest is not None:
                # These rows are in a lease, which goes to others now.
                dweights, rest = _sum(dweights, rest()), None
        beside.links_taken()
        with span("combine", part):
            if again is not None:
                transport.discard(again, kept[part].x.data).wait()
            sums.append(transport.combine_gradients(route, dweight_RJ))
        if rest is not None:
            with span("experts", part), span.named("weight-gradients", part), reserved(transport.processors):
                dweights = _sum(dweights, rest())
    dtype = dy_TH.dtype

    def arrive() -> tuple[torch.Tensor, torch.Tensor]:
        handover()
        with span("combine"):
            sums_C = [one.wait() for one in reversed(sums)]
            dx_TH, dweight_TK = _joined([dx for dx, _ in sums_C]), _joined([dweight for _, dweight in sums_C])
        beside.links_free()
        return dx_TH.to(dtype), dweight_TK

    return arrive, dweights


class _Coming(NamedTuple):
    """What a part's backward waits for: gradients, and its rows if they are sent again, by a route of their own."""

    again: Any
    rows: Pending | None
    gradients: Pending


def _start_backward(kept: Kept, dy_TH: torch.Tensor, transport: Transport) -> _Coming:
    again = rows = None
    if transport.sends_again:
        again = kept.route.again()
        rows = transport.dispatch(kept.x.data, again)
    return _Coming(again, rows, transport.dispatch_gradients(dy_TH, kept.route))


def _readable(arrivals: Arrivals, packets: bool, dtype: torch.dtype) -> Arrivals:
    """As the experts read them: packets of FP8, or rows."""
    return arrivals.packed() if packets else arrivals.widened(dtype)


def _sum(one: ExpertWeights | None, other: ExpertWeights) -> ExpertWeights:
    if one is None:
        return other
    for total, more in zip(one, other, strict=True):
        if total is not None and more is not None:
            total.add_(more)
    return one


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
