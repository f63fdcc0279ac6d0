"""All-to-alls of `torch.distributed`: the base of the `alltoall` and `dedup` transports.

Both send a list of hidden states, sorted by destination, with one all-to-all of uneven sizes, and receive one partial
output for each. They differ only in the list: a subclass defines how many entries go to each rank, and which.

    sender                                      receiver
    token_N    the token of each entry          entries arrive in order of the sending rank, then of its list
    sent_W     entries to each rank, in order   slot_NJ / weight_NJ are sent with them
    choice_NJ  which of the T*K choices each    and their gradients return to the same places
               of its J columns stands for

The host must know the sizes before an all-to-all, so `plan` exchanges counts and reads them back: one host
synchronisation per layer on CUDA. NCCL requires it; transports that write into peers' memory do not.

A ride in chunks has several pieces (`carpool.ride.chunks`), any other ride one. The pieces of a ride share small
messages: one for all counts, one for all slots and weights, and in the backward one for all gradients of weights. The
schedule says how many neighbouring pieces share a message of hidden states. To each rank, for four pieces and two per
message in the forward:

    counts [pieces 0 1 2 3]     choices [pieces 0 1 2 3]     tokens [pieces 0 1]     tokens [pieces 2 3]
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

# Each rank sends each other one the number of tokens and of (token, slot) pairs of a piece: two int64.
COUNT_BYTES = 16
# Why `Codecs.hop` cannot be "nodes".
ONE_HOP = "it sends over one hop, and inter_node='nodes' is for transports with two: leave inter_node at 'all'"
# Multiprocessors reserved for NCCL's channels, which take one each: an estimate, not measured.
NCCL_PROCESSORS = 16


PieceCounts = Sequence[Sequence[int]]


class Sizes(NamedTuple):
    """For each piece: tokens to and from each rank, choices of this rank's tokens on each rank (empty: only the device
    knows them), and the (token, slot) pairs that arrive."""

    send_CW: PieceCounts
    receive_CW: PieceCounts
    chosen_CW: PieceCounts
    pairs_C: Sequence[int]


@dataclass
class SendList:
    """The entries that a rank sends, sorted by destination.

    Attributes:
        token_N: (N,) int64, the token of each entry.
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
    send, receive: entries to and from each rank.
    number: of the piece in its ride, in the order of dispatch.
    """

    token_N: torch.Tensor
    choice_NJ: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    number: int
    messages: Messages


class Messages:
    """The messages of one ride. Each contains some neighbouring pieces, and is sent when all of them were given.

    The kind of a message is a verb of `carpool.metrics.counters.VERBS` (hidden states), "dispatch_again" (tokens that
    are sent again for the backward), "choices" (slots and weights) or "gradients" (of weights).

    Args:
        start: starts an all-to-all, as `ExchangeTransport._start`.
        send_CW, receive_CW: for each piece, entries of the dispatch to each rank, and from each rank.
        together: pieces that share a message of hidden states, in the forward and in the backward.

    Attributes:
        choices: for each piece, slots and weights of its entries.
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
        # For each kind of message: its number of pieces, and whether it goes to experts.
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
        """Send the weights' gradients of each piece in a message of its own, for callers that wait for one piece before
        they have computed the next."""
        self._kinds["gradients"] = 1, False

    def send_choices(self) -> None:
        """Send the choices of all pieces."""
        for piece, packed in enumerate(self.choices):
            self.put("choices", piece, packed)

    def put(self, kind: str, piece: int, rows: torch.Tensor) -> None:
        """Add a piece, sorted by destination, to its message. The last piece starts the message."""
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
        """Wait for the message of a piece, and return the piece, sorted by source. To be called once per piece."""
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
    """The range of one rank in a list that is sorted by rank."""
    first = sum(rows_W[:rank])
    return slice(first, first + rows_W[rank])


def _by_rank(pieces: Sequence[torch.Tensor], sizes_CW: PieceCounts) -> torch.Tensor:
    """Merge pieces that are sorted by rank into one list, sorted by rank, then by piece."""
    if len(pieces) == 1:
        return pieces[0]
    blocks = [piece.split(list(sizes)) for piece, sizes in zip(pieces, sizes_CW, strict=True)]
    return torch.cat([block for of_rank in zip(*blocks, strict=True) for block in of_rank])


