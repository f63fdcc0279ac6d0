"""Whole sequences travel to other ranks, and their gradients back.

    rank 0 has a b, rank 1 has c d; a goes to rank 1 and d to rank 0

    forward     rank 0: b d      rank 1: a c       ordered by the rank that they come from
    backward    rank 0: da db    rank 1: dc dd     gradients come back to where their sequences were

All in one all-to-all. The order of the sequences of a rank means nothing; what belongs to them goes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from carpool.metrics.counters import Traffic
from carpool.metrics.host import to_device


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
