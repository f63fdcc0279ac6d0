"""How many ranks a token visits if experts are chosen uniformly: what placement improves on."""

from __future__ import annotations

import math


def uniform_copies(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Expected ranks that a token visits if its K distinct experts are drawn uniformly from E, which are spread evenly.

    Rank w, with E_w experts, is left out with probability C(E - E_w, K) / C(E, K).

    Example: 64 experts, 8 per token, 4 ranks: 4 * (1 - C(48, 8) / C(64, 8)) = 3.66
    """
    ways, (each, more) = math.comb(num_experts, top_k), divmod(num_experts, num_ranks)
    return sum(1 - math.comb(num_experts - each - (rank < more), top_k) / ways for rank in range(num_ranks))