class ExchangeTransport(Transport):
    """Base class of transports over all-to-alls; see the module's docstring."""

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
        """(W,) entries to each rank, from (W, T, K) bool: whether a choice is on a rank."""

    @abstractmethod
    def list_sends(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> SendList:
        """The list of entries; `num_rows` is the sum of `count_sends`."""

    def whether_here(self, slot_C: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each piece, (W, T, K) bool: whether a choice is on a rank."""
        ranks_W11 = torch.arange(self.num_ranks, device=slot_C[0].device).view(-1, 1, 1)
        # -1 stays -1.
        return [slot_TK.div(self.slots_per_rank, rounding_mode="floor") == ranks_W11 for slot_TK in slot_C]

    def select_tokens(self, x_TH: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        """(N, H) the hidden states of these tokens. Subclasses may use the number T for padding."""
        return x_TH[token_N]

    def tokens_to_send(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        """(N, H) the hidden states of all entries."""
        return x_TH[route.token_N]

    def sum_returned(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        """(T, H) float32: for each token, the sum of the partial outputs that its entries returned."""
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
        """The routes of pieces whose sizes are known. here_C: for each, (W, T, K), whether a choice is on a rank."""
        send_CW, receive_CW = sizes.send_CW, sizes.receive_CW
        messages = Messages(self._start, send_CW, receive_CW, together)
        routes: list[ExchangeRoute] = []
        for number, (slot_TK, weight_TK) in enumerate(zip(slot_C, weight_C, strict=True)):
            rows = self.list_sends(slot_TK, here_C[number], sum(send_CW[number]))
            # One more than there are choices: columns without a choice point at it.
            padded = torch.cat([weight_TK.reshape(-1), weight_TK.new_zeros(1)])
            weight_NJ = padded[rows.choice_NJ].float()
            # Weights are sent with the slots, viewed as integers.
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
        self._send_tokens(x_TH, route, "dispatch", CHOICE_BYTES)
        if route.number == 0:
            route.messages.send_choices()
        return Pending(partial(self._arrivals, x_TH, route))

    def _arrivals(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Arrivals:
        slot_RJ, weight_RJ = self._choices(route)
        return Arrivals(self._received_tokens(x_TH, route, "dispatch"), slot_RJ, weight_RJ, route.num_pairs)

    def dispatch_tokens(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        """A dispatch whose choices are sent separately. `wait()` gives the `HiddenStates`."""
        self._send_tokens(x_TH, route, "dispatch", CHOICE_BYTES)
        return Pending(partial(self._received_tokens, x_TH, route, "dispatch"))

    def exchange_choices(self, routes: Sequence[ExchangeRoute]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each piece, the slots and weights of the tokens that arrive: (R, J)."""
        routes[0].messages.send_choices()
        return [self._choices(route) for route in routes]

    def _choices(self, route: ExchangeRoute) -> tuple[torch.Tensor, torch.Tensor]:
        packed_R2J = route.messages.take("choices", route.number)
        slot_RJ, weight_bits_RJ = packed_R2J.split(route.choices_per_send, dim=1)
        return slot_RJ.contiguous(), weight_bits_RJ.contiguous().view(torch.float32)

    def dispatch_again(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        self._send_tokens(x_TH, route, "dispatch_again", 0)
        return Pending(partial(self._received_tokens, x_TH, route, "dispatch_again"))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        route.backward = True
        self._send_tokens(dy_TH, route, "combine_backward", 0)
        return Pending(partial(self._received_tokens, dy_TH, route, "combine_backward"))

    def combine(self, route: ExchangeRoute, partial_RH: torch.Tensor) -> Pending:
        self._send_partial(partial_RH, route, "combine", 0)
        return Pending(partial(self._combined, partial_RH, route, "combine"))

    def combine_gradients(self, route: ExchangeRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        self._send_partial(dx_RH, route, "dispatch_backward", GRADIENT_BYTES)
        route.messages.put("gradients", route.number, dweight_RJ)
        return Pending(partial(self._gradients, dx_RH, route))

    def _gradients(self, dx_RH: torch.Tensor, route: ExchangeRoute) -> tuple[torch.Tensor, torch.Tensor]:
        dweight_NJ = route.messages.take("gradients", route.number)
        choices = route.num_tokens * route.top_k
        # Each choice is served in one place, so this is a permutation, plus columns without a choice at the end.
        flat = dweight_NJ.new_zeros(choices + 1)
        flat.scatter_(0, route.choice_NJ.reshape(-1), dweight_NJ.reshape(-1))
        dx_TH = self._combined(dx_RH, route, "dispatch_backward")
        return dx_TH, flat[:choices].view(route.num_tokens, route.top_k)

    # -- dispatch and combine of hidden states: encoded by the codec of the verb, unless they stay on their rank ------

    def _send_tokens(self, x_TH: torch.Tensor, route: ExchangeRoute, verb: str, choice_bytes: int) -> None:
        codec = self._codec_of.get(verb)
        # A token is encoded once, however often it is sent.
        rows_TH = x_TH if codec is None else codec.encode(x_TH)
        route.messages.put(verb, route.number, self.tokens_to_send(rows_TH, route))
        route.count("out", route.send, x_TH, choice_bytes, self.codecs)

    def _received_tokens(self, x_TH: torch.Tensor, route: ExchangeRoute, verb: str) -> HiddenStates:
        rows_RH = route.messages.take(verb, route.number)
        if (codec := self._codec_of.get(verb)) is not None:
            rows_RH = codec.decode(rows_RH, x_TH.shape[1], x_TH.dtype)
            own_N = route.token_N[_share(route.send, self.rank)]
            rows_RH[_share(route.receive, self.rank)] = self.select_tokens(x_TH, own_N)
        return HiddenStates.of(rows_RH)

    def _send_partial(self, partial_RH: torch.Tensor, route: ExchangeRoute, verb: str, choice_bytes: int) -> None:
        codec = self._codec_of.get(verb)
        route.messages.put(verb, route.number, partial_RH if codec is None else codec.encode(partial_RH))
        route.count("back", route.receive, partial_RH, choice_bytes, self.codecs)

    def _combined(self, partial_RH: torch.Tensor, route: ExchangeRoute, verb: str) -> torch.Tensor:
        rows_NH = route.messages.take(verb, route.number)
        if (codec := self._codec_of.get(verb)) is not None:
            rows_NH = codec.decode(rows_NH, partial_RH.shape[1], partial_RH.dtype)
            rows_NH[_share(route.send, self.rank)] = partial_RH[_share(route.receive, self.rank)]
        return self.sum_returned(rows_NH, route)

    def _start(self, rows: torch.Tensor, send_W: Sequence[int], receive_W: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Start an all-to-all: the receive buffer, and the work to wait for. None: it is complete."""
        if self.num_ranks == 1:
            return rows, None
        out = rows.new_empty(sum(receive_W), *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows.contiguous(), list(receive_W), list(send_W), group=self.group, async_op=True
        )
        return out, work
