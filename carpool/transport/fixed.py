"""A hop of fixed size: the same number of rows to each rank, whatever was chosen.

After deduplication a rank sends another at most one row for each of its tokens. So it sends them all, token i as row i,
filled up to the largest number of tokens of any rank, and nobody has to be told how many come:

    3 tokens, room for 4, 2 ranks; tokens 0 and 2 chose experts on rank 1

        rank 0 (own)    x_0  x_1  x_2          does not travel
        rank 1          x_0  x_1  x_2  -       its slots are [4, .], [-1, -1], [9, .], [-1, -1]

Nothing is exchanged but rows and choices, the host waits for nothing, and shapes are static. The price is rows that
nobody reads. If K experts of many are chosen uniformly from N ranks, the share (1 - 1/N)^K of them is empty: with K = 8
0.4 % for 2 ranks, 10 % for 4. Placement makes it larger; then exact counts are better (`hierarchical.py` decides).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.observe.traffic import Traffic
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import ExchangeRoute, RowsToSend, Sizes
from carpool.transport.options import TransportOptions


class FixedRows(Dedup):
    """`Dedup` without counts: all rows to all ranks of the group. The options say `max_tokens`, the same on all."""

    def __init__(self, group: dist.ProcessGroup | None, slots_per_rank: int, options: TransportOptions) -> None:
        super().__init__(group, slots_per_rank, options)
        assert options.max_tokens is not None
        self.max_tokens = options.max_tokens

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[ExchangeRoute]:
        """Raises:
        ValueError: more tokens than were said."""
        tokens, pieces = sum(len(slot_TK) for slot_TK in slot_C), len(slot_C)
        if tokens > self.max_tokens:
            raise ValueError(
                f"{tokens} tokens on this rank, but at most max_tokens={self.max_tokens} were said, and all ranks "
                "count on it: state the largest number that any rank will have"
            )
        ranks_W11 = torch.arange(self.num_ranks, device=slot_C[0].device).view(-1, 1, 1)
        here_C = [slot_TK.div(self.slots_per_rank, rounding_mode="floor") == ranks_W11 for slot_TK in slot_C]
        most = -(-self.max_tokens // pieces)
        size_CW = [[most] * self.num_ranks for _ in slot_C]
        for size_W, slot_TK in zip(size_CW, slot_C, strict=True):
            size_W[self.rank] = len(slot_TK)
        pairs_C = [sum(size_W) * slot_TK.shape[1] for size_W, slot_TK in zip(size_CW, slot_C, strict=True)]
        return self._routes(slot_C, weight_C, here_C, Sizes(size_CW, size_CW, (), pairs_C), traffic, together)

    def list_rows(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> RowsToSend:
        num_tokens, top_k = slot_TK.shape
        most = (num_rows - num_tokens) // max(1, self.num_ranks - 1)
        choice_TK = torch.arange(num_tokens * top_k, device=slot_TK.device).view(num_tokens, top_k)
        token_T = torch.arange(num_tokens, device=slot_TK.device)
        slots, choices, tokens = [], [], []
        for rank, here_TK in enumerate(here_WTK):
            empty = 0 if rank == self.rank else most - num_tokens
            slots.append(_filled(torch.where(here_TK, slot_TK % self.slots_per_rank, -1), empty, -1))
            choices.append(_filled(torch.where(here_TK, choice_TK, choice_TK.numel()), empty, choice_TK.numel()))
            tokens.append(F.pad(token_T, (0, empty), value=num_tokens))
        return RowsToSend(torch.cat(tokens), torch.cat(slots).int(), torch.cat(choices))

    def copy_rows(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        return torch.cat([_filled(x_TH, size - len(x_TH), 0) for size in route.send])

    def sum_rows(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        first, *others = (block[: route.num_tokens] for block in rows_NH.split(list(route.send)))
        total_TH = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for block_TH in others:
            total_TH += block_TH
        return total_TH


def _filled(rows: torch.Tensor, empty: int, value: int) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, empty), value=value) if empty else rows
