"""How long one MoE layer takes: rides, the experts' matrix products, and the upkeep of replicas. All of it is modelled.

Time of one layer, forward and backward, as the rank that is slowest needs it:

    4 rides (dispatch, combine, and the backward of each)
    + 3 x the forward's matrix products (forward, gradients of inputs, gradients of weights) of the fullest rank
    + replicas: their parameters sent before the forward, their gradients sent back after the backward

A link takes `latency + bytes / bandwidth`; links of different kinds work at the same time. A rank that sends
90 MB to GPUs of its node and 20 MB to other nodes needs, on H200s, max(12 + 281, 30 + 400) = 430 us.

The model ranks layouts and schedules. It is no forecast of a step, for it counts what is hidden behind other work in
full.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from carpool.planner.hardware import DEFAULT, Hardware

if TYPE_CHECKING:
    from carpool.layout import ExpertLayout
    from carpool.layout.topology import Topology
    from carpool.transport.codecs import Codecs

Array = npt.NDArray[Any]

RIDES = 4  # dispatch and combine, forward and backward
GEMM_PASSES = 3  # forward, gradients of inputs, gradients of weights


@dataclass(frozen=True)
class CostModel:
    """The cost of a layer with these sizes on this hardware.

    Args:
        hidden, expert_hidden: H, F of the model whose layer is modelled.
        element_size: bytes of an element of a row (2: bfloat16).
        tokens_per_rank: of a step. A trace is a sample: its rows and loads are scaled to this.
        hardware: rates of links and matrix products.
        transport: whose rows ride (a key of `carpool.transport.TRANSPORTS`).
        codecs: how rows become bytes (`carpool.transport.codecs`); None: they travel as they are.
        replicas_hidden: share of the replicas' traffic that is hidden behind other work, 0 to 1.
    """

    hidden: int = 2048
    expert_hidden: int = 1024
    element_size: int = 2
    tokens_per_rank: int = 8192
    hardware: Hardware = field(default=DEFAULT)
    transport: str = "dedup"
    codecs: Codecs | None = None
    replicas_hidden: float = 0.0

    @property
    def copies_per_node(self) -> bool:
        """Whether the transport sends one row per (token, node) between nodes, not one per (token, rank)."""
        from carpool.transport import find_transport

        return find_transport(self.transport).one_row_per_node

    @property
    def row_bytes(self) -> float:
        """Of a row inside a node, the mean over its four rides."""
        return self._row_bytes(network=False)

    def _row_bytes(self, network: bool) -> float:
        if self.codecs is None or (self.codecs.hop == "nodes" and not network):
            return self.hidden * self.element_size
        from carpool.transport.codecs import ROW_VERBS

        return sum(self.codecs.of(verb).row_bytes(self.hidden, self.element_size) for verb in ROW_VERBS) / RIDES

    @property
    def pair_seconds(self) -> float:
        """Seconds that a rank computes on one (token, choice), forward and backward: three matrices of H x F."""
        return GEMM_PASSES * 6 * self.hidden * self.expert_hidden / self.hardware.flops

    @property
    def expert_bytes(self) -> int:
        """Parameters of one expert, three matrices of H x F, as they travel."""
        return 3 * self.hidden * self.expert_hidden * self.element_size

    def network_weight(self, topology: Topology) -> float:
        """What a row between nodes costs, in rows inside a node; 1 on a single node."""
        if topology.num_nodes == 1:
            return 1.0
        inside = self.hardware.rate("nvlink" if "nvlink" in topology.pairs else "node")
        slower = inside.bytes_per_second / self.hardware.network.bytes_per_second
        return slower * self._row_bytes(network=True) / self.row_bytes

    def transfer_seconds(self, bytes_WW: Array, topology: Topology) -> float:
        """Anything between ranks once, as the rank with most to send or receive over any kind of link needs it."""
        seconds = 0.0
        for link, pairs_WW in topology.pairs.items():
            if most := _most(bytes_WW, pairs_WW):
                seconds = max(seconds, self._link_seconds(link, most))
        return seconds

    def ride_seconds(self, rows_WW: Array, topology: Topology) -> float:
        """All rides of a layer. `rows_WW`: rows that the transport sends from rank to rank in one dispatch."""
        times = [
            self._link_seconds(link, _most(rows_WW, pairs_WW) * self._row_bytes(link == "network"))
            for link, pairs_WW in topology.pairs.items()
        ]
        return RIDES * max(times, default=0.0)

    def replica_seconds(self, layout: ExpertLayout, topology: Topology) -> float:
        """Slots away from home: parameters there before the forward, gradients back after the backward."""
        bytes_WW = np.zeros((layout.num_ranks, layout.num_ranks))
        for rank, experts in enumerate(layout.slots):
            for expert in experts:
                if expert != -1 and (home := layout.home_of[expert][0]) != rank:
                    bytes_WW[home, rank] += self.expert_bytes
        both = self.transfer_seconds(bytes_WW, topology) + self.transfer_seconds(bytes_WW.T, topology)
        return (1 - self.replicas_hidden) * both

    def compute_seconds(self, load_W: Array) -> float:
        """The fullest rank's matrix products."""
        return float(load_W.max() * self.pair_seconds)

    def _link_seconds(self, link: str, size: float) -> float:
        rate = self.hardware.rate(link)
        return float(rate.latency + size / rate.bytes_per_second)


def _most(amount_WW: Array, pairs_WW: Array) -> float:
    """What the rank with most to send, or to receive, has over these pairs."""
    over_WW = np.where(pairs_WW, amount_WW, 0)
    return float(max(over_WW.sum(0).max(), over_WW.sum(1).max()))
