"""How long one MoE layer takes: rides and the experts' matrix products. All of it is modelled.

Time of one layer, forward and backward, as the rank that is slowest needs it:

    4 rides (dispatch, combine, and the backward of each)
    + 3 x the forward's matrix products (forward, gradients of inputs, gradients of weights) of the fullest rank

A link takes `latency + bytes / bandwidth`; links of different kinds work at the same time, unless the transport uses
them in turn. A rank that sends 90 MB to GPUs of its node and 20 MB to other nodes needs, on H200s, max(12 + 281, 30 +
400) = 430 us, or 293 + 430 us in turn. Where the ranks of a node share one port, what the whole node sends counts, and
a rank that sends for all of them is no faster than it is alone.

The model ranks layouts and schedules. It is no forecast of a step: what is hidden behind other work counts in full."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from carpool.planner.machine.hardware import DEFAULT, NVLINK, Hardware
from carpool.replicas.slot_costs import LARGEST, WORK, Costs

if TYPE_CHECKING:
    from carpool.layout.topology import Link, Topology
    from carpool.transport.codecs import Codecs
    from carpool.transport.volume import Volume

Array = npt.NDArray[Any]

RIDES = 4  # dispatch and combine, forward and backward
GEMM_PASSES = 3  # forward, gradients of inputs, gradients of weights


def _between_any_ranks() -> str:
    """The transport that "auto" takes where nothing is known of the ranks."""
    from carpool.transport import choose_transport

    return choose_transport("auto", 2, 2)[0]


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
        speeds: of the ranks, against each other; their mean computes as fast as the hardware says. (): all are equal.
    """

    hidden: int = 2048
    expert_hidden: int = 1024
    element_size: int = 2
    tokens_per_rank: int = 8192
    hardware: Hardware = field(default=DEFAULT)
    transport: str = field(default_factory=_between_any_ranks)
    codecs: Codecs | None = None
    speeds: tuple[float, ...] = ()

    def speed_W(self, num_ranks: int) -> Array:
        """(W,) the speed of each rank, 1 on the mean."""
        if not self.speeds:
            return np.ones(num_ranks)
        if len(self.speeds) != num_ranks:
            raise ValueError(f"there are speeds of {len(self.speeds)} ranks, but {num_ranks} ranks")
        return np.array(self.speeds) / np.mean(self.speeds)

    @property
    def copies_per_node(self) -> bool:
        """Whether the transport sends one row per (token, node) between nodes, not one per (token, rank)."""
        from carpool.transport import find_transport

        return find_transport(self.transport).one_send_per_node

    @property
    def row_bytes(self) -> float:
        """Of a row inside a node, the mean over its four rides."""
        return self.row_bytes_over(network=False)

    def row_bytes_over(self, network: bool) -> float:
        """Of a row between nodes, or inside one, the mean over its four rides."""
        if self.codecs is None or (self.codecs.inter_node == "nodes" and not network):
            return self.hidden * self.element_size
        from carpool.transport.codecs import TOKEN_VERBS

        return sum(self.codecs.of(verb).row_bytes(self.hidden, self.element_size) for verb in TOKEN_VERBS) / RIDES

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
        inside = self.hardware.rate(NVLINK if NVLINK in topology.pairs else "node")
        slower = inside.bytes_per_second / self.hardware.network.bytes_per_second
        return slower * self.row_bytes_over(network=True) / self.row_bytes

    def transfer_seconds(self, bytes_WW: Array, topology: Topology) -> float:
        """Anything between ranks once, as the rank with most to send or receive over any kind of link needs it."""
        return max(self.link_seconds(bytes_WW, topology).values(), default=0.0)

    def link_seconds(self, bytes_WW: Array, topology: Topology) -> dict[Link, float]:
        """For each kind of link that anything travels over, what `transfer_seconds` says of it alone."""
        used = [link for link, joined_WW in topology.pairs.items() if np.any(bytes_WW * joined_WW)]
        return {link: float(self.seconds_over(link, bytes_WW, topology)) for link in used}

    def ride_seconds(self, rows_WW: Array, topology: Topology) -> float:
        """All rides of a layer. `rows_WW`: rows that the transport sends from rank to rank in one dispatch."""
        times = [
            float(self.seconds_over(link, rows_WW * self.row_bytes_over(link == "network"), topology))
            for link in topology.pairs
        ]
        return RIDES * self._of_links(times)

    def volume_seconds(self, volume: Volume, topology: Topology) -> dict[str, float]:
        """What one forward and backward of a layer send, verb by verb (`carpool.placement.predicted_volume`)."""
        hops = volume.hops or (volume.bytes_WW,)
        return {
            verb: sum(self._of_links(self.link_seconds(hop[verb], topology).values()) for hop in hops)
            for verb in volume.bytes_WW
        }

    def _of_links(self, times: Collection[float]) -> float:
        """Of a ride over links of several kinds that take so long."""
        from carpool.transport import find_transport

        return sum(times) if find_transport(self.transport).hops_in_turn else max(times, default=0.0)

    def compute_seconds(self, load_W: Array) -> float:
        """Matrix products of the rank that is last: the fullest, if all are equally fast."""
        return float((load_W / self.speed_W(len(load_W))).max() * self.pair_seconds)

    def seconds_over(self, link: Link, bytes_WW: Array, topology: Topology) -> Array:
        """Seconds of (..., W, W) bytes over a kind of link, (...): as the rank with most to send, or to receive, needs
        them. Of a port that the ranks of a node share, as their mean does, and no rank faster than it can alone."""
        rate, over_WW = self.hardware.rate(link), np.where(topology.pairs[link], bytes_WW, 0)
        sent_W2 = np.stack([over_WW.sum(-2), over_WW.sum(-1)], axis=-1)
        if link != "network" or not self.hardware.shared_network:
            return np.asarray(rate.latency + sent_W2.max((-2, -1)) / rate.bytes_per_second)
        of_nodes = [sent_W2[..., topology.ranks_of(node), :].mean(-2).max(-1) for node in range(topology.num_nodes)]
        seconds = rate.latency + np.max(of_nodes, axis=0) / rate.bytes_per_second
        if (alone := self.hardware.network_alone) is None:
            return np.asarray(seconds)
        both_ways = sent_W2.sum(-1).max(-1) / 2
        return np.maximum(seconds, alone.latency + both_ways / alone.bytes_per_second)


def slot_costs(
    hardware: Hardware, topology: Topology, choice_flops: float, row_bytes: float, expert_bytes: float
) -> Costs:
    """What plans of spare slots weigh on this hardware (`carpool.replicas.slot_plan`).

    Args:
        topology: of the expert-parallel group; the slowest of its links counts.
        choice_flops: of one choice, forward and backward.
        row_bytes: of one choice's rides, one after the other: of those that it shares, its part.
        expert_bytes: of an expert that is fetched, fetched again, and whose gradient goes home.
    """
    slowest = min((hardware.rate(link).bytes_per_second for link in topology.pairs), default=math.inf)
    unit = choice_flops / hardware.flops / WORK
    trip, fetch = row_bytes / slowest / unit, expert_bytes / slowest / unit
    return Costs(round(min(trip, LARGEST["trip"])), round(min(fetch, LARGEST["fetch"])))
