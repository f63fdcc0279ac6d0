"""A transport for one rank: rows are where they are. So a ride is the experts and what is around them, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from carpool.layout.topology import Topology
from carpool.memory import Arena, Rows
from carpool.observe.traffic import Traffic
from carpool.transport import Arrivals, Pending, Route, Transport
from carpool.transport.volume import Counts, one_row_per_rank


@dataclass(kw_only=True)
class HomeRoute(Route):
    slot_TK: torch.Tensor
    weight_TK: torch.Tensor


class Home(Transport):
    """Every slot is on this rank, and every token chooses K of them. The host never waits."""

    name = "home"
    arena: Arena | None = None

    @classmethod
    def rows_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        return one_row_per_rank(rank_TK, topology.num_ranks)

    @classmethod
    def copies_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return 1.0

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> HomeRoute:
        tokens, top_k = slot_TK.shape
        return HomeRoute(
            num_tokens=tokens,
            top_k=top_k,
            num_rows=tokens,
            choices_per_row=top_k,
            num_pairs=tokens * top_k,
            traffic=traffic,
            slot_TK=slot_TK,
            weight_TK=weight_TK,
        )

    def dispatch(self, x_TH: torch.Tensor, route: HomeRoute) -> Pending:
        # Every row is wanted, so no sum has to be made zero.
        rows = Rows(x_TH, x_TH.shape[1], gaps=True)
        return Pending(lambda: Arrivals(rows, route.slot_TK, route.weight_TK, route.num_pairs))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: HomeRoute) -> Pending:
        return Pending(lambda: Rows.of(dy_TH))

    def combine(self, route: HomeRoute, partial_RH: torch.Tensor) -> Pending:
        return Pending(lambda: partial_RH)

    def combine_gradients(self, route: HomeRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        return Pending(lambda: (dx_RH, dweight_RJ))
