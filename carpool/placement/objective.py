"""What a layout is worth on a recorded routing: rows, load and modelled time, exact for any layout.

Every number follows from one table: the rank that `carpool.layout.assign` chooses for each choice of each token, the
same function that decides during training. Replicas are therefore counted as they will serve.

    rows_WW   [i, j] rows from rank i to rank j: one for each token of i that visits j; the diagonal stays at home.
              Equal to `carpool.placement.volume.predict("dedup", ...)`.
    rows_NN   the same between nodes: one copy for each (token, node), as a two-level transport sends them.
              Ranks are counted through node by node: rank r is on node r // (W / N).
    load_W    (token, choice) pairs that each rank computes

**Modelled time** (`CostModel`) of one layer, forward and backward: the slowest rank's links, and the slowest rank's
GEMMs. A link takes `latency + bytes / bandwidth`; links inside a node and between nodes work at the same time.
    4 rides (dispatch, combine, and the backward of each)  +  3 x the forward's GEMMs of the fullest rank
    + replicas: their parameters sent, their gradients sent back
It ranks layouts. It is no forecast of a step: what is hidden behind other work, it counts in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from carpool.layout import ExpertLayout, assign
from carpool.placement.trace import Array, LayerTrace
from carpool.routing import Routing

RIDES = 4  # dispatch and combine, forward and backward
GEMM_PASSES = 3  # forward, gradients of inputs, gradients of weights


@dataclass(frozen=True)
class CostModel:
    """Links and GEMMs. The defaults are of H200 GPUs on NVLink as measured for `docs/measurements.md`, except for the
    links between nodes, which are the data sheet's: one network port of 400 Gb/s per GPU.

    Args:
        hidden, expert_hidden: H, F of the model whose layer is modelled.
        element_size: bytes of an element of a row (2: bfloat16).
        tokens_per_rank: of a step. A trace is a sample: its rows and loads are scaled to this.
        intra_bandwidth, inter_bandwidth: bytes per second that a rank sends inside its node, and to other nodes.
        intra_latency, inter_latency: seconds that a ride takes with nothing to carry.
        flops: floating-point operations per second in the experts' GEMMs.
        replicas_hidden: share of the replicas' traffic that is hidden behind other work, 0 to 1.
        copies_per_node: one row per (token, node) crosses between nodes, as in a two-level transport; if not, one
            per (token, rank).
    """

    hidden: int = 2048
    expert_hidden: int = 1024
    element_size: int = 2
    tokens_per_rank: int = 8192
    intra_bandwidth: float = 320e9
    inter_bandwidth: float = 50e9
    intra_latency: float = 12e-6
    inter_latency: float = 30e-6
    flops: float = 500e12
    replicas_hidden: float = 0.0
    copies_per_node: bool = True

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element_size

    @property
    def pair_seconds(self) -> float:
        """Seconds that a rank computes on one (token, choice), forward and backward: three matrices of H x F."""
        return GEMM_PASSES * 6 * self.hidden * self.expert_hidden / self.flops

    @property
    def expert_bytes(self) -> int:
        """Parameters of one expert, three matrices of H x F, as they travel."""
        return 3 * self.hidden * self.expert_hidden * self.element_size

    def transfer_seconds(self, bytes_WW: Array, num_nodes: int = 1) -> float:
        """Anything between ranks once, as the rank with most to send or receive over either kind of link needs it."""
        num_ranks = len(bytes_WW)
        node_W = np.arange(num_ranks) * num_nodes // num_ranks
        same_WW = node_W[:, None] == node_W
        inside_WW = np.where(same_WW & ~np.eye(num_ranks, dtype=bool), bytes_WW, 0)
        across_WW = np.where(same_WW, 0, bytes_WW)
        seconds = 0.0
        for amount_WW, latency, bandwidth in (
            (inside_WW, self.intra_latency, self.intra_bandwidth),
            (across_WW, self.inter_latency, self.inter_bandwidth),
        ):
            most = max(amount_WW.sum(0).max(), amount_WW.sum(1).max())
            seconds = max(seconds, latency + most / bandwidth if most else 0.0)
        return float(seconds)

    def replica_seconds(self, layout: ExpertLayout, num_nodes: int = 1) -> float:
        """Slots away from home: parameters there before the forward, gradients back after the backward."""
        bytes_WW = np.zeros((layout.num_ranks, layout.num_ranks))
        for rank, experts in enumerate(layout.slots):
            for expert in experts:
                if expert != -1 and (home := layout.home_of[expert][0]) != rank:
                    bytes_WW[home, rank] += self.expert_bytes
        both = self.transfer_seconds(bytes_WW, num_nodes) + self.transfer_seconds(bytes_WW.T, num_nodes)
        return (1 - self.replicas_hidden) * both

    def compute_seconds(self, load_W: Array) -> float:
        """The fullest rank's GEMMs."""
        return float(load_W.max() * self.pair_seconds)

    def ride_seconds(self, rows_WW: Array, crossing_WW: Array, num_nodes: int = 1) -> float:
        """All rides of a layer, as the rank with most to send or to receive needs them.

        Args:
            rows_WW: rows between ranks; those between nodes are left out here.
            crossing_WW: rows between ranks of different nodes (one per rank, or per node).
        """
        num_ranks = len(rows_WW)
        node_W = np.arange(num_ranks) * num_nodes // num_ranks
        same_WW = node_W[:, None] == node_W
        inside_WW = np.where(same_WW & ~np.eye(num_ranks, dtype=bool), rows_WW, 0)
        inside = max(inside_WW.sum(0).max(), inside_WW.sum(1).max()) * self.row_bytes
        across = max(crossing_WW.sum(0).max(), crossing_WW.sum(1).max()) * self.row_bytes
        times = [self.intra_latency + inside / self.intra_bandwidth] if num_ranks > num_nodes else [0.0]
        if num_nodes > 1:
            times.append(self.inter_latency + across / self.inter_bandwidth)
        return RIDES * max(times)


