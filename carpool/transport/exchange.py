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

A ride in chunks has several pieces (`carpool.ride.chunks`), any other ride one. Pieces of one ride share what is
small: one message has the counts of all of them, one their slots and weights, and in the backward one the weights'
gradients. Rows of as many neighbouring pieces as the schedule says share a message. To each rank, of four pieces by two
in the forward:

    counts [pieces 0 1 2 3]     choices [of pieces 0 1 2 3]     rows [of pieces 0 1]     rows [of pieces 2 3]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from carpool.activations import Arrivals, HiddenStates
from carpool.kernels.device import ordered_sum
from carpool.metrics.counters import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Pending, Route, Transport
from carpool.transport.codecs import PLAIN, TOKEN_VERBS, Codec, Codecs
from carpool.transport.options import TransportOptions

# Each rank tells each other how many rows and how many (row, slot) pairs will come of a piece: two int64.
COUNT_BYTES = 16
# Why `Codecs.hop` cannot be "nodes".
ONE_HOP = "its rows travel over one hop, and hop='nodes' is of transports with two: leave hop at 'all'"
# What is left to NCCL's channels, which take a multiprocessor each: an estimate, not measured.
NCCL_PROCESSORS = 16


PieceCounts = Sequence[Sequence[int]]


class Sizes(NamedTuple):
    """Of each piece, rows to and from each rank, choices of this rank's tokens on each rank (empty: only the device
    knows), and the (row, slot) pairs that come."""

    send_CW: PieceCounts
    receive_CW: PieceCounts
    chosen_CW: PieceCounts
    pairs_C: Sequence[int]


