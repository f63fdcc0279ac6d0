"""The contract of a transport: dispatch of tokens to the ranks of their experts, and combine of the outputs.

The class declares the properties that planners and configuration need (`Transport`, first half). An instance has `plan`
and four verbs. A verb blocks the host no longer than necessary and returns a `Pending`, whose `wait()` gives the
result.

    route    = transport.plan(slot_TK, weight_TK, traffic)     which token goes to which rank
    arrivals = transport.dispatch(x_TH, route)                 the tokens that arrive, with their slots and weights
    ...experts write their weighted partial outputs into partial_RH = route.new_partial(...)...
    y_TH     = transport.combine(route, partial_RH)            MoE outputs: sums over the ranks that a token visited

The backward pass uses the same verbs on the same route: the backward of a dispatch is a combine of token gradients
(with `dweight_RJ`), the backward of a combine is a dispatch without weights.

An arrived token serves J of its K choices. J depends on the transport: `dedup` sends a token once per rank, J = K;
`alltoall` once per expert, J = 1. Column j of `slot_RJ` is -1 where there is no choice.

Buffers that a transport owns are leased: they are valid until the next verb on the same route, and autograd must never
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
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS, Meter, Traffic
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.options import TransportOptions
from carpool.transport.token_capacity import TokenCapacity
from carpool.transport.volume import Counts, MeanTraffic, Volume

# Bytes sent with a token for each choice that it serves: an int32 slot and a float32 weight in the dispatch, the
# weight's float32 gradient in the combine of the backward.
CHOICE_BYTES = 8
GRADIENT_BYTES = 4
# The verb under which sends are counted, by direction and whether in the backward.
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
    """More tokens went to a rank than its buffers hold. `needed` is the capacity that would have sufficed."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