@dataclass(frozen=True)
class Objective:
    """What `evaluate` found. Rows, loads as they are in the trace; seconds scaled to a step of the cost model.

    Attributes:
        tokens: T of the trace.
        rows_WW, rows_NN: rows between ranks and between nodes, what stays at home on the diagonal.
        load_W: pairs computed by each rank.
        intra_share: of the pairs of experts that a token chose together, those served by one rank (Occult's
            intra-collaboration; the rest is inter-collaboration).
        ride_seconds, compute_seconds, replica_seconds: of one layer, forward and backward.
    """

    tokens: int
    rows_WW: Array
    rows_NN: Array
    load_W: Array
    intra_share: float
    ride_seconds: float
    compute_seconds: float
    replica_seconds: float

    @property
    def rows_remote(self) -> int:
        """Rows to other ranks."""
        return int(self.rows_WW.sum() - self.rows_WW.trace())

    @property
    def rows_nodes(self) -> int:
        """Rows to other nodes, one per (token, node)."""
        return int(self.rows_NN.sum() - self.rows_NN.trace())

    @property
    def copies_per_token(self) -> float:
        """Ranks that serve a token, mean: λ, its own included."""
        return float(self.rows_WW.sum() / self.tokens)

    @property
    def load_ratio(self) -> float:
        """Load of the fullest rank by the mean."""
        return float(self.load_W.max() / max(self.load_W.mean(), 1e-9))

    @property
    def inter_share(self) -> float:
        return 1.0 - self.intra_share

    @property
    def seconds(self) -> float:
        """Modelled: rides, GEMMs and replicas of one layer."""
        return self.ride_seconds + self.compute_seconds + self.replica_seconds


