"""One row per (token, expert): what everybody else's all-to-all does, and the baseline to beat.

    token 0 chose experts on ranks 1, 1 and 3; it is copied into three rows:

        rank 1   [x_0 | slot 0 | w]   [x_0 | slot 2 | w]
        rank 3   [x_0 | slot 1 | w]

Cost per token: K rows there and K rows back, whatever the placement. Rows are sorted by slot within a destination,
so the receiving experts read them nearly in order. Source: GShard (arXiv 2006.16668, section 3.2) without padding,
as in FastMoE's global exchange (arXiv 2103.13262).
"""

from __future__ import annotations

import torch

from carpool.transport.exchange import ExchangeTransport, RowsToSend


class AllToAll(ExchangeTransport):
    """One row per (token, expert); J = 1."""

    name = "alltoall"

    def rows_to_send(self, slot_TK: torch.Tensor) -> RowsToSend:
        slot_C = slot_TK.reshape(-1).long()
        end = self.num_ranks * self.slots_per_rank
        count_G = torch.zeros(end + 1, dtype=torch.int64, device=slot_TK.device)
        key_C = torch.where(slot_C < 0, end, slot_C)
        count_G.scatter_add_(0, key_C, torch.ones_like(key_C))
        sent_W = count_G[:end].view(self.num_ranks, self.slots_per_rank).sum(1)
        # Choices without an expert sort to the end and are cut off there.
        choice_N = torch.argsort(key_C, stable=True)[: int(sent_W.sum())]
        return RowsToSend(
            token_N=choice_N // max(1, slot_TK.shape[1]),
            sent_W=sent_W,
            pairs_W=sent_W,
            slot_NJ=(slot_C[choice_N] % self.slots_per_rank).int().unsqueeze(1),
            choice_NJ=choice_N.unsqueeze(1),
        )
