"""Sends a token once to each rank that holds any of its experts.

    token 0 chose experts on ranks 1, 1 and 3; it is sent twice, each time with all K slots and weights:

        rank 1   [x_0 | slots 0, 2, -1 | w, w, 0]      both of its experts there read the same hidden state
        rank 3   [x_0 | slots -1, -1, 1 | 0, 0, w]

The experts' rank adds up the weighted outputs of its experts in float32, so that one partial output per rank comes back
as well. Cost per token: one send for each distinct rank, each way. Under uniform routing of K = 8 over 4 ranks that is
3.6 instead of 8, and placement lowers it further. On top of it come 8 bytes per choice: 64 bytes, to several thousand
of the hidden state.

Source: the idea is in DeepSeek-V3 (arXiv 2412.19437, section 3.2.2, per node), in Occult (arXiv 2505.13345) and
HierMoE; because each rank sums its partial outputs before combine, combine is as cheap as dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from carpool.layout.topology import Topology
from carpool.transport.exchange import ExchangeTransport, SendList
from carpool.transport.volume import Counts, one_send_per_rank, uniform_ranks_per_token


class Dedup(ExchangeTransport):
    """Sends a token once per rank; J = K."""

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
        # Indices of the (rank, token) pairs that are sent, in order, by a stable sort: `nonzero` would make the host
        # wait once more.
        place_N = torch.argsort((~here_WTK.any(-1)).flatten().byte(), stable=True)[:num_rows]
        rank_N, token_N = place_N // max(1, num_tokens), place_N % max(1, num_tokens)
        here_NK = here_WTK[rank_N, token_N]
        choice_NK = token_N.unsqueeze(1) * top_k + torch.arange(top_k, device=slot_TK.device)
        return SendList(
            token_N=token_N,
            slot_NJ=torch.where(here_NK, slot_TK[token_N] % self.slots_per_rank, -1).int(),
            choice_NJ=torch.where(here_NK, choice_NK, num_tokens * top_k),
        )
