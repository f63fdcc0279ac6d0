"""The communication volume of a routing, computed from the definition: nothing is sent or measured.

    4 experts on 2 ranks, [0, 1 | 2, 3]; rank 0 holds tokens {0, 1}, {1, 2}, {1, 2}, rank 1 holds token {0, 3}

                               rank 0 sends to (0, 1)         rank 1 sends to (0, 1)
        one send per rank      3, 2                           1, 1
        one send per choice    4, 2                           1, 1

Every transport uses one of these, or defines its own (`Transport.tokens_sent`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from carpool.metrics.counters import VERBS

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Volume:
    """Communication volume of one forward and backward of one layer among the ranks of an expert-parallel group.

    Attributes:
        tokens_W: tokens of each rank.
        rows_WW: hidden states dispatched from rank [i] to rank [j]; the diagonal stays on its rank.
        bytes_WW: for each of `VERBS`, bytes from rank [i] to rank [j].
        hops: the same for each hop by itself, where hops that follow one another use the same kind of link; else ().
    """

    transport: str
    tokens_W: tuple[int, ...]
    rows_WW: Counts
    bytes_WW: Mapping[str, Counts]
    hops: tuple[Mapping[str, Counts], ...] = ()

    @property
    def rows_remote(self) -> int:
        """Hidden states dispatched to other ranks."""
        return int(self.rows_WW.sum() - self.rows_WW.trace())

    @property
    def ranks_per_token(self) -> float:
        """Sends per token, to its own rank included."""
        return float(self.rows_WW.sum() / max(1, sum(self.tokens_W)))

    def bytes_remote(self, *verbs: str) -> int:
        """Bytes to other ranks, of the verbs given or of all."""
        return sum(int(self.bytes_WW[verb].sum() - self.bytes_WW[verb].trace()) for verb in verbs or VERBS)


class MeanTraffic(NamedTuple):
    """Expected sends of one dispatch, per token of a rank.

    Attributes:
        inside: sends to other ranks of the node.
        between: sends to other nodes.
        arrive: tokens that arrive at the experts of a rank, its own included.
    """

    inside: float
    between: float
    arrive: float


def one_send_per_choice(rank_TK: Sequence[Counts], num_ranks: int) -> Counts:
    """(W, W) sends from rank [i] to rank [j]. rank_TK: for each source rank, (T, K) the rank that serves each choice,
    -1: none."""
    return np.array([[np.sum(ranks == to) for to in range(num_ranks)] for ranks in rank_TK], dtype=np.int64)


def one_send_per_rank(rank_TK: Sequence[Counts], num_ranks: int) -> Counts:
    """(W, W) as `one_send_per_choice`, with one send to each rank that serves any choice of the token."""
    visits = [[np.sum(np.any(ranks == to, axis=1)) for to in range(num_ranks)] for ranks in rank_TK]
    return np.array(visits, dtype=np.int64)


def uniform_ranks_per_token(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Expected ranks that a token visits if its K distinct experts are drawn uniformly from E, which are spread evenly.

    Rank w, with E_w experts, is left out with probability C(E - E_w, K) / C(E, K).

    Example: 64 experts, 8 per token, 4 ranks: 4 * (1 - C(48, 8) / C(64, 8)) = 3.66
    """
    ways, (each, more) = math.comb(num_experts, top_k), divmod(num_experts, num_ranks)
    return sum(1 - math.comb(num_experts - each - (rank < more), top_k) / ways for rank in range(num_ranks))
