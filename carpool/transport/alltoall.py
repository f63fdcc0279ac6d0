"""Sends a token once per chosen expert, as the all-to-all of other systems does: the baseline.

    token 0 chose experts on ranks 1, 1 and 3; it is sent three times:

        rank 1   [x_0 | slot 0 | w]   [x_0 | slot 2 | w]
        rank 3   [x_0 | slot 1 | w]

Cost per token: K sends each way, whatever the placement. Tokens are sorted by slot within a destination, so the
receiving experts read them nearly in order. Source: GShard (arXiv 2006.16668, section 3.2) without padding,
as in FastMoE's global exchange (arXiv 2103.13262).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from carpool.layout.topology import Topology
from carpool.transport.exchange import ExchangeTransport, SendList
from carpool.transport.volume import Counts, one_send_per_choice


class AllToAll(ExchangeTransport):
    """Sends a token once per chosen expert; J = 1."""

    name = "alltoall"

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        return one_send_per_choice(rank_TK, topology.num_ranks)

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return float(top_k)

    @classmethod
    def choices_per_send(cls, top_k: int) -> int:
        return 1

    def count_sends(self, here_WTK: torch.Tensor) -> torch.Tensor:
        return here_WTK.sum((1, 2))

    def list_sends(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> SendList:
        # Slot ids count over ranks, so that sorting by slot sorts by rank; choices without an expert sort to the end.
        key_C = slot_TK.reshape(-1)
        key_C = torch.where(key_C < 0, self.num_ranks * self.slots_per_rank, key_C)
        choice_N = torch.argsort(key_C, stable=True)[:num_rows]
        return SendList(
            token_N=choice_N // max(1, slot_TK.shape[1]),
            slot_NJ=(key_C[choice_N] % self.slots_per_rank).int().unsqueeze(1),
            choice_NJ=choice_N.unsqueeze(1),
        )
