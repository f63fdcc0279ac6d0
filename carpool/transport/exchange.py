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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from carpool.memory.arena import Arena, Rows
from carpool.numbered import Numbered
from carpool.ordered_sum import ordered_sum
from carpool.stats import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Arrivals, Pending, Route

# Each rank tells each other how many rows and how many (row, slot) pairs will come: two int64.
COUNT_BYTES = 16
# What is left to NCCL's channels, which take a multiprocessor each: an estimate, not measured.
NCCL_PROCESSORS = 16


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
    token_N: torch.Tensor
    choice_NJ: torch.Tensor
    slot_NJ: torch.Tensor
    weight_NJ: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]


class ExchangeTransport(Numbered):
    """Base of the transports that send lists of rows; see the module's docstring.

    Args:
        group: the expert-parallel process group, or None for a single rank.
        slots_per_rank: S of the layout, to tell rank and slot apart in a global slot id.
    """

    name = "exchange"
    arena: Arena | None = None
    sends_again = False

    def __init__(self, group: dist.ProcessGroup | None, slots_per_rank: int) -> None:
        self.group = group
        self.slots_per_rank = slots_per_rank
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    @property
    def processors(self) -> int:
        return NCCL_PROCESSORS if self.num_ranks > 1 and dist.get_backend(self.group) == "nccl" else 0

    def count_rows(self, here_WTK: torch.Tensor) -> torch.Tensor:
        """(W,) rows to each rank, from (W, T, K) bool: whether a choice is on a rank."""
        raise TypeError(f"{type(self).__name__} does not say how many rows to send")

    def list_rows(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> RowsToSend:
        """Which rows go where; `num_rows` is the sum of what `count_rows` said."""
        raise TypeError(f"{type(self).__name__} does not say which rows to send")

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> ExchangeRoute:
        rank_TK = slot_TK.div(self.slots_per_rank, rounding_mode="floor")  # -1 stays -1
        here_WTK = rank_TK == torch.arange(self.num_ranks, device=slot_TK.device).view(-1, 1, 1)
        counts_W2 = torch.stack([self.count_rows(here_WTK), here_WTK.sum((1, 2))], dim=1)
        received_W2 = counts_W2
        if self.num_ranks > 1:
            received_W2 = torch.empty_like(counts_W2)
            dist.all_to_all_single(received_W2, counts_W2, group=self.group)
        # The one place where the host waits for the device.
        send, choices, receive, pairs = torch.cat([counts_W2, received_W2], dim=1).t().tolist()
        traffic.add("plan", [1] * self.num_ranks, COUNT_BYTES)
        rows = self.list_rows(slot_TK, here_WTK, sum(send))
        # One place more than there are choices: the empty entries point at it.
        padded = torch.cat([weight_TK.reshape(-1), weight_TK.new_zeros(1)])
        return ExchangeRoute(
            num_tokens=slot_TK.shape[0],
            top_k=slot_TK.shape[1],
            num_rows=sum(receive),
            choices_per_row=rows.slot_NJ.shape[1],
            num_pairs=sum(pairs),
            choices_W=tuple(choices),
            traffic=traffic,
            token_N=rows.token_N,
            choice_NJ=rows.choice_NJ,
            slot_NJ=rows.slot_NJ,
            weight_NJ=padded[rows.choice_NJ].float(),
            send=tuple(send),
            receive=tuple(receive),
        )

    def dispatch(self, x_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        rows = self._start(x_TH[route.token_N], route.send, route.receive)
        # Slots and weights share one message: the weights' bits, seen as integers.
        packed_N2J = torch.cat([route.slot_NJ, route.weight_NJ.view(torch.int32)], dim=1)
        choices = self._start(packed_N2J, route.send, route.receive)
        width = route.slot_NJ.shape[1]
        route.count("out", route.send, x_TH, CHOICE_BYTES)

        def finish() -> Arrivals:
            slot_RJ, weight_bits_RJ = choices().split(width, dim=1)
            weight_RJ = weight_bits_RJ.contiguous().view(torch.float32)
            return Arrivals(rows(), slot_RJ.contiguous(), weight_RJ, route.num_pairs)

        return Pending(finish)

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: ExchangeRoute) -> Pending:
        route.backward = True
        rows = self._start(dy_TH[route.token_N], route.send, route.receive)
        route.count("out", route.send, dy_TH, 0)
        return Pending(lambda: Rows.of(rows()))

    def combine(self, route: ExchangeRoute) -> Pending:
        return self._combine(route, 0)

    def _combine(self, route: ExchangeRoute, choice_bytes: int) -> Pending:
        assert route.partial_RH is not None
        partial_RH, route.partial_RH = route.partial_RH, None
        rows = self._start(partial_RH, route.receive, route.send)
        route.count("back", route.receive, partial_RH, choice_bytes)
        return Pending(lambda: ordered_sum(rows(), route.token_N, route.num_tokens))

    def combine_gradients(self, route: ExchangeRoute, dweight_RJ: torch.Tensor) -> Pending:
        dx = self._combine(route, GRADIENT_BYTES)
        dweights = self._start(dweight_RJ.contiguous(), route.receive, route.send)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            dweight_NJ = dweights()
            choices = route.num_tokens * route.top_k
            # Each choice is served in one place, so this is a permutation, plus a heap of empty entries at the end.
            flat = dweight_NJ.new_zeros(choices + 1)
            flat.scatter_(0, route.choice_NJ.reshape(-1), dweight_NJ.reshape(-1))
            return dx.wait(), flat[:choices].view(route.num_tokens, route.top_k)

        return Pending(finish)

    def discard(self, route: ExchangeRoute, x_TH: torch.Tensor) -> Pending:
        return Pending(lambda: None)  # nothing is held

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
