"""The objective of placement on a recorded routing: sends, load and modelled time, exact for any layout.

All numbers follow from the rank that `carpool.layout.assign` gives for each choice of each token, as in training.

    rows_WW   [i, j] tokens of rank i that visit rank j; the diagonal stays on its rank. `dedup` and `nvlink` send one
              hidden state for each. Equal to `carpool.placement.predicted_volume.predict("dedup", ...)`.
    sent_WW   [i, j] hidden states that the cost model's transport sends, for modelled time and `rows_nodes`
    rows_NN   tokens of one node that visit another, which `hierarchical` sends inter-node
    load_W    (token, choice) pairs that each rank computes; of sliced experts, (token, slice) pairs

Modelled time is that of `carpool.planner.machine.cost`. It ranks layouts, and does not predict the time of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from carpool.layout import ExpertLayout, assign
from carpool.layout.topology import Topology
from carpool.placement.trace import Array, LayerTrace
from carpool.planner.machine.cost import CostModel
from carpool.transport import find_transport


@dataclass(frozen=True)
class Objective:
    """The result of `evaluate`. Sends and loads are those of the trace; seconds are scaled to a step of the cost model.

    Attributes:
        tokens: T of the trace.
        rows_WW, rows_NN: tokens that visit ranks, and nodes; the diagonal stays.
        sent_WW: hidden states that the transport sends.
        rows_nodes: of these, those to other nodes.
        load_W: pairs computed by each rank.
        intra_share: share of the pairs of experts of a token that one rank serves (Occult's intra-collaboration).
        ride_seconds, compute_seconds: of one layer, forward and backward.
    """

    tokens: int
    rows_WW: Array
    rows_NN: Array
    sent_WW: Array
    rows_nodes: int
    load_W: Array
    intra_share: float
    ride_seconds: float
    compute_seconds: float

    @property
    def rows_remote(self) -> int:
        """Hidden states that the transport sends to other ranks."""
        return int(self.sent_WW.sum() - self.sent_WW.trace())

    @property
    def ranks_per_token(self) -> float:
        """Mean number of ranks that a token visits, its own included: λ."""
        return float(self.rows_WW.sum() / self.tokens)

    @property
    def load_ratio(self) -> float:
        """Largest rank load over the mean."""
        return float(self.load_W.max() / max(self.load_W.mean(), 1e-9))

    @property
    def seconds(self) -> float:
        """Modelled: rides and GEMMs of one layer."""
        return self.ride_seconds + self.compute_seconds


def served_by(trace: LayerTrace, layout: ExpertLayout) -> Array:
    """(T, K) the rank that serves each choice, or each slice of it."""
    expert_TK = torch.from_numpy(np.ascontiguousarray(trace.expert_TK, dtype=np.int32))
    return (assign(expert_TK, layout) // layout.slots_per_rank).numpy().astype(np.int64)


def evaluate(
    trace: LayerTrace, layout: ExpertLayout, *, topology: Topology | None = None, cost: CostModel | None = None
) -> Objective:
    """Sends, loads and modelled time of a layout on a trace.

    Args:
        topology: of the layout's ranks. None: one node with NVLink.
        cost: sizes of the layer, hardware and transport.

    Raises:
        ValueError: the layout has another number of experts or ranks, or the transport needs nodes of equal size.
    """
    if layout.num_experts != trace.num_experts:
        raise ValueError(
            f"the layout has {layout.num_experts} experts, but the trace of {trace.name} has {trace.num_experts}"
        )
    topology = topology or Topology.even(layout.num_ranks)
    if topology.num_ranks != layout.num_ranks:
        raise ValueError(f"the layout has {layout.num_ranks} ranks, but the topology {topology.num_ranks}")
    num_nodes, node_W = topology.num_nodes, np.array(topology.node_of)
    cost = cost or CostModel()
    num_tokens, num_ranks = trace.num_tokens, layout.num_ranks
    rank_TK, source_T = served_by(trace, layout), trace.source_T(num_ranks)
    visits_TW = np.zeros((num_tokens, num_ranks), dtype=bool)
    visits_TW[np.arange(num_tokens)[:, None], rank_TK] = True
    visits_TN = np.zeros((num_tokens, num_nodes), dtype=bool)
    visits_TN[np.arange(num_tokens)[:, None], node_W[rank_TK]] = True
    rows_WW = _sum_by(visits_TW, source_T, num_ranks)
    rows_NN = _sum_by(visits_TN, node_W[source_T], num_nodes)
    load_W = np.bincount(rank_TK.ravel(), minlength=num_ranks)

    scale = cost.tokens_per_rank * num_ranks / num_tokens
    sent_WW = rows_WW
    if not (way := find_transport(cost.transport)).one_send_per_rank:
        sent_WW = way.tokens_sent([rank_TK[source_T == rank] for rank in range(num_ranks)], topology)
    return Objective(
        tokens=num_tokens,
        rows_WW=rows_WW,
        rows_NN=rows_NN,
        sent_WW=sent_WW,
        rows_nodes=0 if num_nodes == 1 else int(sent_WW[np.not_equal.outer(node_W, node_W)].sum()),
        load_W=load_W,
        intra_share=_intra_share(rank_TK, num_ranks),
        ride_seconds=cost.ride_seconds(sent_WW * scale, topology),
        compute_seconds=cost.compute_seconds(load_W * scale / layout.slices),
    )


def _sum_by(visits_TX: Array, source_T: Array, number: int) -> Array:
    """(number, X) int64: for each source, how many of its tokens visit each X."""
    from_TS = np.zeros((len(source_T), number), dtype=np.float32)
    from_TS[np.arange(len(source_T)), source_T] = 1
    return np.rint(from_TS.T @ visits_TX.astype(np.float32)).astype(np.int64)  # exact below 2**24 tokens


def _intra_share(rank_TK: Array, num_ranks: int) -> float:
    """The share of all pairs of choices of a token that one rank serves."""
    num_tokens, top_k = rank_TK.shape
    if top_k < 2:
        return 1.0
    token_T1 = np.arange(num_tokens)[:, None] * num_ranks
    count = np.bincount((token_T1 + rank_TK).ravel())
    return float((count * (count - 1)).sum() / (num_tokens * top_k * (top_k - 1)))
