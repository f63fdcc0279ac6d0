"""Several hops, each over a group of its own: the base of `hierarchical` and the hierarchical all-to-alls.

A hop is a transport over the ranks of its group, to each of which it attributes the slots that are reached through it.
Choices arrive as slots of the remaining hops, from which the next hop is planned. In the combine the hops run in
reverse order, and a forwarding rank adds up the partial outputs of a token in float32, rounds the sum to the tokens'
dtype, and sends it on.

    2 hops, 3 chunks (`carpool.ride.chunks`). D: dispatch, C: combine, E: experts; D2.1 is hop 2 of chunk 1

    link of hop 1    D1.0  D1.1  D1.2         C1.0   C1.1   C1.2
    link of hop 2          D2.0  D2.1  D2.2   C2.0  C2.1  C2.2
    experts                      E.0   E.1    E.2

The pieces of a chunk share messages on each hop. A hop of a chunk starts when the hop before it has arrived. The host
does not wait for that: it starts the hop when it waits for a neighbouring chunk (`Relays`). So both links are busy at
once, as in ScheMoE's Pipe-A2A (EuroSys '24, section 4). On a GPU the kernels that start a hop run on the computation's
stream. On a stream of their own they read memory that the computation had reused (two ranks a node, chunks: other bits
the second time).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist

from carpool.metrics.counters import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Pending, Route, Transport
from carpool.transport.exchange import ExchangeTransport


class Hop(NamedTuple):
    """A transport, and the ranks of its group by their number in the expert-parallel group."""

    transport: Any
    ranks: tuple[int, ...]


class HopTraffic(Traffic):
    """Counts the sends of one hop in the layer's counts.

    Args:
        layer: the layer's counts, by rank of the expert-parallel group.
        ranks: of the hop's group, by their number in the expert-parallel group.
        own: this rank's number there. None: tokens that stay on this rank are counted, too.
    """

    def __init__(self, layer: Traffic, ranks: tuple[int, ...], own: int | None) -> None:
        self._layer, self._ranks, self._own = layer, ranks, own

    def add(
        self, verb: str, rows_W: Sequence[int], row_bytes: int, choices_W: Sequence[int] = (), baseline_bytes: int = 0
    ) -> None:
        """Ignores the baseline, which the ride counts once for all hops."""
        rows = [0] * self._layer.num_ranks
        for rank, count in zip(self._ranks, rows_W, strict=True):
            rows[rank] = 0 if rank == self._own else count
        self._layer.add(verb, rows, row_bytes)

    def tally(
        self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        return self._layer.tally(verb, row_bytes, 0, device, self._ranks)


@dataclass(kw_only=True)
class MultiHopRoute(Route):
    """Attributes:
    hops: the route of each hop.
    number: of the piece in its ride.
    ride: the same object for all pieces of a ride.
    together: neighbouring pieces of a chunk, in the forward and in the backward.
    chosen_W: (W,) int64 on the device, choices of this rank's tokens on each rank.
    """

    hops: tuple[Any, ...]
    number: int
    ride: object
    together: tuple[int, int]
    chosen_W: torch.Tensor

    def chunk(self, verb: str) -> Chunk:
        size = self.together[verb not in ("dispatch", "combine")]
        return Chunk(self.ride, verb, self.number // size, size)

    def new_partial(self, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        partial: torch.Tensor = self.hops[-1].new_partial(hidden, dtype, device)
        return partial

    def again(self) -> Self:
        return replace(self, hops=tuple(route.again() for route in self.hops))

    def count_baseline(self, way: Literal["out", "back"], row: torch.Tensor, choice_bytes: int) -> None:
        row_bytes = row.shape[1] * row.element_size() + choice_bytes
        self.traffic.tally(self.verb(way), 0, row_bytes, row.device)[1].add_(self.chosen_W)


Start = Callable[[Any], Pending]


class Chunk(NamedTuple):
    """Pieces that are sent in one message.

    Attributes:
        ride: the same object for all chunks of a ride.
        number: of the chunk in its ride.
        size: number of pieces.
    """

    ride: object
    verb: str
    number: int
    size: int

    @property
    def out(self) -> bool:
        """Whether it is a dispatch."""
        return self.verb.startswith("dispatch")


class Relay:
    """The transfer of one piece over several hops.

    Args:
        pending: the first hop.
        later: functions that start a further hop each, given the result of the hop before.
    """

    def __init__(self, chunk: Chunk, pending: Pending, later: Sequence[Start]) -> None:
        self.chunk, self._pending, self._later = chunk, pending, list(later)

    @property
    def on_last(self) -> bool:
        return not self._later

    def advance(self) -> None:
        """Wait for the current hop, and start the next one."""
        self._pending = self._later[0](self._pending.wait())
        del self._later[0]

    def value(self) -> Any:
        """Wait for the last hop, and return its result."""
        return self._pending.wait()


class Relays:
    """Starts the hops of pieces in flight; see the module's docstring.

    Only the `Pending` of a piece holds its relay. After an error these are freed, and so are the relays, whose hops
    must not be started during later rides.
    """

    def __init__(self) -> None:
        # In the order of `add`, which is the same on all ranks.
        self._under_way: weakref.WeakValueDictionary[int, Relay] = weakref.WeakValueDictionary()
        self._added = 0

    def add(self, relay: Relay) -> Pending:
        """Track a relay. `wait()` gives its value."""
        if not relay.on_last:
            self._under_way[self._added] = relay
            self._added += 1
        return Pending(lambda: self._wait(relay))

    def _wait(self, relay: Relay) -> Any:
        while not relay.on_last:
            self._advance(relay.chunk)
        # The first hop of a neighbour was in flight while the experts computed on this chunk, or on the one before.
        for other in self._due(relay.chunk):
            self._advance(other)
        return relay.value()

    def _advance(self, chunk: Chunk) -> None:
        """Start the next hop of all pieces of a chunk; the last one sends the message. If one fails, all are
        dropped."""
        pieces = {number: relay for number, relay in self._under_way.items() if relay.chunk == chunk}
        if not pieces:
            raise RuntimeError(f"{chunk.verb}: a hop of this message has failed before: it is not under way")
        for number in pieces:
            del self._under_way[number]
        for relay in pieces.values():
            relay.advance()
        self._under_way.update((number, relay) for number, relay in pieces.items() if not relay.on_last)

    def _due(self, waited: Chunk) -> list[Chunk]:
        """The chunks whose next hop is started before waiting for `waited`."""
        pieces = Counter(relay.chunk for relay in self._under_way.values())
        return [chunk for chunk, there in pieces.items() if there >= chunk.size and _neighbours(chunk, waited)]


def _neighbours(other: Chunk, waited: Chunk) -> bool:
    apart = abs(other.number - waited.number)
    return apart > 1 if waited.out and not other.out else apart <= 1


class MultiHop(Transport):
    """A transport over several hops; see the module's docstring. All but the last are `ExchangeTransport`s."""

    anywhere = False
    hops_in_turn = True

    def __init__(self, group: dist.ProcessGroup | None, slots_per_rank: int, hops: Sequence[Hop]) -> None:
        super().__init__(group, slots_per_rank)
        self.hops = tuple(hops)
        self.relays = Relays()

    @property
    def num_hops(self) -> int:
        return len(self.hops)

    @property
    def processors(self) -> int:
        return max(hop.transport.processors for hop in self.hops)

    def renumbered(self, slot_TK: torch.Tensor) -> torch.Tensor:
        """Global slots in the numbering of the first hop."""
        return slot_TK

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> MultiHopRoute:
        return self.plan_pieces([slot_TK], [weight_TK], traffic)[0]

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[MultiHopRoute]:
        """Pieces share the messages of counts and choices, those of a chunk also messages of hidden states. Gradients
        of weights are not shared, or the second hop of a chunk would wait for the first hop of another."""
        ranks_W11 = torch.arange(self.num_ranks, device=slot_C[0].device).view(-1, 1, 1)
        chosen_C = [(s.div(self.slots_per_rank, rounding_mode="floor") == ranks_W11).sum((1, 2)) for s in slot_C]
        sizes = [slot_TK.shape for slot_TK in slot_C]
        slots, weights = [self.renumbered(slot_TK) for slot_TK in slot_C], list(weight_C)
        routes: list[Sequence[Any]] = []
        ride = object()
        for number, (transport, ranks) in enumerate(self.hops):
            last = number == len(self.hops) - 1
            hop_traffic = HopTraffic(traffic, ranks, None if last else self.rank)
            planned = transport.plan_pieces(slots, weights, hop_traffic, together)
            if isinstance(transport, ExchangeTransport):
                planned[0].messages.gradients_apart()
            if not last:
                arrived = transport.exchange_choices(planned)
                slots, weights = [slot_RK for slot_RK, _ in arrived], [weight_RK for _, weight_RK in arrived]
            routes.append(planned)
        return [
            MultiHopRoute(
                num_tokens=num_tokens,
                top_k=top_k,
                num_rows=hops[-1].num_rows,
                choices_per_send=hops[-1].choices_per_send,
                num_pairs=hops[-1].num_pairs,
                traffic=traffic,
                hops=hops,
                number=number,
                ride=ride,
                together=together,
                chosen_W=chosen_W,
            )
            for number, ((num_tokens, top_k), hops, chosen_W) in enumerate(
                zip(sizes, zip(*routes, strict=True), chosen_C, strict=True)
            )
        ]

    def dispatch(self, x_TH: torch.Tensor, route: MultiHopRoute) -> Pending:
        route.count_baseline("out", x_TH, CHOICE_BYTES)

        def start(hop: Any, own: Any, last: bool) -> Start:
            # The plan has already sent the choices of all hops but the last.
            return lambda rows: hop.dispatch(rows, own) if last else hop.dispatch_tokens(rows, own)

        return self._out("dispatch", x_TH, route, start)

    def dispatch_again(self, x_TH: torch.Tensor, route: MultiHopRoute) -> Pending:
        route.count_baseline("out", x_TH, 0)
        return self._out(
            "dispatch_again", x_TH, route, lambda hop, own, last: lambda rows: hop.dispatch_again(rows, own)
        )

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: MultiHopRoute) -> Pending:
        route.backward = True
        route.count_baseline("out", dy_TH, 0)
        start = lambda hop, own, last: lambda rows: hop.dispatch_gradients(rows, own)  # noqa: E731
        return self._out("dispatch_gradients", dy_TH, route, start)

    def _out(
        self, verb: str, x_TH: torch.Tensor, route: MultiHopRoute, start: Callable[[Any, Any, bool], Start]
    ) -> Pending:
        starts = [
            start(hop.transport, own, number == len(self.hops) - 1)
            for number, (hop, own) in enumerate(zip(self.hops, route.hops, strict=True))
        ]
        later = [lambda came, start=start: start(came.data) for start in starts[1:]]
        relay = Relay(route.chunk(verb), starts[0](x_TH), later)
        return self.relays.add(relay)

    def combine(self, route: MultiHopRoute, partial_RH: torch.Tensor) -> Pending:
        route.count_baseline("back", partial_RH, 0)
        dtype = partial_RH.dtype
        starts = [
            lambda sums, hop=hop.transport, own=own: hop.combine(own, sums.to(dtype))
            for hop, own in zip(self.hops, route.hops, strict=True)
        ]
        return self._back("combine", route, partial_RH, starts)

    def combine_gradients(self, route: MultiHopRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        route.count_baseline("back", dx_RH, GRADIENT_BYTES)
        dtype = dx_RH.dtype
        starts = [
            lambda both, hop=hop.transport, own=own: hop.combine_gradients(own, both[0].to(dtype), both[1])
            for hop, own in zip(self.hops, route.hops, strict=True)
        ]
        return self._back("combine_gradients", route, (dx_RH, dweight_RJ), starts)

    def _back(self, verb: str, route: MultiHopRoute, first: Any, starts: Sequence[Start]) -> Pending:
        *later, start = starts
        relay = Relay(route.chunk(verb), start(first), later[::-1])
        return self.relays.add(relay)

    def discard(self, route: MultiHopRoute, x_TH: torch.Tensor) -> Pending:
        return self.hops[-1].transport.discard(route.hops[-1], x_TH)
