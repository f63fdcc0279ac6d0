"""How much a routing moves under a layout, from the definition alone: nothing travels, nothing is measured.

A batch's routing is a *hypergraph*. Experts are its vertices; a token is a hyperedge, the set of experts that it
chose. A layout cuts the vertices into one part per rank, and the number of parts that an edge touches is its
*connectivity*, written λ. Rows per token, by transport:

    dedup      λ   one row for each rank that holds any of the token's experts; the same for nvlink
    alltoall   K   one row for each choice; the layout only decides which of them leave the rank
    gather     W   one row to every rank; neither routing nor layout matters

So the rows that `dedup` and `nvlink` move are the sum of λ over all tokens, and to place experts well is to partition a
hypergraph into parts of given sizes with a small sum of (λ - 1), the metric that partitioners call km1. A replica
is a vertex that lies in several parts; which of them serves a token is `carpool.layout.assign`'s decision, and it is
called here too: a predicted byte is only worth something if the transports' counters show the same number.

    4 experts on 2 ranks, [0, 1 | 2, 3]; rank 0 holds tokens {0, 1}, {1, 2}, {1, 2}, rank 1 holds token {0, 3}

                  rows from rank 0 to (0, 1)     rows from rank 1 to (0, 1)
        dedup     3, 2                           1, 1             λ = 1, 2, 2 | 2, in sum 7
        alltoall  4, 2                           1, 1             K = 2 for each of 4 tokens
        gather    3, 3                           3, 3             padded to the longest rank

    With experts [1, 2 | 0, 3] instead, λ is 2, 1, 1 | 1, in sum 5: tokens that want 1 and 2 now share a ride.

Bytes: a row is H elements. Beside it travel, on the way out, a slot and a weight for each of the choices that it may
serve (K of them for dedup, nvlink and gather, 1 for alltoall), and on the backward's way back the weights' gradients.

    verb                from, to                     bytes per row
    dispatch            token's rank -> expert's     H * element + 8 * choices
    combine             expert's rank -> token's     H * element
    combine_backward    token's rank -> expert's     H * element                     (gradients of what came back)
    dispatch_backward   expert's rank -> token's     H * element + 4 * choices       (gradients of what went out)
    plan                all -> all                   how many rows (and choices) will come

`nvlink` exchanges no plan: every sender works out alone where its rows go. The signals between its kernels are a few
words per rank and verb, and are not counted. A row that travels as FP8 is a byte for each column and a float32
for each 128 of them, rounded up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from carpool.layout import ExpertLayout, assign
from carpool.routing import Routing

VERBS = ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")
SLOT_AND_WEIGHT = 8  # int32 and float32
WEIGHT_GRADIENT = 4  # float32
ONE_COUNT = 8  # int64
FP8_GROUP = 128  # columns that share a float32 scale

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Volume:
    """What one forward and backward of one layer moves between the ranks of an expert-parallel group.

    Attributes:
        transport: the way of travelling.
        tokens_W: tokens of each rank.
        rows_WW: rows dispatched from rank [i] to rank [j]; the diagonal stays on its rank.
        bytes_WW: for each of `VERBS`, bytes from rank [i] to rank [j].
    """

    transport: str
    tokens_W: tuple[int, ...]
    rows_WW: Counts
    bytes_WW: Mapping[str, Counts]

    @property
    def rows_remote(self) -> int:
        """Rows dispatched to other ranks."""
        return int(self.rows_WW.sum() - self.rows_WW.trace())

    @property
    def copies_per_token(self) -> float:
        """Rows dispatched per token, those that stay on their rank included: the mean λ for `dedup`."""
        return float(self.rows_WW.sum() / max(1, sum(self.tokens_W)))

    def bytes_remote(self, *verbs: str) -> int:
        """Bytes to other ranks, of the verbs given or of all."""
        return sum(int(self.bytes_WW[verb].sum() - self.bytes_WW[verb].trace()) for verb in verbs or VERBS)


def predict(
    transport: str,
    routings: Sequence[torch.Tensor | npt.NDArray[np.integer]],
    layout: ExpertLayout,
    *,
    hidden: int,
    element_size: int,
    forward_fp8: bool = False,
    backward_fp8: bool = False,
) -> Volume:
    """Rows and bytes that `transport` moves for these routings under this layout.

    Args:
        transport: "gather", "alltoall", "dedup" or "nvlink".
        routings: for each rank, expert_TK: (T, K) logical expert ids of its tokens, -1: none. T may differ.
        layout: where the experts are.
        hidden: H, elements of a row.
        element_size: bytes of an element on the wire (2 for bfloat16).
        forward_fp8, backward_fp8: rows, or gradients of sums, go out as FP8 (`nvlink` alone can do that).

    Raises:
        ValueError: an unknown transport, a routing for each rank missing, expert ids out of range, unequal K,
            FP8 of a transport that has none.
    """
    if transport not in _ROWS:
        raise ValueError(f"transport={transport!r} has no volume formula; use one of {', '.join(_ROWS)}")
    if (forward_fp8 or backward_fp8) and transport != "nvlink":
        raise ValueError(f"transport={transport!r} does not send FP8; use 'nvlink'")
    chosen = [torch.as_tensor(expert_TK).cpu().int() for expert_TK in routings]
    top_k = _check(chosen, layout)
    rank_TK = [_ranks_visited(expert_TK, layout, source) for source, expert_TK in enumerate(chosen)]
    rows_WW = rows_sent(transport, rank_TK, layout.num_ranks)
    choices = 1 if transport == "alltoall" else top_k
    row, row_fp8 = hidden * element_size, _round_up(_round_up(hidden, 4) + 4 * -(-hidden // FP8_GROUP), 16)
    return Volume(
        transport=transport,
        tokens_W=tuple(len(expert_TK) for expert_TK in chosen),
        rows_WW=rows_WW,
        bytes_WW={
            "plan": np.full_like(rows_WW, _COUNTS[transport] * ONE_COUNT),
            "dispatch": rows_WW * ((row_fp8 if forward_fp8 else row) + choices * SLOT_AND_WEIGHT),
            "combine": rows_WW.T * row,
            "dispatch_backward": rows_WW.T * (row + choices * WEIGHT_GRADIENT),
            "combine_backward": rows_WW * (row_fp8 if backward_fp8 else row),
        },
    )


def rows_sent(transport: str, rank_TK: Sequence[Counts], num_ranks: int) -> Counts:
    """(W, W) rows that a transport dispatches from rank [i] to rank [j].

    Args:
        rank_TK: for each source rank, (T, K) the rank that serves each choice, -1: none.

    Raises:
        ValueError: an unknown transport.
    """
    if transport not in _ROWS:
        raise ValueError(f"transport={transport!r} has no volume formula; use one of {', '.join(_ROWS)}")
    return _ROWS[transport](rank_TK, num_ranks)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _ranks_visited(expert_TK: torch.Tensor, layout: ExpertLayout, source: int) -> Counts:
    """(T, K) the rank that serves each choice, -1: none."""
    slot_TK = assign(Routing(expert_TK, None), layout, source).numpy().astype(np.int64)
    return np.where(slot_TK < 0, -1, slot_TK // layout.slots_per_rank)


def _one_per_choice(rank_TK: Sequence[Counts], num_ranks: int) -> Counts:
    return np.array([[np.sum(ranks == to) for to in range(num_ranks)] for ranks in rank_TK], dtype=np.int64)


def _one_per_rank(rank_TK: Sequence[Counts], num_ranks: int) -> Counts:
    visits = [[np.sum(np.any(ranks == to, axis=1)) for to in range(num_ranks)] for ranks in rank_TK]
    return np.array(visits, dtype=np.int64)


def _one_to_all(rank_TK: Sequence[Counts], num_ranks: int) -> Counts:
    return np.full((num_ranks, num_ranks), max(len(ranks) for ranks in rank_TK), dtype=np.int64)


_ROWS: Mapping[str, Callable[[Sequence[Counts], int], Counts]] = {
    "gather": _one_to_all,
    "alltoall": _one_per_choice,
    "dedup": _one_per_rank,
    "nvlink": _one_per_rank,
}
TRANSPORTS = tuple(_ROWS)
# Numbers that each rank tells each other one before rows travel.
_COUNTS: Mapping[str, int] = {"gather": 1, "alltoall": 2, "dedup": 2, "nvlink": 0}


def _check(chosen: Sequence[torch.Tensor], layout: ExpertLayout) -> int:
    """K, or ValueError."""
    if len(chosen) != layout.num_ranks:
        raise ValueError(f"the layout has {layout.num_ranks} ranks, but there are routings of {len(chosen)}")
    for rank, expert_TK in enumerate(chosen):
        if expert_TK.dim() != 2 or expert_TK.shape[1] != chosen[0].shape[-1]:
            shapes = [tuple(e.shape) for e in chosen]
            raise ValueError(f"routings must be (T, K) with the same K on all ranks; their shapes are {shapes}")
        if expert_TK.numel() and not -1 <= int(expert_TK.min()) <= int(expert_TK.max()) < layout.num_experts:
            raise ValueError(
                f"the routing of rank {rank} names experts {int(expert_TK.min())} to {int(expert_TK.max())}; "
                f"the layout has experts 0..{layout.num_experts - 1} (-1 means none)"
            )
    return int(chosen[0].shape[1])
