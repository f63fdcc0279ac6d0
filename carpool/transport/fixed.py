"""Rows to every rank, a fixed number of them: no counts.

A rank sends another at most one row for each of its tokens. So it sends them all, token i as row i, filled up to the
largest number of tokens of any rank, and nobody has to be told how many come:

    3 tokens, room for 4, 2 ranks; tokens 0 and 2 chose experts on rank 1

        rank 0 (own)    x_0  x_1  x_2          does not travel
        rank 1          x_0  x_1  x_2  -       its slots are [4, .], [-1, -1], [9, .], [-1, -1]

Nothing is exchanged but rows and choices, the host waits for nothing, and shapes are static. The price is rows that
nobody reads. If K experts of many are chosen uniformly from N ranks, the share (1 - 1/N)^K of them is empty: with K = 8
0.4 % for 2 ranks, 10 % for 4. Placement makes it larger.

So there may be room for fewer rows than tokens (`carpool.transport.room`). Then those of the tokens that chose experts
there travel, in order, and the rest of the room is filled up with any row, or zeros:

    room for 2      rank 1          x_0  x_2       its slots are [4, .], [9, .]

If more are needed than there is room for, the weights of all of this rank's tokens are NaN, and so are its sums. Output
and gradients do not depend on how much room there is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.metrics.counters import Traffic
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import ExchangeRoute, RowsToSend, Sizes
from carpool.transport.options import TransportOptions
from carpool.transport.room import NodeRoom


class FixedRows(Dedup):
    """`Dedup` without counts: equally many rows to each other rank of the group.

    Args:
        options: say `max_tokens`, the same on all ranks.
        room: for how many rows; None: for all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots_per_rank: int,
        options: TransportOptions,
        room: NodeRoom | None = None,
    ) -> None:
        super().__init__(group, slots_per_rank, options)
        assert options.max_tokens is not None
        self.room = NodeRoom(options.max_tokens) if room is None else room

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[ExchangeRoute]:
        """Raises:
        ValueError: more tokens than were said."""
        tokens, pieces, room = sum(len(slot_TK) for slot_TK in slot_C), len(slot_C), self.room
        if tokens > room.most:
            raise ValueError(
                f"{tokens} tokens on this rank, but at most max_tokens={room.most} were said, and all ranks "
                "count on it: state the largest number that any rank will have"
            )
        here_C = self.whether_here(slot_C)
        if room.counted and self.num_ranks > 1:
            rows_CW = torch.stack([self.count_rows(here_WTK) for here_WTK in here_C])
            others = rows_CW[:, : self.rank], rows_CW[:, self.rank + 1 :]
            lost = room.note(torch.cat(others, dim=1).max(), pieces)
            weight_C = [torch.where(lost, torch.nan, weight_TK) for weight_TK in weight_C]
        size_CW = [[room.of_piece(pieces)] * self.num_ranks for _ in slot_C]
        for size_W, slot_TK in zip(size_CW, slot_C, strict=True):
            size_W[self.rank] = len(slot_TK)
        pairs_C = [sum(size_W) * slot_TK.shape[1] for size_W, slot_TK in zip(size_CW, slot_C, strict=True)]
        return self._routes(slot_C, weight_C, here_C, Sizes(size_CW, size_CW, (), pairs_C), traffic, together)

    def list_rows(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> RowsToSend:
        num_tokens, top_k = slot_TK.shape
        most = (num_rows - num_tokens) // max(1, self.num_ranks - 1)
        every_T = torch.arange(num_tokens, device=slot_TK.device)
        token_W = [
            every_T if rank == self.rank else self._tokens(here_TK.any(-1), most)
            for rank, here_TK in enumerate(here_WTK)
        ]
        # One more for each rank: of places without a token.
        slot_WTK = F.pad(torch.where(here_WTK, slot_TK % self.slots_per_rank, -1), (0, 0, 0, 1), value=-1)
        place_N = torch.cat([token_R + rank * (num_tokens + 1) for rank, token_R in enumerate(token_W)])
        token_N, slot_NJ = torch.cat(token_W), slot_WTK.flatten(0, 1)[place_N].int()
        choice_NJ = token_N.unsqueeze(1) * top_k + torch.arange(top_k, device=slot_TK.device)
        return RowsToSend(token_N, slot_NJ, torch.where(slot_NJ < 0, num_tokens * top_k, choice_NJ))

    def _tokens(self, wanted_T: torch.Tensor, most: int) -> torch.Tensor:
        """(most,) the token of each row to another rank, T where there is none."""
        num_tokens = len(wanted_T)
        token_T = torch.arange(num_tokens, device=wanted_T.device)
        if most >= num_tokens:
            return F.pad(token_T, (0, most - num_tokens), value=num_tokens)
        place_T = torch.where(wanted_T, wanted_T.cumsum(0) - 1, most).clamp(max=most)
        return token_T.new_full((most + 1,), num_tokens).scatter_(0, place_T, token_T)[:most]

    def copy_rows(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        return _one_more(x_TH, 0)[route.token_N]

    def sum_rows(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        first, *others = (
            _of_tokens(block_RH, token_R, route.num_tokens)
            for block_RH, token_R in zip(
                rows_NH.split(list(route.send)), route.token_N.split(list(route.send)), strict=True
            )
        )
        total_TH = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for block_TH in others:
            total_TH += block_TH
        return total_TH


def _one_more(rows: torch.Tensor, value: int) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, 1), value=value)


def _of_tokens(block_RH: torch.Tensor, token_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T, H) the row of each token, zero where it has none."""
    if len(token_R) >= num_tokens:
        return block_RH[:num_tokens]
    row_R = torch.arange(len(token_R), device=token_R.device)
    row_T = token_R.new_full((num_tokens + 1,), len(token_R)).scatter_(0, token_R, row_R)[:num_tokens]
    return _one_more(block_RH, 0)[row_T]
