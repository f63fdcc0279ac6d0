"""One ride per rank: a token is sent once to each rank that holds any of its experts.

    token 0 chose experts on ranks 1, 1 and 3; two rows travel, with all K slots and weights beside each:

        rank 1   [x_0 | slots 0, 2, -1 | w, w, 0]      both of its experts there read the same row
        rank 3   [x_0 | slots -1, -1, 1 | 0, 0, w]

The experts' rank adds up the weighted outputs of its experts in float32, so one row per (token, rank) comes back
as well. Cost per token: one row for each distinct rank, both ways. Under uniform routing of K = 8 over 4 ranks
that is 3.6 instead of 8, and placement lowers it further. On top of it come 8 bytes per choice, 64 bytes beside a
row of several thousand.

Source: the idea is in DeepSeek-V3 (arXiv 2412.19437, section 3.2.2, per node), in Occult (arXiv 2505.13345) and
HierMoE; the rank-level sum before the way back is what makes the return ride as short as the way out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from carpool.layout.topology import Topology
from carpool.transport.exchange import ExchangeTransport, SendList
from carpool.transport.volume import Counts, one_send_per_rank, uniform_ranks_per_token


class Dedup(ExchangeTransport):
    """One row per (token, rank); J = K."""

    name = "dedup"
    one_send_per_rank = True

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        return one_send_per_rank(rank_TK, topology.num_ranks)

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        return uniform_ranks_per_token(num_experts, top_k, num_ranks)

    def count_sends(self, here_WTK: torch.Tensor) -> torch.Tensor:
        return here_WTK.any(-1).sum(1)

    def list_sends(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> SendList:
        num_tokens, top_k = slot_TK.shape
        # The places of the wanted (rank, token) pairs in order: a stable sort of "not wanted", since `nonzero` would
        # make the host wait once more.
        place_N = torch.argsort((~here_WTK.any(-1)).flatten().byte(), stable=True)[:num_rows]
        rank_N, token_N = place_N // max(1, num_tokens), place_N % max(1, num_tokens)
        here_NK = here_WTK[rank_N, token_N]
        choice_NK = token_N.unsqueeze(1) * top_k + torch.arange(top_k, device=slot_TK.device)
        return SendList(
            token_N=token_N,
            slot_NJ=torch.where(here_NK, slot_TK[token_N] % self.slots_per_rank, -1).int(),
            choice_NJ=torch.where(here_NK, choice_NK, num_tokens * top_k),
        )