@dataclass
class SendList:
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
    token_N, choice_NJ: of `SendList`.
    send, receive: rows to and from each rank.
    number: which piece of its ride it is; the first is dispatched first.
    messages: of its ride.
    """

    token_N: torch.Tensor
    choice_NJ: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    number: int
    messages: Messages


class Messages:
    """The messages of one ride. Each has the rows of some neighbouring pieces, and leaves when all of them are there.

    What a message carries is a verb of `carpool.metrics.counters.VERBS` (its rows), "dispatch_again" (rows that are
    sent once more for the backward), "choices" (slots and weights) or "gradients" (of weights).

    Args:
        start: starts an all-to-all, as `ExchangeTransport._start`.
        send_CW, receive_CW: of each piece, rows to experts on each rank, and from each rank.
        together: pieces that share a message of rows, in the forward and in the backward.

    Attributes:
        choices: of each piece, slots and weights of its rows.
    """

    def __init__(
        self,
        start: Callable[[torch.Tensor, Sequence[int], Sequence[int]], tuple[torch.Tensor, Any]],
        send_CW: PieceCounts,
        receive_CW: PieceCounts,
        together: tuple[int, int],
    ) -> None:
        self._start = start
        self.choices: list[torch.Tensor] = []
        self._sizes = send_CW, receive_CW
        forward, backward = together
        # For each kind of message: of how many pieces it is, and whether it goes to experts.
        self._kinds = {
            "choices": (len(send_CW), True),
            "dispatch": (forward, True),
            "combine": (forward, False),
            "combine_backward": (backward, True),
            "dispatch_backward": (backward, False),
            "dispatch_again": (backward, True),
            "gradients": (len(send_CW), False),
        }
        self._given: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        self._under_way: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
        self._came: dict[tuple[str, int], torch.Tensor] = {}

    def gradients_apart(self) -> None:
        """Let the weights' gradients of each piece travel in a message of their own: for who cannot give those of all
        pieces before any has arrived."""
        self._kinds["gradients"] = 1, False

    def send_choices(self) -> None:
        """Send those of all pieces."""
        for piece, packed in enumerate(self.choices):
            self.put("choices", piece, packed)

    def put(self, kind: str, piece: int, rows: torch.Tensor) -> None:
        """The rows of a piece, sorted by the rank that they go to. With the last one the message leaves."""
        together, out = self._kinds[kind]
        key = kind, piece // together
        send_CW, receive_CW = self._sizes if out else self._sizes[::-1]
        send_W, receive_W = send_CW[piece], receive_CW[piece]
        if together > 1:
            given = self._given.setdefault(key, {})
            given[piece] = rows
            if len(given) < together:
                return
            del self._given[key]
            first = key[1] * together
            those = range(first, first + together)
            rows = _by_rank([given[number] for number in those], [send_CW[number] for number in those])
            send_W, receive_W = (
                [sum(sizes_CW[number][rank] for number in those) for rank in range(len(send_W))]
                for sizes_CW in (send_CW, receive_CW)
            )
        self._under_way[key] = self._start(rows, send_W, receive_W)

    def take(self, kind: str, piece: int) -> torch.Tensor:
        """What came for a piece, sorted by the rank that it came from. Once for each piece of a message."""
        together, out = self._kinds[kind]
        key = kind, piece // together
        if key in self._under_way:
            rows, work = self._under_way.pop(key)
            if work is not None:
                work.wait()
            if together == 1:
                return rows
            first, receive_CW = key[1] * together, self._sizes[out]
            those = range(first, first + together)
            blocks = rows.split(
                [count for counts in zip(*(receive_CW[n] for n in those), strict=True) for count in counts]
            )
            for number in those:
                self._came[kind, number] = torch.cat(blocks[number - first :: together])
        return self._came.pop((kind, piece))


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
        # `PLAIN` itself where nothing is encoded, which `Route.count` need not ask for sizes.
        self.codecs = PLAIN if options is None or options.codecs == PLAIN else options.codecs
        # By what messages carry, where it is not sent as it is.
        self._codec_of: dict[str, Codec] = {}
        if self.num_ranks > 1:
            self._codec_of = {verb: codec for verb in TOKEN_VERBS if (codec := self.codecs.of(verb)).lossy}
        if "dispatch" in self._codec_of:
            self._codec_of["dispatch_again"] = self._codec_of["dispatch"]

    @property
    def processors(self) -> int:
        return NCCL_PROCESSORS if self.group is not None and dist.get_backend(self.group) == "nccl" else 0

    @abstractmethod
    def count_sends(self, here_WTK: torch.Tensor) -> torch.Tensor:
        """(W,) rows to each rank, from (W, T, K) bool: whether a choice is on a rank."""

    @abstractmethod
    def list_sends(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> SendList:
        """Which rows go where; `num_rows` is the sum of what `count_sends` said."""

    def whether_here(self, slot_C: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each piece, (W, T, K) bool: whether a choice is on a rank."""
        ranks_W11 = torch.arange(self.num_ranks, device=slot_C[0].device).view(-1, 1, 1)
        # -1 stays -1.
        return [slot_TK.div(self.slots_per_rank, rounding_mode="floor") == ranks_W11 for slot_TK in slot_C]

    def select_tokens(self, x_TH: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, of which a list may name one past the last where there is none."""
        return x_TH[token_N]

    def tokens_to_send(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        """(N, H) the rows that travel."""
        return x_TH[route.token_N]

    def sum_returned(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
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
        counts = [count for here_WTK in here_C for count in (self.count_sends(here_WTK), here_WTK.sum((1, 2)))]
        counts_WN = torch.stack(counts, dim=1)
        received_WN = counts_WN
        if self.num_ranks > 1:
            received_WN = torch.empty_like(counts_WN)
            dist.all_to_all_single(received_WN, counts_WN, group=self.group)
        # The one place where the host waits for the device.
        sizes_NW = torch.cat([counts_WN, received_WN], dim=1).t().tolist()
        traffic.add("plan", [1] * self.num_ranks, COUNT_BYTES * len(slot_C))
        half = len(counts)
        send_CW, chosen_CW, receive_CW, pairs_CW = (
            sizes_NW[:half:2], sizes_NW[1:half:2], sizes_NW[half::2], sizes_NW[half + 1 :: 2]
        )  # fmt: skip
        sizes = Sizes(send_CW, receive_CW, chosen_CW, list(map(sum, pairs_CW)))
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
        messages = Messages(self._start, send_CW, receive_CW, together)
        routes: list[ExchangeRoute] = []
        for number, (slot_TK, weight_TK) in enumerate(zip(slot_C, weight_C, strict=True)):
            rows = self.list_sends(slot_TK, here_C[number], sum(send_CW[number]))
            # One place more than there are choices: the empty entries point at it.
            padded = torch.cat([weight_TK.reshape(-1), weight_TK.new_zeros(1)])
            weight_NJ = padded[rows.choice_NJ].float()
            # Weights travel beside the slots, seen as integers.
            messages.choices.append(torch.cat([rows.slot_NJ, weight_NJ.view(torch.int32)], dim=1))
            route = ExchangeRoute(
                num_tokens=slot_TK.shape[0],
                top_k=slot_TK.shape[1],
                num_rows=sum(receive_CW[number]),
                choices_per_send=rows.slot_NJ.shape[1],
                num_pairs=sizes.pairs_C[number],
                choices_W=tuple(sizes.chosen_CW[number]) if sizes.chosen_CW else (),
                traffic=traffic,
                token_N=rows.token_N,
                choice_NJ=rows.choice_NJ,
                send=tuple(send_CW[number]),
                receive=tuple(receive_CW[number]),
                number=number,
                messages=messages,
            )
            routes.append(route)
        return routes

    def dispatch(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        self._send_rows(x_TH, route, "dispatch", CHOICE_BYTES)
        if route.number == 0:
            route.messages.send_choices()
        return Pending(partial(self._arrivals, x_TH, route))

    def _arrivals(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Arrivals:
        slot_RJ, weight_RJ = self._choices(route)
        return Arrivals(self._rows(x_TH, route, "dispatch"), slot_RJ, weight_RJ, route.num_pairs)

    def dispatch_tokens(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        """A dispatch whose choices travel apart. `wait()` gives the `HiddenStates`."""
        self._send_rows(x_TH, route, "dispatch", CHOICE_BYTES)
        return Pending(partial(self._rows, x_TH, route, "dispatch"))

    def exchange_choices(self, routes: Sequence[ExchangeRoute]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a dispatch brings beside the rows of each piece: slots and weights, (R, J)."""
        routes[0].messages.send_choices()
        return [self._choices(route) for route in routes]

    def _choices(self, route: ExchangeRoute) -> tuple[torch.Tensor, torch.Tensor]:
        packed_R2J = route.messages.take("choices", route.number)
        slot_RJ, weight_bits_RJ = packed_R2J.split(route.choices_per_send, dim=1)
        return slot_RJ.contiguous(), weight_bits_RJ.contiguous().view(torch.float32)

    def dispatch_again(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        self._send_rows(x_TH, route, "dispatch_again", 0)
        return Pending(partial(self._rows, x_TH, route, "dispatch_again"))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        route.backward = True
        self._send_rows(dy_TH, route, "combine_backward", 0)
        return Pending(partial(self._rows, dy_TH, route, "combine_backward"))

    def combine(self, route: ExchangeRoute, partial_RH: torch.Tensor) -> Pending:
        self._send_sums(partial_RH, route, "combine", 0)
        return Pending(partial(self._sums, partial_RH, route, "combine"))

    def combine_gradients(self, route: ExchangeRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        self._send_sums(dx_RH, route, "dispatch_backward", GRADIENT_BYTES)
        route.messages.put("gradients", route.number, dweight_RJ)
        return Pending(partial(self._gradients, dx_RH, route))

    def _gradients(self, dx_RH: torch.Tensor, route: ExchangeRoute) -> tuple[torch.Tensor, torch.Tensor]:
        dweight_NJ = route.messages.take("gradients", route.number)
        choices = route.num_tokens * route.top_k
        # Each choice is served in one place, so this is a permutation, plus a heap of empty entries at the end.
        flat = dweight_NJ.new_zeros(choices + 1)
        flat.scatter_(0, route.choice_NJ.reshape(-1), dweight_NJ.reshape(-1))
        dx_TH = self._sums(dx_RH, route, "dispatch_backward")
        return dx_TH, flat[:choices].view(route.num_tokens, route.top_k)

    # -- rows to experts, and sums back: each is encoded by the codec of its verb, but for those that stay ----------

    def _send_rows(self, x_TH: torch.Tensor, route: ExchangeRoute, verb: str, choice_bytes: int) -> None:
        codec = self._codec_of.get(verb)
        # A token is encoded once, however many rows copy it.
        rows_TH = x_TH if codec is None else codec.encode(x_TH)
        route.messages.put(verb, route.number, self.tokens_to_send(rows_TH, route))
        route.count("out", route.send, x_TH, choice_bytes, self.codecs)

    def _rows(self, x_TH: torch.Tensor, route: ExchangeRoute, verb: str) -> HiddenStates:
        rows_RH = route.messages.take(verb, route.number)
        if (codec := self._codec_of.get(verb)) is not None:
            rows_RH = codec.decode(rows_RH, x_TH.shape[1], x_TH.dtype)
            own_N = route.token_N[_share(route.send, self.rank)]
            rows_RH[_share(route.receive, self.rank)] = self.select_tokens(x_TH, own_N)
        return HiddenStates.of(rows_RH)

    def _send_sums(self, partial_RH: torch.Tensor, route: ExchangeRoute, verb: str, choice_bytes: int) -> None:
        codec = self._codec_of.get(verb)
        route.messages.put(verb, route.number, partial_RH if codec is None else codec.encode(partial_RH))
        route.count("back", route.receive, partial_RH, choice_bytes, self.codecs)

    def _sums(self, partial_RH: torch.Tensor, route: ExchangeRoute, verb: str) -> torch.Tensor:
        rows_NH = route.messages.take(verb, route.number)
        if (codec := self._codec_of.get(verb)) is not None:
            rows_NH = codec.decode(rows_NH, partial_RH.shape[1], partial_RH.dtype)
            rows_NH[_share(route.send, self.rank)] = partial_RH[_share(route.receive, self.rank)]
        return self.sum_returned(rows_NH, route)

    def _start(self, rows: torch.Tensor, send_W: Sequence[int], receive_W: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Start an all-to-all of rows: where they arrive, and what waits for them. None: they are there."""
        if self.num_ranks == 1:
            return rows, None
        out = rows.new_empty(sum(receive_W), *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows.contiguous(), list(receive_W), list(send_W), group=self.group, async_op=True
        )
        return out, work
