"""The contract of a transport: how rows travel between ranks and back.

The class says all that others must know of it (`Transport`, first half). An instance has `plan` and four verbs. None
blocks the host for longer than it must; what is still under way has `wait()`.

    route    = transport.plan(slot_TK, weight_TK, traffic)     who gets which row
    arrivals = transport.dispatch(x_TH, route)                 rows here, with their slots and weights
    ...experts write their weighted partial sums into partial_RH = route.new_partial(...)...
    y_TH     = transport.combine(route, partial_RH)            sums over the ranks that a token visited

The backward pass uses the same verbs on the same route: the backward of a dispatch is a combine of row gradients
(with `dweight_RJ` beside them), the backward of a combine is a dispatch without weights.

A row of an arrival serves J choices of its token. J depends on the transport: `dedup` sends one row per (token,
rank), J = K; `alltoall` one row per (token, expert), J = 1. Column j of `slot_RJ` is -1 where nothing is to do.

Buffers that a transport owns are leased: they hold until the next verb on the same route and autograd must never
save a view of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from carpool.activations import Arena
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS, Traffic
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.options import TransportOptions
from carpool.transport.token_capacity import TokenCapacity
from carpool.transport.volume import Counts, MeanTraffic, Volume

# What travels beside a row for each choice that it serves: an int32 slot and a float32 weight on the way out, the
# weight's float32 gradient on the way back in the backward.
CHOICE_BYTES = 8
GRADIENT_BYTES = 4
# What rows that travel out to experts, or back, are counted as, and whether in the backward.
VERB_OF = {
    ("out", False): "dispatch",
    ("back", False): "combine",
    ("out", True): "combine_backward",
    ("back", True): "dispatch_backward",
}


class RankMissingError(RuntimeError):
    """A rank did not arrive in time. `ranks` are the missing ones, in the expert-parallel group."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class BufferOverflowError(RuntimeError):
    """More rows went to a rank than its buffers hold. `needed` is the capacity that would have been enough."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


@dataclass(kw_only=True)
class Route:
    """Where each row of one forward goes; made by `plan`, and good for one forward and its backward.

    Attributes:
        num_tokens, top_k: T and K of this rank.
        num_rows: R, rows that this rank receives.
        choices_per_send: J.
        num_pairs: P, (row, slot) pairs among them: the rows that the experts' matrix products see; an upper bound where
            only the device knows.
        traffic: where the verbs count what they send.
        choices_W: choices of this rank's tokens on each rank: what one row per (token, expert) would send. Empty where
            only the device knows.
    """

    num_tokens: int
    top_k: int
    num_rows: int
    choices_per_send: int
    num_pairs: int
    traffic: Traffic
    choices_W: tuple[int, ...] = ()
    backward: bool = False

    def new_partial(self, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The (R, H) buffer for what goes back: partial sums in the forward, row gradients in the backward."""
        return torch.empty(self.num_rows, hidden, dtype=dtype, device=device)

    def again(self) -> Self:
        """A route for one more dispatch along the same ways."""
        return replace(self)

    def verb(self, way: Literal["out", "back"]) -> str:
        """What rows that travel out to experts, or back, are counted as: a dispatch of gradients is the backward of a
        combine, and the other way round."""
        return VERB_OF[way, self.backward]

    def count(
        self,
        way: Literal["out", "back"],
        rows_W: Sequence[int],
        row: torch.Tensor,
        choice_bytes: int,
        codecs: Codecs = PLAIN,
    ) -> None:
        """Count rows that travel out to experts or back, by their verb.

        Args:
            rows_W: rows sent to each rank.
            row: any matrix of such rows, for the size of one.
            choice_bytes: what travels beside a row for each choice that it serves.
            codecs: by which rows travel. Those of the baseline travel as they are.
        """
        verb = VERB_OF[way, self.backward]
        row_bytes = row.shape[1] * row.element_size()
        sent_bytes = row_bytes
        if codecs is not PLAIN:
            sent_bytes = codecs.of(verb).row_bytes(row.shape[1], row.element_size())
        sent_bytes += self.choices_per_send * choice_bytes
        self.traffic.add(verb, rows_W, sent_bytes, self.choices_W, row_bytes + choice_bytes)


class Pending(NamedTuple):
    """Something under way; `wait()` gives its value, once."""

    wait: Callable[[], Any]


def bytes_of_rides(rows_WW: Counts, row: Mapping[str, int], choices: int) -> dict[str, Counts]:
    """(W, W) bytes of each verb but the plan, from rank [i] to rank [j].

    Args:
        rows_WW: rows dispatched.
        row: bytes of a row, by verb.
        choices: how many of its token's choices a row may serve."""
    return {
        "dispatch": rows_WW * (row["dispatch"] + choices * CHOICE_BYTES),
        "combine": rows_WW.T * row["combine"],
        "dispatch_backward": rows_WW.T * (row["dispatch_backward"] + choices * GRADIENT_BYTES),
        "combine_backward": rows_WW * row["combine_backward"],
    }


