"""All-gather of all tokens: the reference for the other transports.

All tokens, slots and weights are gathered on every rank; each rank computes the tokens that chose its slots; the
partial outputs are sent back to the tokens' ranks and added in rank order. The dispatch selects, sorts and counts
nothing, so it is easily correct: the other transports are tested against it. Shapes are static when all ranks have
equally many tokens (others are padded to the largest number), and only the largest number is exchanged.

    rank 0 has tokens a, b; rank 1 has c          every rank receives [a, b | c, -]; `-` is padding without choices

The dispatch is counted as a ring, like the all-gathers of gloo and NCCL: each rank sends W - 1 blocks to the next one,
and of a node only its last rank sends to another node. (With several adapters NCCL makes several such rings, which
leave a node from other ranks.) Partial outputs come back by an all-to-all.

Cost per token: W - 1 sends to other ranks each way, whatever was chosen. That is less than one send per expert when K
is larger than W, which is why MegaScale-MoE (arXiv 2505.11432, section 4) uses it for large top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.activations import Arrivals, HiddenStates
from carpool.kernels.device import ordered_sum
from carpool.layout.topology import Topology
from carpool.metrics.counters import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Pending, Route, Transport
from carpool.transport.volume import Counts, Volume

COUNT_BYTES = 8


@dataclass(kw_only=True)
class GatherRoute(Route):
    padded_tokens: int
    slot_RK: torch.Tensor
    weight_RK: torch.Tensor


class Gather(Transport):
    """Sends all tokens to all ranks; J = K."""

    name = "gather"
    plan_bytes = COUNT_BYTES

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        padded_tokens, num_ranks = max(map(len, rank_TK)), topology.num_ranks
        return np.array([_around(padded_tokens, rank, num_ranks) for rank in range(num_ranks)], dtype=np.int64)

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
        volume = super().volume(rank_TK, topology, top_k, hidden, element_size, options)
        own = {verb: volume.bytes_WW[verb].diagonal() for verb in ("combine", "dispatch_backward")}
        back = {verb: np.tile(own_W, (topology.num_ranks, 1)) for verb, own_W in own.items()}
        return replace(volume, bytes_WW={**volume.bytes_WW, **back})

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return float(num_ranks)

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> GatherRoute:
        num_tokens, top_k = slot_TK.shape
        most = torch.tensor([num_tokens], device=slot_TK.device)
        if self.num_ranks > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        padded_tokens = int(most.item())
        traffic.add("plan", [1] * self.num_ranks, COUNT_BYTES)
        padding = (0, 0, 0, padded_tokens - num_tokens)
        slot_RK = self._gather(F.pad(slot_TK, padding, value=-1))
        weight_RK = self._gather(F.pad(weight_TK.float(), padding))
        rank_RK = slot_RK.div(self.slots_per_rank, rounding_mode="floor")
        mine_RK = rank_RK == self.rank
        own = slice(self.rank * padded_tokens, (self.rank + 1) * padded_tokens)
        ranks_W = torch.arange(self.num_ranks, device=slot_TK.device)
        choices_W = (rank_RK[own].reshape(-1, 1) == ranks_W).sum(0)
        return GatherRoute(
            num_tokens=num_tokens,
            top_k=top_k,
            num_rows=self.num_ranks * padded_tokens,
            choices_per_send=top_k,
            num_pairs=int(mine_RK.sum().item()),
            choices_W=tuple(choices_W.tolist()),
            traffic=traffic,
            padded_tokens=padded_tokens,
            slot_RK=torch.where(mine_RK, slot_RK % self.slots_per_rank, -1).int(),
            weight_RK=weight_RK.masked_fill(~mine_RK, 0.0),
        )

    def dispatch(self, x_TH: torch.Tensor, route: GatherRoute) -> Pending:
        x_RH = self._gather(F.pad(x_TH, (0, 0, 0, route.padded_tokens - route.num_tokens)))
        route.count("out", _around(route.padded_tokens, self.rank, self.num_ranks), x_TH, CHOICE_BYTES)
        return Pending(lambda: Arrivals(HiddenStates.of(x_RH), route.slot_RK, route.weight_RK, route.num_pairs))

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: GatherRoute) -> Pending:
        route.backward = True
        dpartial_RH = self._gather(F.pad(dy_TH, (0, 0, 0, route.padded_tokens - route.num_tokens)))
        route.count("out", _around(route.padded_tokens, self.rank, self.num_ranks), dy_TH, 0)
        return Pending(lambda: HiddenStates.of(dpartial_RH))

    def combine(self, route: GatherRoute, partial_RH: torch.Tensor) -> Pending:
        return self._combine(route, partial_RH, 0)

    def _combine(self, route: GatherRoute, partial_RH: torch.Tensor, choice_bytes: int) -> Pending:
        route.count("back", [route.padded_tokens] * self.num_ranks, partial_RH, choice_bytes)
        return Pending(lambda: self._sum_at_home(partial_RH, route))

    def combine_gradients(self, route: GatherRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        dx = self._combine(route, dx_RH, GRADIENT_BYTES)
        return Pending(lambda: (dx.wait(), self._sum_at_home(dweight_RJ, route)))

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        """(T', ...) of each rank -> (W * T', ...) of all, in rank order."""
        if self.num_ranks == 1:
            return rows
        out = rows.new_empty(self.num_ranks * rows.shape[0], *rows.shape[1:])
        # Newer torch calls it all_gather_single and warns whoever uses the name that torch 2.11 knows.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(out, rows.contiguous(), group=self.group)
        return out

    def _sum_at_home(self, partial_RH: torch.Tensor, route: GatherRoute) -> torch.Tensor:
        """Send partial outputs to the ranks of their tokens, and add them there in rank order."""
        if self.num_ranks > 1:
            back = torch.empty_like(partial_RH)
            dist.all_to_all_single(back, partial_RH.contiguous(), group=self.group)
        else:
            back = partial_RH
        token_N = torch.arange(route.padded_tokens, device=back.device).repeat(self.num_ranks)
        return ordered_sum(back, token_N, route.padded_tokens)[: route.num_tokens]


def _around(rows: int, rank: int, num_ranks: int) -> list[int]:
    """Tokens that a rank sends to each rank in a ring: all blocks but one, to the next rank."""
    sent = [0] * num_ranks
    sent[(rank + 1) % num_ranks] = (num_ranks - 1) * rows
    sent[rank] = rows
    return sent