@dataclass(kw_only=True)
class Route:
    """The destinations of all tokens of one forward, made by `plan` and used by that forward and its backward.

    Attributes:
        num_tokens, top_k: T and K of this rank.
        num_rows: R, the number of tokens that this rank receives.
        choices_per_send: J.
        num_pairs: P, (token, slot) pairs among them: the rows of the experts' matrix products. An upper bound where
            only the device knows the number.
        traffic: where the verbs count what they send.
        choices_W: choices of this rank's tokens on each rank: the sends of `alltoall`. Empty where only the device
            knows them.
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
        """The (R, H) buffer that combine sends: partial outputs in the forward, token gradients in the backward."""
        return torch.empty(self.num_rows, hidden, dtype=dtype, device=device)

    def again(self) -> Self:
        """A route for one more dispatch to the same destinations."""
        return replace(self)

    def verb(self, way: Literal["out", "back"]) -> str:
        """The verb under which sends to experts ("out") or back are counted: a dispatch of gradients is the backward of
        a combine, and vice versa."""
        return VERB_OF[way, self.backward]

    def count(
        self,
        way: Literal["out", "back"],
        rows_W: Sequence[int],
        row: torch.Tensor,
        choice_bytes: int,
        codecs: Codecs = PLAIN,
    ) -> None:
        """Count the sends of one verb.

        Args:
            rows_W: hidden states sent to each rank.
            row: a matrix of these, for the size of one.
            choice_bytes: bytes that are sent with a token for each choice that it serves.
            codecs: that encode them. The baseline's are not encoded.
        """
        verb = VERB_OF[way, self.backward]
        row_bytes = row.shape[1] * row.element_size()
        sent_bytes = row_bytes
        if codecs is not PLAIN:
            sent_bytes = codecs.of(verb).row_bytes(row.shape[1], row.element_size())
        sent_bytes += self.choices_per_send * choice_bytes
        self.traffic.add(verb, rows_W, sent_bytes, self.choices_W, row_bytes + choice_bytes)


class Pending(NamedTuple):
    """An asynchronous result; `wait()` returns it, and may be called once."""

    wait: Callable[[], Any]


def _nothing() -> None:
    """The release of parameters in memory of their own."""


class Fetched(NamedTuple):
    """Parameters of spare slots on their way (`slot_links`).

    Attributes:
        wait: lets the current stream wait for them, and returns a list of (S, ...). It may be called once.
        release: is called once, after kernels that read them have been launched on the current stream. Their memory may
            be reused from then on.
    """

    wait: Callable[[], list[torch.Tensor]]
    release: Callable[[], None] = _nothing


def bytes_of_rides(rows_WW: Counts, row: Mapping[str, int], choices: int) -> dict[str, Counts]:
    """(W, W) bytes of each verb but the plan, from rank [i] to rank [j].

    Args:
        rows_WW: hidden states dispatched.
        row: bytes of one, by verb.
        choices: J, choices that one may serve."""
    return {
        "dispatch": rows_WW * (row["dispatch"] + choices * CHOICE_BYTES),
        "combine": rows_WW.T * row["combine"],
        "dispatch_backward": rows_WW.T * (row["dispatch_backward"] + choices * GRADIENT_BYTES),
        "combine_backward": rows_WW * row["combine_backward"],
    }


class Transport(ABC):
    """Base class of transports: declarations of the class, and the verbs of an instance.

    A subclass has a `name`, defines which tokens it sends (`tokens_sent`), and implements the five verbs and `plan`.
    All else has a default. Where `options_class` is set, instances are constructed with options as a third argument.
    Routes are typed `Any`, because each transport has a route class of its own.

    Args:
        group: the expert-parallel process group; None for one rank.
        slots_per_rank: S of the layout, to tell rank and slot apart in a global slot id.

    Attributes of the class:
        name: what `transport=` selects.
        options_class: the class of its options, if it has any; all methods below receive such options.
        automatic: whether "auto" may pick it.
        anywhere: whether any ranks can use it. If not, `why_not` examines a group.
        alone: whether it is for one rank, and "auto" picks it there.
        combines_in_place: whether `combine` returns the partial outputs themselves.
        one_send_per_rank: whether a token is sent once to each rank that serves it, as placement solvers assume.
        one_send_per_node: whether it is sent once to each other node instead, and distributed there.
        hops_in_turn: whether a token takes links of several kinds one after the other.
        between_nodes: whether "auto" picks it on several nodes where the cost model says that it is faster.
        writes_to_peers: whether it writes into the memory of other GPUs of its node, if they reach each other.
        needs_nvlink: whether GPUs without NVLink cannot use it.
        rides_in_parts: whether `plan` and the combines take parts (`carpool_systems.tiles`).
        knows_counts: whether the host knows how many tokens arrived. If not, most places of its buffers are empty, and
            experts that run a model's own forward would compute them.
        graphable: whether it never synchronises with the host, so that a CUDA graph can contain its rides. Of a class
            that `writes_to_peers`: where GPUs of a node reach each other; an instance knows whether it does.
        links_slots: whether it has `slot_links` of its own, for which the host reads no plan.
        plan_bytes: bytes that each rank sends to each other one before the dispatch.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[TransportOptions] | None] = None
    automatic: ClassVar[bool] = False
    anywhere: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    combines_in_place: ClassVar[bool] = False
    one_send_per_rank: ClassVar[bool] = False
    one_send_per_node: ClassVar[bool] = False
    hops_in_turn: ClassVar[bool] = False
    between_nodes: ClassVar[bool] = False
    writes_to_peers: ClassVar[bool] = False
    needs_nvlink: ClassVar[bool] = False
    rides_in_parts: ClassVar[bool] = False
    knows_counts: ClassVar[bool] = True
    graphable: bool = False
    links_slots: ClassVar[bool] = False
    plan_bytes: ClassVar[int] = 0

    # -- declarations of the class: no device is needed, unless stated ---------------------------------------------

    @classmethod
    def own_options(cls, options: TransportOptions | None) -> Any:
        """The options of its own class: the given ones, or made from the part of another transport's that is common to
        all. None if it has no options."""
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
        """(W, W) hidden states that rank [i] dispatches to rank [j], the diagonal included. A kind of link carries
        those of its `topology.pairs`.

        Args:
            rank_TK: for each source rank, (T, K) the rank that serves each choice, -1: none.
            topology: of the ranks."""

    @classmethod
    @abstractmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        """Expected sends per token if experts are chosen uniformly, to the own rank included."""

    @classmethod
    def mean_traffic(
        cls, reached: Callable[[int], float], num_experts: int, top_k: int, num_ranks: int, per_node: int
    ) -> MeanTraffic:
        """Expected sends of one dispatch, for the planner, which knows only how far a token's choices are spread.

        Args:
            reached: for a number of equal parts of the experts, the share of parts that a token visits.
            per_node: ranks of the group on each node.

        Example: `dedup`, 4 ranks on 2 nodes, of which a token visits half: `MeanTraffic(0.5, 1.0, 2.0)`."""
        nodes, each = num_ranks // per_node, reached(num_ranks)
        if cls.one_send_per_node and nodes > 1:
            return MeanTraffic(nodes * (per_node - 1) * each, (nodes - 1) * reached(nodes), each * num_ranks)
        if not (cls.one_send_per_rank or cls.one_send_per_node):
            each = cls.ranks_per_token(num_experts, top_k, num_ranks) / num_ranks
        return MeanTraffic((per_node - 1) * each, (num_ranks - per_node) * each, each * num_ranks)

    @classmethod
    def choices_per_send(cls, top_k: int) -> int:
        """J: choices that one send of a token serves, at most."""
        return top_k

    @classmethod
    def row_bytes(cls, verb: str, hidden: int, element_size: int, options: Any = None) -> int:
        """Bytes of one hidden state of H elements in a verb of `carpool.metrics.counters.VERBS`."""
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
        """Sends and bytes of one forward and backward; combine takes the same links as dispatch."""
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
        """Bytes per rank of the buffers that all layers share; 0: there are none."""
        return 0

    @classmethod
    def planned_buffer_bytes(cls, tokens: int, num_ranks: int, row_bytes: int, top_k: int) -> int:
        """The same for the planner: with default options and `tokens` tokens per rank."""
        return 0

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        """Why the ranks of a group cannot use it, or None if they can. Collective over the group. group None: as far as
        this process alone can determine."""
        return None

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        """Why ranks on these nodes cannot use it, or None if they can, from the topology alone. Not collective."""
        return None

    @classmethod
    def why_not_hidden(cls, hidden: int, element_size: int) -> str | None:
        """Why it cannot send hidden states of H elements, or None if it can."""
        return None

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        """Why it cannot use these codecs, or None if it can."""
        return None if codecs.plain else "it does not encode hidden states; use transport 'dedup'"

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
        """Multiprocessors that its verbs take from an overlapped computation; 0: none, or nothing is overlapped."""
        return 0

    @property
    def num_hops(self) -> int:
        """Hops that a token takes one after the other."""
        return 1

    @property
    def arena(self) -> Arena | None:
        """The arena for saved activations whose number of rows only the device knows; None: tensors are allocated."""
        return None

    @property
    def capacities(self) -> tuple[TokenCapacity, ...]:
        """The capacities that may turn out too small; empty if none can."""
        return ()

    def slot_links(self, layout: ExpertLayout, spare: int, meter: Meter | None = None) -> Any:
        """Its own way of replicas to `spare` spare slots of each rank (`carpool.replicas.slot_links.SlotLinks`); None:
        PyTorch's collectives. `meter`: of the layer; its span "fill" is the time that experts waited for replicas."""
        return None

    def check(self) -> None:
        """Raise if a capacity was exceeded, or a rank was missing, since the last call. Waits for the device."""
        return None

    # -- the verbs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> Any:
        """The `Route` of a batch: which token goes where.

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
            together: neighbouring pieces that may share a message, in the forward and in the backward. A message is
                sent when the verb has been called for all of its pieces.
        """
        return [self.plan(slot_TK, weight_TK, traffic) for slot_TK, weight_TK in zip(slot_C, weight_C, strict=True)]

    @abstractmethod
    def dispatch(self, x_TH: torch.Tensor, route: Any) -> Pending:
        """Send each token where the route says. `wait()` gives the `Arrivals`."""

    @abstractmethod
    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        """Send partial outputs back. `wait()` gives y_TH, their sums, accumulated in float32 in rank order."""

    @abstractmethod
    def dispatch_gradients(self, dy_TH: torch.Tensor, route: Any) -> Pending:
        """The backward of `combine`: a dispatch without slots. `wait()` gives the gradients as `HiddenStates`."""

    @abstractmethod
    def combine_gradients(self, route: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        """The backward of `dispatch`: a combine of the gradients of tokens and weights. `wait()` gives (dx_TH,
        dweight_TK)."""

    def dispatch_again(self, x_TH: torch.Tensor, route: Any) -> Pending:
        """Send the tokens of a forward a second time, for its backward, without slots and weights. `wait()` gives them
        as `HiddenStates`; once they have been read, `discard` ends the ride.

        Args:
            route: of the forward, `again()`. Pieces come in the order of the backward."""
        coming = self.dispatch(x_TH, route)
        return Pending(lambda: coming.wait().tokens)

    def discard(self, route: Any, x_TH: torch.Tensor) -> Pending:
        """End a ride of x_TH whose tokens have been read, when no combine will follow."""
        return Pending(lambda: None)
