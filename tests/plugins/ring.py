"""A transport outside the package, in one file: every row goes round a ring of ranks, and so do the sums.

    rank 0 -> rank 1 -> ... -> rank W-1 -> rank 0        the other way round with `reverse`

Cost: (W - 1) times a rank's rows from each rank to the next one, whatever was chosen; nothing to any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.metrics.counters import Traffic
from carpool.transport import Arrivals, HiddenStates, Pending, Route, Transport, TransportOptions, register
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES
from carpool.transport.volume import Counts, Volume


@dataclass(frozen=True)
class RingOptions(TransportOptions):
    reverse: bool = False


@dataclass(kw_only=True)
class RingRoute(Route):
    length: int
    slot_RK: torch.Tensor
    weight_RK: torch.Tensor


@register
class Ring(Transport):
    """Rows of all ranks on every rank, in rank order, padded to the longest rank; J = K."""

    name = "ring"
    options_class = RingOptions
    plan_bytes = 8

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        num_ranks = topology.num_ranks
        longest = max(len(ranks) for ranks in rank_TK)
        to_next = np.roll(np.eye(num_ranks, dtype=np.int64), 1, axis=1)
        return longest * (np.eye(num_ranks, dtype=np.int64) + (num_ranks - 1) * to_next) if num_ranks > 1 else (
            np.full((1, 1), longest))  # fmt: skip

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return float(num_ranks)

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
        there, reverse = super().volume(rank_TK, topology, top_k, hidden, element_size, options), False
        if options is not None:
            reverse = options.reverse
        # Sums go on in the same direction, not back.
        bytes_WW = {verb: size.T if (verb in ("combine", "dispatch_backward")) != reverse else size
                    for verb, size in there.bytes_WW.items()}  # fmt: skip
        return Volume(there.transport, there.tokens_W, there.rows_WW.T if reverse else there.rows_WW, bytes_WW)

    def __init__(self, group: dist.ProcessGroup | None, slots_per_rank: int, options: RingOptions) -> None:
        super().__init__(group, slots_per_rank)
        self.ahead = -1 if options.reverse else 1

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> RingRoute:
        longest = torch.tensor([len(slot_TK)])
        if self.group is not None:
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        traffic.add("plan", [1] * self.num_ranks, self.plan_bytes)
        length, padding = int(longest), (0, 0, 0, int(longest) - len(slot_TK))
        slot_RK = self._around(torch.nn.functional.pad(slot_TK, padding, value=-1))
        mine_RK = slot_RK.div(self.slots_per_rank, rounding_mode="floor") == self.rank
        weight_RK = self._around(torch.nn.functional.pad(weight_TK.float(), padding)).masked_fill(~mine_RK, 0.0)
        ranks_W = torch.arange(self.num_ranks)
        choices_W = (slot_TK.div(self.slots_per_rank, rounding_mode="floor").reshape(-1, 1) == ranks_W).sum(0)
        return RingRoute(
            num_tokens=len(slot_TK), top_k=slot_TK.shape[1], num_rows=self.num_ranks * length,
            choices_per_send=slot_TK.shape[1], num_pairs=int(mine_RK.sum()), choices_W=tuple(choices_W.tolist()),
            traffic=traffic, length=length, weight_RK=weight_RK,
            slot_RK=torch.where(mine_RK, slot_RK % self.slots_per_rank, -1).int(),
        )  # fmt: skip

    def dispatch(self, x_TH: torch.Tensor, route: RingRoute) -> Pending:
        x_RH = self._rows(x_TH, route, CHOICE_BYTES)
        return Pending(lambda: Arrivals(HiddenStates.of(x_RH), route.slot_RK, route.weight_RK, route.num_pairs))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: RingRoute) -> Pending:
        route.backward = True
        dpartial_RH = self._rows(dy_TH, route, 0)
        return Pending(lambda: HiddenStates.of(dpartial_RH))

    def combine(self, route: RingRoute, partial_RH: torch.Tensor) -> Pending:
        y_TH = self._sums(route, partial_RH, 0)
        return Pending(lambda: y_TH)

    def combine_gradients(self, route: RingRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        dx_TH, dweight_TK = self._sums(route, dx_RH, GRADIENT_BYTES), self._home(dweight_RJ, route)
        return Pending(lambda: (dx_TH, dweight_TK))

    def _rows(self, x_TH: torch.Tensor, route: RingRoute, choice_bytes: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(x_TH, (0, 0, 0, route.length - route.num_tokens))
        route.count("out", self._counts(route), x_TH, choice_bytes)
        return self._around(padded)

    def _sums(self, route: RingRoute, partial_RH: torch.Tensor, choice_bytes: int) -> torch.Tensor:
        route.count("back", self._counts(route), partial_RH, choice_bytes)
        return self._home(partial_RH, route)

    def _counts(self, route: RingRoute) -> list[int]:
        counts = [0] * self.num_ranks
        counts[(self.rank + self.ahead) % self.num_ranks] += (self.num_ranks - 1) * route.length
        counts[self.rank] += route.length
        return counts

    def _around(self, mine: torch.Tensor) -> torch.Tensor:
        """Everybody's, in rank order: W - 1 times, what came last goes on to the next rank."""
        parts = [mine] * self.num_ranks
        for step in range(1, self.num_ranks):
            parts[(self.rank - self.ahead * step) % self.num_ranks] = mine = self._pass_on(mine)
        return torch.cat(parts)

    def _home(self, partial_RH: torch.Tensor, route: RingRoute) -> torch.Tensor:
        """The sums of the own tokens: each block goes round once and collects what every rank has made of it."""
        blocks = list(partial_RH.float().split(route.length)) if route.length else [partial_RH.float()]
        blocks *= 1 if route.length else self.num_ranks
        total = blocks[(self.rank - self.ahead) % self.num_ranks]
        for step in range(2, self.num_ranks + 1):
            total = self._pass_on(total) + blocks[(self.rank - self.ahead * step) % self.num_ranks]
        return total[: route.num_tokens]

    def _pass_on(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows to the next rank, get as many from the one before."""
        out, there, back = torch.empty_like(rows), [0] * self.num_ranks, [0] * self.num_ranks
        there[(self.rank + self.ahead) % self.num_ranks] = back[(self.rank - self.ahead) % self.num_ranks] = len(rows)
        dist.all_to_all_single(out, rows.contiguous(), back, there, group=self.group)
        return out
