"""Rows over `torch.distributed`: what the `alltoall` and `dedup` transports share.

Both send a list of rows, sorted by destination, with one all-to-all of uneven sizes, and get one row back for each
row sent. They differ only in which rows are on the list: a subclass says how many go to each rank, and which.

    sender                                    receiver
    token_N   which token each row copies     rows arrive in order of the sending rank, then of its list
    sent_W    rows to each rank, in order     slot_NJ / weight_NJ travel beside them
    choice_NJ which of the T*K choices each   and come back, as gradients, into the same places
              of its J columns stands for

The sizes have to be known on the host before an all-to-all, so `plan` exchanges counts and reads them back: one
host synchronisation per layer on CUDA. That is the price of NCCL; the transports that write into peers' memory
do not pay it.

A ride in chunks has several pieces (`carpool.schedule.chunks`), any other ride one. Pieces of one ride share what is
small: one message has the counts of all of them, one their slots and weights, and in the backward one the weights'
gradients. Rows of as many neighbouring pieces as the schedule says share a message. To each rank, of four pieces by two
in the forward:

    counts [pieces 0 1 2 3]     choices [of pieces 0 1 2 3]     rows [of pieces 0 1]     rows [of pieces 2 3]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from carpool.activations import Arrivals, Rows
from carpool.kernels.ordered_sum import ordered_sum
from carpool.observe.traffic import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Pending, Route, Transport
from carpool.transport.codecs import PLAIN, Codec, Codecs
from carpool.transport.options import TransportOptions

# Each rank tells each other how many rows and how many (row, slot) pairs will come of a piece: two int64.
COUNT_BYTES = 16
# Why `Codecs.hop` cannot be "nodes".
ONE_HOP = "its rows travel over one hop, and hop='nodes' is of transports with two: leave hop at 'all'"
# What is left to NCCL's channels, which take a multiprocessor each: an estimate, not measured.
NCCL_PROCESSORS = 16


Way = Literal["out", "back", "again"]
PieceCounts = Sequence[Sequence[int]]


class Sizes(NamedTuple):
    """Of each piece, rows to and from each rank, choices of this rank's tokens on each rank (empty: only the device
    knows), and the (row, slot) pairs that come."""

    send_CW: PieceCounts
    receive_CW: PieceCounts
    chosen_CW: PieceCounts
    pairs_C: Sequence[int]


@dataclass
class RowsToSend:
    """The list of rows of one rank, sorted by destination.

    Attributes:
        token_N: (N,) int64, the token that each row copies.
        slot_NJ: (N, J) int32, slots on the destination, -1: none.
        choice_NJ: (N, J) int64, index into the flattened (T, K) of each entry, T*K where there is none.
    """

    token_N: torch.Tensor
    slot_NJ: torch.Tensor
    choice_NJ: torch.Tensor


@dataclass(kw_only=True)
class ExchangeRoute(Route):
    """Attributes:
    token_N, choice_NJ: of `RowsToSend`.
    send, receive: rows to and from each rank.
    number: which piece of its ride it is; the first is dispatched first.
    packed_CN2J: slots and weights of the rows that each piece sends, seen as integers.
    choices: the message of these.
    rows: messages of rows, out and back, in the forward and in the backward; there also those that go out again.
    gradients: the message of the weights' gradients.
    """

    token_N: torch.Tensor
    choice_NJ: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    number: int
    packed_CN2J: list[torch.Tensor]
    choices: Message
    rows: dict[tuple[bool, Way], Message]
    gradients: Message


class Message:
    """A message that has the rows of several pieces, sent when all of them are there.

    Args:
        start: starts an all-to-all and returns what waits for it, as `ExchangeTransport._start`.
        send_CW, receive_CW: of each piece, rows to and from each rank.
        first: the number of the first piece.
    """

    def __init__(self, start: Any, send_CW: PieceCounts, receive_CW: PieceCounts, first: int = 0) -> None:
        self._start, self._send_CW, self._receive_CW, self._first = start, send_CW, receive_CW, first
        self._given: dict[int, torch.Tensor] = {}
        self._came: dict[int, torch.Tensor] = {}
        self._finish: Any = None

    def put(self, piece: int, rows: torch.Tensor) -> None:
        """The rows of a piece, sorted by the rank that they go to. With the last one the message leaves."""
        self._given[piece - self._first] = rows
        if len(self._given) == len(self._send_CW):
            given, self._given = self._given, {}
            self.send([given[number] for number in range(len(given))])

    def send(self, pieces: Sequence[torch.Tensor]) -> None:
        """The message, of the rows of each piece."""
        sent, received = (
            tuple(map(sum, zip(*sizes_CW, strict=True))) for sizes_CW in (self._send_CW, self._receive_CW)
        )
        self._finish, self._came = self._start(_by_rank(pieces, self._send_CW), sent, received), {}

    def take(self, piece: int) -> torch.Tensor:
        """What came for a piece, sorted by the rank that it came from. Once for each piece of a message."""
        if not self._came:
            out, self._finish = self._finish(), None
            number = len(self._receive_CW)
            blocks = out.split([count for counts in zip(*self._receive_CW, strict=True) for count in counts])
            self._came = {n: out if number == 1 else torch.cat(blocks[n::number]) for n in range(number)}
        return self._came.pop(piece - self._first)


def _share(rows_W: Sequence[int], rank: int) -> slice:
    """Which of rows that are sorted by rank are of one rank."""
    first = sum(rows_W[:rank])
    return slice(first, first + rows_W[rank])


def _by_rank(pieces: Sequence[torch.Tensor], sizes_CW: PieceCounts) -> torch.Tensor:
    """Rows of pieces, each sorted by rank: all, sorted by rank, then by piece."""
    if len(pieces) == 1:
        return pieces[0]
    blocks = [piece.split(list(sizes)) for piece, sizes in zip(pieces, sizes_CW, strict=True)]
    return torch.cat([block for of_rank in zip(*blocks, strict=True) for block in of_rank])


class ExchangeTransport(Transport):
    """Base of the transports that send lists of rows; see the module's docstring."""

    automatic = True
    options_class = TransportOptions
    plan_bytes = COUNT_BYTES

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        return None if codecs.inter_node == "all" else ONE_HOP

    def __init__(
        self, group: dist.ProcessGroup | None, slots_per_rank: int, options: TransportOptions | None = None
    ) -> None:
        super().__init__(group, slots_per_rank)
        self.codecs = PLAIN if options is None else options.codecs

    @property
    def processors(self) -> int:
        return NCCL_PROCESSORS if self.group is not None and dist.get_backend(self.group) == "nccl" else 0

    @abstractmethod
    def count_rows(self, here_WTK: torch.Tensor) -> torch.Tensor:
        """(W,) rows to each rank, from (W, T, K) bool: whether a choice is on a rank."""

    @abstractmethod
    def list_rows(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> RowsToSend:
        """Which rows go where; `num_rows` is the sum of what `count_rows` said."""

    def whether_here(self, slot_C: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each piece, (W, T, K) bool: whether a choice is on a rank."""
        ranks_W11 = torch.arange(self.num_ranks, device=slot_C[0].device).view(-1, 1, 1)
        # -1 stays -1.
        return [slot_TK.div(self.slots_per_rank, rounding_mode="floor") == ranks_W11 for slot_TK in slot_C]

    def rows_of(self, x_TH: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, of which a list may name one past the last where there is none."""
        return x_TH[token_N]

    def copy_rows(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        """(N, H) the rows that travel."""
        return x_TH[route.token_N]

    def sum_rows(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        """(T, H) float32, of rows that came back for those that travelled."""
        return ordered_sum(rows_NH, route.token_N, route.num_tokens)

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> ExchangeRoute:
        return self.plan_pieces([slot_TK], [weight_TK], traffic)[0]

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[ExchangeRoute]:
        here_C = self.whether_here(slot_C)
        counts = [count for here_WTK in here_C for count in (self.count_rows(here_WTK), here_WTK.sum((1, 2)))]
        counts_WN = torch.stack(counts, dim=1)
        received_WN = counts_WN
        if self.num_ranks > 1:
            received_WN = torch.empty_like(counts_WN)
            dist.all_to_all_single(received_WN, counts_WN, group=self.group)
        # The one place where the host waits for the device.
        sizes_NW = torch.cat([counts_WN, received_WN], dim=1).t().tolist()
        traffic.add("plan", [1] * self.num_ranks, COUNT_BYTES * len(slot_C))
        (send_CW, chosen_CW), (receive_CW, pairs_CW) = (
            (sizes_NW[first : first + len(counts) : 2], sizes_NW[first + 1 : first + len(counts) : 2])
            for first in (0, len(counts))
        )
        sizes = Sizes(send_CW, receive_CW, chosen_CW, [sum(pairs_W) for pairs_W in pairs_CW])
        return self._routes(slot_C, weight_C, here_C, sizes, traffic, together)

    def _routes(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        here_C: Sequence[torch.Tensor],
        sizes: Sizes,
        traffic: Traffic,
        together: tuple[int, int],
    ) -> list[ExchangeRoute]:
        """The routes of pieces whose sizes are known. here_C: of each, (W, T, K), whether a choice is on a rank."""
        send_CW, receive_CW = sizes.send_CW, sizes.receive_CW
        choices, gradients = Message(self._start, send_CW, receive_CW), Message(self._start, receive_CW, send_CW)
        packed_CN2J: list[torch.Tensor] = []
        routes: list[ExchangeRoute] = []
        messages: dict[tuple[bool, Way], Message] = {}
        for number, (slot_TK, weight_TK) in enumerate(zip(slot_C, weight_C, strict=True)):
            rows = self.list_rows(slot_TK, here_C[number], sum(send_CW[number]))
            # One place more than there are choices: the empty entries point at it.
            padded = torch.cat([weight_TK.reshape(-1), weight_TK.new_zeros(1)])
            weight_NJ = padded[rows.choice_NJ].float()
            for backward, size in enumerate(together):
                if number % size == 0:
                    those = slice(number, number + size)
                    there, here = send_CW[those], receive_CW[those]
                    messages[bool(backward), "out"] = Message(self._start, there, here, number)
                    messages[bool(backward), "back"] = Message(self._start, here, there, number)
                    if backward:
                        messages[True, "again"] = Message(self._start, there, here, number)
            packed_CN2J.append(torch.cat([rows.slot_NJ, weight_NJ.view(torch.int32)], dim=1))
            route = ExchangeRoute(
                num_tokens=slot_TK.shape[0],
                top_k=slot_TK.shape[1],
                num_rows=sum(receive_CW[number]),
                choices_per_row=rows.slot_NJ.shape[1],
                num_pairs=sizes.pairs_C[number],
                choices_W=tuple(sizes.chosen_CW[number]) if sizes.chosen_CW else (),
                traffic=traffic,
                token_N=rows.token_N,
                choice_NJ=rows.choice_NJ,
                send=tuple(send_CW[number]),
                receive=tuple(receive_CW[number]),
                number=number,
                packed_CN2J=packed_CN2J,
                choices=choices,
                rows=dict(messages),
                gradients=gradients,
            )
            routes.append(route)
        return routes

    def dispatch(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        rows = self.dispatch_rows(x_TH, route)
        if route.number == 0:
            route.choices.send(route.packed_CN2J)

        def finish() -> Arrivals:
            slot_RJ, weight_RJ = self._choices(route)
            return Arrivals(rows.wait(), slot_RJ, weight_RJ, route.num_pairs)

        return Pending(finish)

    def dispatch_rows(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        """A dispatch whose choices travel apart. `wait()` gives the `Rows`."""
        return self._send_rows(x_TH, route, route.rows[False, "out"], CHOICE_BYTES)

    def exchange_choices(self, routes: Sequence[ExchangeRoute]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a dispatch brings beside the rows of each piece: slots and weights, (R, J)."""
        routes[0].choices.send(routes[0].packed_CN2J)
        return [self._choices(route) for route in routes]

    def send_gradients_apart(self, routes: Sequence[ExchangeRoute]) -> None:
        """Let the weights' gradients of each piece travel in a message of their own: for who cannot give those of all
        pieces before any has arrived."""
        for route in routes:
            route.gradients = Message(self._start, [route.receive], [route.send], route.number)

    def _choices(self, route: ExchangeRoute) -> tuple[torch.Tensor, torch.Tensor]:
        slot_RJ, weight_bits_RJ = route.choices.take(route.number).split(route.choices_per_row, dim=1)
        return slot_RJ.contiguous(), weight_bits_RJ.contiguous().view(torch.float32)

    def dispatch_again(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        return self._send_rows(x_TH, route, route.rows[True, "again"], 0)

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        route.backward = True
        return self._send_rows(dy_TH, route, route.rows[True, "out"], 0)

    def combine(self, route: ExchangeRoute, partial_RH: torch.Tensor) -> Pending:
        return self._combine(route, partial_RH, 0)

    def _combine(self, route: ExchangeRoute, partial_RH: torch.Tensor, choice_bytes: int) -> Pending:
        message, codec = route.rows[route.backward, "back"], self._codec(route, "back")
        message.put(route.number, codec.encode(partial_RH))
        route.count("back", route.receive, partial_RH, choice_bytes, self.codecs)
        own_RH = partial_RH[_share(route.receive, self.rank)]
        come = self._decoded(message, codec, route.number, partial_RH, lambda: own_RH, route.send)
        return Pending(lambda: self.sum_rows(come(), route))

    def combine_gradients(self, route: ExchangeRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        dx = self._combine(route, dx_RH, GRADIENT_BYTES)
        route.gradients.put(route.number, dweight_RJ)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            dweight_NJ = route.gradients.take(route.number)
            choices = route.num_tokens * route.top_k
            # Each choice is served in one place, so this is a permutation, plus a heap of empty entries at the end.
            flat = dweight_NJ.new_zeros(choices + 1)
            flat.scatter_(0, route.choice_NJ.reshape(-1), dweight_NJ.reshape(-1))
            return dx.wait(), flat[:choices].view(route.num_tokens, route.top_k)

        return Pending(finish)

    def _send_rows(self, x_TH: torch.Tensor, route: ExchangeRoute, message: Message, choice_bytes: int) -> Pending:
        """`wait()` gives the `Rows` that come."""
        codec = self._codec(route, "out")
        # A token is encoded once, however many rows copy it.
        message.put(route.number, self.copy_rows(codec.encode(x_TH), route))
        route.count("out", route.send, x_TH, choice_bytes, self.codecs)
        own_N = route.token_N[_share(route.send, self.rank)]
        come = self._decoded(message, codec, route.number, x_TH, lambda: self.rows_of(x_TH, own_N), route.receive)
        return Pending(lambda: Rows.of(come()))

    def _codec(self, route: ExchangeRoute, way: Literal["out", "back"]) -> Codec:
        return self.codecs.of(route.verb(way)) if self.num_ranks > 1 else PLAIN.of(route.verb(way))

    def _decoded(
        self,
        message: Message,
        codec: Codec,
        number: int,
        like: torch.Tensor,
        own: Callable[[], torch.Tensor],
        came_W: Sequence[int],
    ) -> Callable[[], torch.Tensor]:
        """What is returned waits for the rows of a piece.

        Args:
            like: rows of their width and dtype.
            own: gives this rank's rows for itself, which have not travelled and stay as they were.
            came_W: rows from each rank."""
        if not codec.lossy:
            return lambda: message.take(number)

        def finish() -> torch.Tensor:
            rows = codec.decode(message.take(number), like.shape[1], like.dtype)
            rows[_share(came_W, self.rank)] = own()
            return rows

        return finish

    def _start(self, rows: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Any:
        """Start an all-to-all of rows; the returned callable waits for it and gives what came."""
        if self.num_ranks == 1:
            return lambda: rows
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows.contiguous(), list(receive), list(send), group=self.group, async_op=True
        )

        def finish() -> torch.Tensor:
            work.wait()
            return out

        return finish