class Transport(ABC):
    """One way for rows to travel: what the class says about itself, and the verbs of an instance.

    A subclass has a `name`, says which rows it sends (`tokens_sent`), and implements the five verbs and `plan`. All
    else has a default. Where `options_class` is set, instances are constructed with options as a third argument. A
    transport reads its own kind of route, the one that its `plan` made; hence `Any`.

    Args:
        group: the expert-parallel process group; None for one rank.
        slots_per_rank: S of the layout, to tell rank and slot apart in a global slot id.

    Attributes of the class:
        name: what `transport=` selects.
        options_class: of its options, if it has any; everything below that takes options gets one of these.
        automatic: whether "auto" may pick it.
        anywhere: whether any ranks can use it. If not, `why_not` looks at a group.
        alone: whether it is for one rank, and "auto" takes it there.
        one_send_per_rank: whether a token is sent once to each rank that serves it. Placement is solved for such rows.
        one_send_per_node: whether it is sent once to each other node instead, and passed on there.
        hops_in_turn: whether a row takes links of several kinds one after the other.
        between_nodes: whether "auto" takes it on several nodes where the model of costs says that it is faster.
        writes_to_peers: whether it writes rows into the memory of GPUs of its node, if they reach each other.
        needs_nvlink: whether GPUs without NVLink cannot use it.
        rides_in_parts: whether `plan` and the combines take parts (`carpool_systems.tiles`).
        knows_counts: whether the host knows how many rows came. If not, most rows of its buffers are empty, and experts
            that run a model's own forward would compute them.
        graphable: whether it asks nothing of the host, so that a CUDA graph can hold its rides.
        plan_bytes: what each rank sends to each other one before rows travel.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[TransportOptions] | None] = None
    automatic: ClassVar[bool] = False
    anywhere: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    one_send_per_rank: ClassVar[bool] = False
    one_send_per_node: ClassVar[bool] = False
    hops_in_turn: ClassVar[bool] = False
    between_nodes: ClassVar[bool] = False
    writes_to_peers: ClassVar[bool] = False
    needs_nvlink: ClassVar[bool] = False
    rides_in_parts: ClassVar[bool] = False
    knows_counts: ClassVar[bool] = True
    graphable: bool = False
    plan_bytes: ClassVar[int] = 0

    # -- what the class says: no device is needed, unless stated ---------------------------------------------------

    @classmethod
    def own_options(cls, options: TransportOptions | None) -> Any:
        """Its own of the options that were given: they themselves, or of another transport's what means something to
        any. None if it has none."""
        if cls.options_class is None:
            return None
        if isinstance(options, cls.options_class):
            return options
        if options is None:
            return cls.options_class()
        return cls.options_class(max_tokens=options.max_tokens, codecs=options.codecs)

    @classmethod
    @abstractmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        """(W, W) rows that rank [i] dispatches to rank [j], the diagonal included. Over a kind of link go those of its
        `topology.pairs`.

        Args:
            rank_TK: for each source rank, (T, K) the rank that serves each choice, -1: none.
            topology: of the ranks."""

    @classmethod
    @abstractmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        """Expected rows per token if experts are chosen uniformly."""

    @classmethod
    def mean_traffic(
        cls, reached: Callable[[int], float], num_experts: int, top_k: int, num_ranks: int, per_node: int
    ) -> MeanTraffic:
        """Rows of one dispatch, for plans, which know no routing but how far a token's choices are spread.

        Args:
            reached: of so many equal parts of the experts, the share that a token visits.
            per_node: ranks of the group on each node.

        Example: one row to each rank, 4 ranks on 2 nodes, half of which a token visits: `MeanTraffic(0.5, 1.0,
        2.0)`."""
        nodes, each = num_ranks // per_node, reached(num_ranks)
        if cls.one_send_per_node and nodes > 1:
            return MeanTraffic(nodes * (per_node - 1) * each, (nodes - 1) * reached(nodes), each * num_ranks)
        if not (cls.one_send_per_rank or cls.one_send_per_node):
            each = cls.ranks_per_token(num_experts, top_k, num_ranks) / num_ranks
        return MeanTraffic((per_node - 1) * each, (num_ranks - per_node) * each, each * num_ranks)

    @classmethod
    def choices_per_send(cls, top_k: int) -> int:
        """J: how many of its token's choices a row may serve."""
        return top_k

    @classmethod
    def row_bytes(cls, verb: str, hidden: int, element_size: int, options: Any = None) -> int:
        """Bytes of one row of H elements in a verb of `carpool.metrics.counters.VERBS`."""
        codecs = PLAIN if options is None else options.codecs
        return codecs.of(verb).row_bytes(hidden, element_size)

    @classmethod
    def volume(
        cls,
        rank_TK: Sequence[Counts],
        topology: Topology,
        top_k: int,
        hidden: int,
        element_size: int,
        options: Any = None,
    ) -> Volume:
        """Rows and bytes of one forward and backward; what comes back takes the same ways as what went out."""
        rows_WW, choices = cls.tokens_sent(rank_TK, topology), cls.choices_per_send(top_k)
        row = {verb: cls.row_bytes(verb, hidden, element_size, options) for verb in VERBS}
        return Volume(
            transport=cls.name,
            tokens_W=tuple(len(one) for one in rank_TK),
            rows_WW=rows_WW,
            bytes_WW={"plan": np.full_like(rows_WW, cls.plan_bytes), **bytes_of_rides(rows_WW, row, choices)},
        )

    @classmethod
    def buffer_bytes(cls, options: Any, num_ranks: int, hidden: int, element_size: int, top_k: int) -> int:
        """Bytes of the buffers that all layers share, on each rank; 0: it has none."""
        return 0

    @classmethod
    def planned_buffer_bytes(cls, tokens: int, num_ranks: int, row_bytes: int, top_k: int) -> int:
        """The same, for plans: of default options, if each rank has so many tokens."""
        return 0

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        """Why the ranks of a group cannot use it, or None if they can. Collective over the group. None as the group:
        as far as this process can tell alone."""
        return None

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        """Why ranks on these nodes cannot use it, or None if they can, as far as the topology tells. Asks nobody."""
        return None

    @classmethod
    def why_not_hidden(cls, hidden: int, element_size: int) -> str | None:
        """Why rows of H elements cannot travel so, or None if they can."""
        return None

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        """Why rows cannot travel by these codecs, or None if they can."""
        return None if codecs.plain else "its rows travel as they are; use transport 'dedup'"

    @classmethod
    def why_not_automatic(cls, options: Any) -> str | None:
        """Why "auto" does not pick it with these options, or None if it may."""
        return None

    # -- of an instance -----------------------------------------------------------------------------------------------

    def __init__(self, group: dist.ProcessGroup | None, slots_per_rank: int) -> None:
        self.group, self.slots_per_rank = group, slots_per_rank
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    @property
    def processors(self) -> int:
        """Multiprocessors that its verbs take while a computation runs beside them; 0: none, or nothing does."""
        return 0

    @property
    def num_hops(self) -> int:
        """Hops that a row takes one after the other."""
        return 1

    @property
    def arena(self) -> Arena | None:
        """Where layers keep what only the device can count; None if the host knows, or memory does not matter."""
        return None

    @property
    def capacities(self) -> tuple[TokenCapacity, ...]:
        """What may have too few places for rows; empty if nothing."""
        return ()

    def check(self) -> None:
        """Raise if rows had no place, or a rank did not arrive, since the last call. Waits for the device."""
        return None

    # -- the verbs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> Any:
        """The `Route`: which row goes where.

        Args:
            slot_TK: (T, K) int32 global slot ids (rank * S + slot), -1: none. T may differ between ranks, and be 0.
            weight_TK: (T, K) float32.
            traffic: counts of this layer.
        """

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> Sequence[Any]:
        """The routes of the pieces of one ride, as `plan` of each. They are dispatched in order.

        Args:
            together: so many neighbouring pieces may share a message of rows, in the forward and in the backward. Such
                a message leaves when the verb has been asked for with each of these routes.
        """
        return [self.plan(slot_TK, weight_TK, traffic) for slot_TK, weight_TK in zip(slot_C, weight_C, strict=True)]

    @abstractmethod
    def dispatch(self, x_TH: torch.Tensor, route: Any) -> Pending:
        """Send each row where the route says. `wait()` gives the `Arrivals`."""

    @abstractmethod
    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        """Bring partial sums back. `wait()` gives y_TH: the sums, accumulated in float32 in rank order."""

    @abstractmethod
    def dispatch_gradients(self, dy_TH: torch.Tensor, route: Any) -> Pending:
        """The backward of `combine`: rows only, their slots are known. `wait()` gives them as `HiddenStates`."""

    @abstractmethod
    def combine_gradients(self, route: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        """The backward of `dispatch`: gradients of rows and weights come back. `wait()` gives (dx_TH, dweight_TK)."""

    def dispatch_again(self, x_TH: torch.Tensor, route: Any) -> Pending:
        """Send the rows of a forward a second time, for its backward. Their slots and weights are known. `wait()` gives
        them as `HiddenStates`; once they have been read, `discard` ends the ride.

        Args:
            route: of the forward, `again()`. Pieces come in the order of the backward."""
        coming = self.dispatch(x_TH, route)
        return Pending(lambda: coming.wait().tokens)

    def discard(self, route: Any, x_TH: torch.Tensor) -> Pending:
        """End a ride of x_TH whose rows have been read, when no combine will follow."""
        return Pending(lambda: None)
