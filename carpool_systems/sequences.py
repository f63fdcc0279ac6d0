"""Which rank each sequence of a batch should be on, if every rank keeps as many as it has.

Experts stay where they are, and sequences go to where their tokens' experts are (NetMoE, ICLR 2025; LUFFY). This is a
transportation problem. Here ranks hand on sequences in cycles, as long as one of them lowers the cost:

    cost of            on rank 0   on rank 1         rank 0 hands a to rank 1      7 - 2 = 5 less
    sequence a (on 0)      7           2             rank 1 hands b to rank 0      4 - 3 = 1 less
    sequence b (on 1)      3           4             together a cycle that saves 6, and none saves more

When no cycle lowers the cost, none can: the assignment is optimal (Klein 1967). A sequence moves only if that lowers
the cost, so where nothing is gained all stay.

Whole sequences travel in one all-to-all, and their gradients back the same way:

    rank 0 has a b, rank 1 has c d; a goes to rank 1 and d to rank 0

    forward     rank 0: b d      rank 1: a c       ordered by the rank that they come from
    backward    rank 0: da db    rank 1: dc dd     gradients come back to where their sequences were

The order of the sequences of a rank means nothing; what belongs to them goes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from carpool.metrics.counters import Traffic
from carpool.metrics.host import to_device

Integers = npt.NDArray[np.int64]


def assign_sequences(cost_NW: Integers, rank_N: Integers) -> Integers:
    """(N,) the rank of each sequence, with as many sequences on each rank as in `rank_N`, of least total cost.

    Args:
        cost_NW: what each sequence costs on each rank, moving there included. Integers, so that all ranks of a group
            find the same.
        rank_N: where sequences are.
    """
    rank_N, every_N = rank_N.copy(), np.arange(len(rank_N))
    num_ranks = cost_NW.shape[1]
    while True:
        # The sequence that rank i hands to rank j at the least cost, and that cost.
        change_NW = cost_NW - cost_NW[every_N, rank_N][:, None]
        best_WW = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        change_WW = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        for rank in range(num_ranks):
            own = np.flatnonzero(rank_N == rank)
            if len(own):
                best_WW[rank] = own[change_NW[own].argmin(0)]
                change_WW[rank] = change_NW[best_WW[rank], np.arange(num_ranks)]
        cycle = _negative_cycle(change_WW)
        if not cycle:
            return rank_N
        for giver, taker in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            rank_N[best_WW[giver, taker]] = taker


def _negative_cycle(length_WW: Integers) -> list[int]:
    """The places of a cycle of negative length, in order, by Bellman and Ford; none: []."""
    num = len(length_WW)
    distance_W, before_W = np.zeros(num, dtype=np.int64), np.full(num, -1)
    for _ in range(num):
        through_WW = distance_W[:, None] + length_WW
        shorter_W = through_WW.min(0)
        changed_W = shorter_W < distance_W
        if not changed_W.any():
            return []
        before_W[changed_W] = through_WW.argmin(0)[changed_W]
        distance_W = np.minimum(distance_W, shorter_W)
    place = int(np.flatnonzero(changed_W)[0])
    for _ in range(num):  # now it is in a cycle
        place = int(before_W[place])
    cycle = [place]
    while (place := int(before_W[place])) != cycle[0]:
        cycle.append(place)
    return cycle[::-1]


@dataclass(frozen=True)
class SequenceMoves:
    """Which of this rank's sequences go where, and how many come.

    Attributes:
        group: whose ranks exchange sequences.
        order_B: own sequences in the order of the ranks that they go to.
        send_W, receive_W: sequences to and from each rank.
    """

    group: dist.ProcessGroup
    order_B: torch.Tensor
    send_W: tuple[int, ...]
    receive_W: tuple[int, ...]

    @classmethod
    def of(cls, to_WB: np.ndarray, group: dist.ProcessGroup, device: torch.device) -> SequenceMoves:
        """to_WB: the rank that each rank's sequences go to; on all ranks the same."""
        ranks, own = np.arange(len(to_WB)), dist.get_rank(group)
        order_B = to_device(np.argsort(to_WB[own], kind="stable").tolist(), device).long()
        sent_WW = (to_WB[:, :, None] == ranks).sum(1)
        return cls(group, order_B, tuple(sent_WW[own].tolist()), tuple(sent_WW[:, own].tolist()))

    def move(self, x_BL: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        """(B, L, ...) of the sequences that come, of those that this rank has. Differentiable. Collective."""
        moved: torch.Tensor = _Move.apply(x_BL, self, traffic)
        return moved

    def _exchange(self, x_BL: torch.Tensor, send_W: tuple[int, ...], receive_W: tuple[int, ...]) -> torch.Tensor:
        out_BL = x_BL.new_empty(sum(receive_W), *x_BL.shape[1:])
        dist.all_to_all_single(out_BL, x_BL.contiguous(), list(receive_W), list(send_W), group=self.group)
        return out_BL


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BL: torch.Tensor, moves: SequenceMoves, traffic: Traffic) -> torch.Tensor:
        ctx.moves, ctx.traffic = moves, traffic
        traffic.add("sequences", moves.send_W, x_BL[0].numel() * x_BL.element_size())
        return moves._exchange(x_BL[moves.order_B], moves.send_W, moves.receive_W)

    @staticmethod
    def backward(ctx: Any, dy_BL: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        moves: SequenceMoves = ctx.moves
        ctx.traffic.add("sequences_backward", moves.receive_W, dy_BL[0].numel() * dy_BL.element_size())
        sorted_BL = moves._exchange(dy_BL, moves.receive_W, moves.send_W)
        return torch.empty_like(sorted_BL).index_copy_(0, moves.order_B, sorted_BL), None, None