def served_by(trace: LayerTrace, layout: ExpertLayout) -> Array:
    """(T, K) the rank that serves each choice: `assign` on the tokens of each rank, as that rank would hold them."""
    expert_TK = torch.from_numpy(np.ascontiguousarray(trace.expert_TK, dtype=np.int32))
    if layout.num_replicas == 0:  # then all ranks decide alike
        slot_TK = assign(Routing(expert_TK, None), layout, 0)
        return (slot_TK // layout.slots_per_rank).numpy().astype(np.int64)
    source_T = torch.from_numpy(trace.source_T(layout.num_ranks))
    rank_TK = torch.empty_like(expert_TK)
    for rank in range(layout.num_ranks):
        mine = (source_T == rank).nonzero().squeeze(1)
        slot_TK = assign(Routing(expert_TK[mine], None), layout, rank)
        rank_TK[mine] = slot_TK // layout.slots_per_rank
    return rank_TK.numpy().astype(np.int64)


def evaluate(
    trace: LayerTrace, layout: ExpertLayout, *, num_nodes: int = 1, cost: CostModel | None = None
) -> Objective:
    """Rows, loads and modelled time of a layout on a trace.

    Raises:
        ValueError: the layout is of another number of experts, or its ranks do not divide among the nodes.
    """
    if layout.num_experts != trace.num_experts:
        raise ValueError(
            f"the layout has {layout.num_experts} experts, but the trace of {trace.name} has {trace.num_experts}"
        )
    per_node = check_nodes(layout.num_ranks, num_nodes)
    cost = cost or CostModel()
    num_tokens, num_ranks = trace.num_tokens, layout.num_ranks
    rank_TK, source_T = served_by(trace, layout), trace.source_T(num_ranks)
    node_T = source_T // per_node
    visits_TW = np.zeros((num_tokens, num_ranks), dtype=bool)
    visits_TW[np.arange(num_tokens)[:, None], rank_TK] = True
    visits_TN: Array = np.logical_or.reduce(visits_TW.reshape(num_tokens, num_nodes, per_node), axis=2)
    rows_WW = _sum_by(visits_TW, source_T, num_ranks)
    rows_NN = _sum_by(visits_TN, node_T, num_nodes)
    load_W = np.bincount(rank_TK.ravel(), minlength=num_ranks)

    scale = cost.tokens_per_rank * num_ranks / num_tokens
    crossing_WW = _crossing(visits_TW, visits_TN, source_T, cost.copies_per_node)
    return Objective(
        tokens=num_tokens,
        rows_WW=rows_WW,
        rows_NN=rows_NN,
        load_W=load_W,
        intra_share=_intra_share(rank_TK, num_ranks),
        ride_seconds=cost.ride_seconds(rows_WW * scale, crossing_WW * scale, num_nodes),
        compute_seconds=cost.compute_seconds(load_W * scale),
        replica_seconds=cost.replica_seconds(layout, num_nodes),
    )


def check_nodes(num_ranks: int, num_nodes: int) -> int:
    """Ranks of a node, or ValueError."""
    if num_nodes < 1 or num_ranks < 1 or num_ranks % num_nodes:
        raise ValueError(f"{num_ranks} ranks cannot be divided evenly among {num_nodes} nodes")
    return num_ranks // num_nodes


def _sum_by(visits_TX: Array, source_T: Array, number: int) -> Array:
    """(number, X) int64: for each source, how many of its tokens visit each X."""
    from_TS = np.zeros((len(source_T), number), dtype=np.float32)
    from_TS[np.arange(len(source_T)), source_T] = 1
    return np.rint(from_TS.T @ visits_TX.astype(np.float32)).astype(np.int64)  # exact below 2**24 tokens


def _crossing(visits_TW: Array, visits_TN: Array, source_T: Array, copies_per_node: bool) -> Array:
    """(W, W) rows between nodes, by rank. A node's single copy goes to the rank there with the sender's number in its
    own node, which passes it on: the convention of two-level transports."""
    num_ranks, num_nodes = visits_TW.shape[1], visits_TN.shape[1]
    per_node = num_ranks // num_nodes
    node_W = np.arange(num_ranks) // per_node
    if not copies_per_node:
        rows_WW = _sum_by(visits_TW, source_T, num_ranks)
        return np.where(node_W[:, None] == node_W, 0, rows_WW)
    rows_WN = _sum_by(visits_TN, source_T, num_ranks)
    crossing_WW = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for rank in range(num_ranks):
        gates = np.arange(num_nodes) * per_node + rank % per_node
        crossing_WW[rank, gates] = np.where(np.arange(num_nodes) == node_W[rank], 0, rows_WN[rank])
    return crossing_WW


def _intra_share(rank_TK: Array, num_ranks: int) -> float:
    """Of all pairs of choices of a token, the share that one rank serves."""
    num_tokens, top_k = rank_TK.shape
    if top_k < 2:
        return 1.0
    token_T1 = np.arange(num_tokens)[:, None] * num_ranks
    count = np.bincount((token_T1 + rank_TK).ravel())
    return float((count * (count - 1)).sum() / (num_tokens * top_k * (top_k - 1)))
