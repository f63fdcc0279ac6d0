"""How long rows travel between ranks, and parameters and gradients: rides and collectives.

    Travel(shape, hardware, candidate, per_node=8).ride("dispatch", "dispatch", "dispatch")

    rides          rows of `carpool.planner.model.routes` over each class of link; what transports over NCCL pack
    collectives    an all-gather's bytes over the slower of NVLink and the node's ports; between nodes a ring's steps

`carpool.planner.step.lengths` adds what computes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from carpool.planner.candidate import Candidate
from carpool.planner.machine.hardware import SPREAD, Hardware, LinkRate
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.events import Group
from carpool.planner.transports import transport_class

# Seconds of a step of NCCL's rings inside a node and from one node to the next, as NCCL itself reckons for large
# messages (src/graph/tuning.cc, hwLat of Ring, Simple). A ring of many nodes has as many steps as ranks, a tree twice
# as many as the logarithm of the nodes.
RING_INSIDE, RING_BETWEEN = 3.4e-6, 14e-6
# What kernels that write to peers reach of copies that no multiprocessor makes (docs/measurements.md).
OF_PUSH = 0.89
# A dispatch over NCCL: the host asks the device how many rows there are; rows are packed and unpacked.
NCCL_PLAN, NCCL_RIDE, PACKED = 0.3e-3, 0.1e-3, 4
# Tokens to each other node over those that a mean step needs, where their number is fixed (`NodeCapacity.fit`).
FIXED = 1.125
# Bytes of an element of a row in FP8: its own, and a float32 scale for 128 (docs/communication.md).
FP8 = 1 + 4 / 128
# What ranks wait for each other in a ride, although their loads are equal (docs/measurements.md: rides of whole steps
# take 12.3 ms beside 5.9 of their own).
MEETING = 0.13e-3


class Piece(NamedTuple):
    """One event to be (`events.py`), and two factors that say how far it may be off, by where its rate is from.

    Attributes:
        low, high: factors.
        fixed: seconds of it that do not grow with the work.
        group: who meets.
        stream: if not that of its kind.
    """

    name: str
    kind: str
    seconds: float
    low: float = 1.0
    high: float = 1.0
    fixed: float = 0.0
    group: Group | None = None
    stream: str | None = None

    def of_chunk(self, chunks: int) -> float:
        """Seconds of one of so many chunks: what is fixed stays, and the rest is divided."""
        return self.fixed + (self.seconds - self.fixed) / chunks


class Travel:
    """See the module's docstring.

    Args:
        per_node: GPUs of a node.
    """

    def __init__(
        self, shape: ModelShape, hardware: Hardware, candidate: Candidate, per_node: int, routes: Routes | None = None
    ) -> None:
        self.shape, self.hardware, self.candidate, self.per_node = shape, hardware, candidate, per_node
        self.routes, self.degrees = routes or Routes(), candidate.degrees
        self.tokens, self.element = candidate.rank_tokens, candidate.computed

    def members_per_node(self, axis: str) -> tuple[Group, int]:
        """The group of an axis, and how many of it are on one node."""
        ranks = self.degrees.ranks_along(0, axis)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        return Group(len(ranks), stride), sum(rank < self.per_node for rank in ranks)

    def _over(self, link: str, rate: LinkRate, size: float) -> tuple[float, float, tuple[float, float]]:
        """(seconds, of which latency, factors)"""
        return rate.latency + size / rate.bytes_per_second, rate.latency, SPREAD[self.hardware.link_source(link)]

    @property
    def load(self) -> tuple[float, float]:
        """Of the fullest rank over the mean, and replicas that the rank with most of them fetches or sends."""
        experts, ranks, spare = self.shape.num_experts, self.degrees.ep, self.candidate.spare
        if not spare.slots:
            return self.routes.fullest(experts, ranks), 0.0
        return self.routes.balanced(experts, ranks, spare.slots, spare.limit)

    def ride(self, verb: str, name: str, kind: str, plan: bool = False) -> Piece | None:
        """One dispatch or combine.

        Args:
            verb: of the codec: "dispatch", "combine", "dispatch_backward" or "combine_backward".
            plan: its plan is not known yet."""
        shape, degrees, transport = self.shape, self.degrees, self.candidate.transport
        if degrees.ep * degrees.etp == 1:
            return None
        group, per_node = self.members_per_node("ep")
        whole = shape.hidden * self.element * degrees.etp
        encoded = self.candidate.codecs.get(verb) == "fp8"
        row = whole * FP8 / self.element if encoded else whole
        if degrees.ep == 1:
            group, per_node = self.members_per_node("etp")
            inside, between, arrive = (1.0 if per_node > 1 else 0.0), (0.0 if per_node > 1 else 1.0), 1.0
        else:
            inside, between, arrive = self.routes.rows(transport, shape.choice, degrees.ep, per_node)
            # A row goes to every slice of its experts, of which the own rank's neighbours have some.
            inside += arrive / degrees.ep * (degrees.etp - 1) / degrees.etp
        fullest, moved = self.load
        hardware = self.hardware
        link, way = hardware.node_link, transport_class(transport)
        rate = hardware.rate(link)
        if way.writes_to_peers and hardware.push is not None:
            rate = LinkRate(OF_PUSH * hardware.push.bytes_per_second, 12e-6)
        inner = whole if self.candidate.codecs.get("inter_node") == "nodes" else row
        times = [self._over(link, rate, self.tokens * inside * inner * fullest)]
        in_turn, waits = way.hops_in_turn, self.candidate.waits
        packed = arrive if waits else 0.0
        if in_turn:
            # The first hop is one of NCCL, whether it is counted or not.
            packed += 1 + between
            between *= 1.0 if waits else FIXED
        if between:
            times.append(self._over("network", hardware.network, self.tokens * between * row * fullest))
        seconds = sum(one[0] for one in times) if in_turn else max(one[0] for one in times)
        low = sum(one[0] * one[2][0] for one in times) / sum(one[0] for one in times)
        high = sum(one[0] * one[2][1] for one in times) / sum(one[0] for one in times)
        fixed = sum(one[1] for one in times) if in_turn else max(one[1] for one in times)
        if encoded:
            # Read whole and written encoded, and the other way round where rows arrive.
            seconds += hardware.kernel("elementwise").seconds(0, self.tokens * (1 + arrive) * (whole + row))
        # Replicas come before experts compute, and their gradients go home after.
        spare = self.candidate.spare
        moves = {"dispatch": 1, "combine_backward": 0 if spare.saved else 1, "dispatch_backward": 1}.get(verb, 0)
        if moved and moves:
            over = ("network", hardware.network) if between else (link, rate)
            seconds += self._over(*over, moved * shape.expert_parameters * self.element)[0]
        if packed:
            extra = hardware.kernel("elementwise").seconds(0, PACKED * self.tokens * packed * row)
            seconds, fixed = seconds + NCCL_RIDE + extra + (NCCL_PLAN if plan and waits else 0), fixed + NCCL_RIDE
        return Piece(name, kind, seconds + MEETING, low, high, fixed + MEETING, group)

    def collective(
        self, name: str, kind: str, size: float, axis: str, stream: str | None = None, tree: bool = False
    ) -> Piece | None:
        """An all-gather to `size` bytes, or a reduction of them to shards, over an axis. None if that has one rank.

        `axis` may also be "fsdp and cp": ranks that shard non-expert parameters. `tree`: what all ranks get at last is
        the same, so that a tree can add it up, in fewer steps than a ring."""
        if axis == "fsdp and cp":
            group, per_node = self._sharing()
        else:
            group, per_node = self.members_per_node(axis)
        if group.size == 1 or size == 0:
            return None
        hardware, nodes = self.hardware, -(-group.size // max(per_node, 1))
        seconds, fixed, spread = self._over(
            hardware.node_link,
            hardware.gather_link,
            size * (per_node - 1) / per_node if nodes > 1 else size * (1 - 1 / group.size),
        )
        if nodes > 1:
            ports = 1 if hardware.shared_network else per_node
            between = self._over("network", hardware.network, size * (nodes - 1) / nodes / ports)
            seconds, fixed, spread = max((seconds, fixed, spread), between)
            steps = RING_BETWEEN * (nodes - 1) + RING_INSIDE * (group.size - nodes)
            if tree:
                inside = RING_INSIDE * (group.size / nodes - 1)
                steps = min(steps, 2 * (RING_BETWEEN * math.log2(nodes) + inside))
            seconds, fixed = seconds + steps, fixed + steps
        return Piece(name, kind, seconds, *spread, fixed, group, stream)

    def _sharing(self) -> tuple[Group, int]:
        degrees = self.degrees
        size = degrees.fsdp * degrees.cp
        return Group(size, degrees.tp), min(size, -(-self.per_node // degrees.tp))
