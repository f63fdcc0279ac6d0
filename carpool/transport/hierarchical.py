"""Two hops: a token crosses to a node once, and is passed on there to each rank that holds any of its experts.

    4 ranks, 2 on each node. Token 0 of rank 0 chose experts on ranks 2, 3 and 3:

        hop 1, between nodes    rank 0 -> rank 2    [x_0 | its choices on node 1]     one row for each other node
        hop 2, inside a node    rank 2 -> rank 2    [x_0 | its choices on rank 2]     one row for each rank there
                                rank 2 -> rank 3    [x_0 | its choices on rank 3]

Hop 1 joins the ranks of equal number in their nodes (a "rail"). Seen by a rail, a node is one rank that holds the
experts of all its ranks. What arrives names its choices by their slots in the node, which is what hop 2 is planned
with. On the way back the rank in the middle adds up the partial sums of its node in float32, rounds them to the rows'
dtype, and sends one row for each (token, node). Gradients go the same ways.

Cost per token: one row for each other node, and one for each rank that it visits, both ways. With 8 of 128 experts on
2 nodes of 8 ranks that is 1.0 row between nodes instead of 3.3 with `dedup`, if experts are chosen uniformly.

    hop 1    fixed      all tokens to each other node, or as many rows as steps need (`fixed.py`): no counts, the host
                        waits for nothing
             counted    those that chose experts there (`dedup.py`): the host waits for their number
    hop 2    nvlink     where every rank of every node can use it: the host waits for nothing either
             dedup      elsewhere

Which of them is taken is written in one place, `HierarchicalOptions.settled`. All are exact.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.2) sends a token once per node; HierMoE and Hybrid-EP sum there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from carpool.activations import Arena
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS
from carpool.transport.base import BufferOverflowError, bytes_of_rides
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import COUNT_BYTES
from carpool.transport.fixed import FixedRows
from carpool.transport.hierarchical_options import HierarchicalOptions
from carpool.transport.multi_hop import Hop, MultiHop
from carpool.transport.nodes import hops_of, why_not_nodes, why_not_several
from carpool.transport.nvlink import Buffers, NVLink, NVLinkOptions
from carpool.transport.options import TransportOptions
from carpool.transport.room import NodeRoom, Room, node_room
from carpool.transport.volume import Counts, Volume, one_row_per_rank, uniform_copies


class Hierarchical(MultiHop):
    """One row per (token, node) between nodes, one per (token, rank) inside; J = K. Each hop may have codecs.

    Raises:
        ValueError: the nodes of the group do not hold equally many consecutive ranks.
    """

    name = "hierarchical"
    options_class = HierarchicalOptions
    one_row_per_node = True
    between_nodes = True
    writes_to_peers = True

    @classmethod
    def own_options(cls, options: Any) -> HierarchicalOptions:
        if isinstance(options, NVLinkOptions):
            return HierarchicalOptions(options.max_tokens, options.codecs, nvlink=options)
        own: HierarchicalOptions = super().own_options(options)
        return own

    @classmethod
    def rows_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        """With counts in hop 1: what placement can improve."""
        topology.even_nodes()
        return _between(rank_TK, topology) + _inside(rank_TK, topology)

    @classmethod
    def copies_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        """Rows that reach experts. How many cross to other nodes depends on the topology as well."""
        return uniform_copies(num_experts, top_k, num_ranks)

    @classmethod
    def volume(
        cls,
        rank_TK: Sequence[Counts],
        topology: Topology,
        top_k: int,
        hidden: int,
        element_size: int,
        options: HierarchicalOptions | None = None,
    ) -> Volume:
        """Options that are settled say what both hops are; without them rows are counted in both."""
        topology.even_nodes()
        rail_WW, node_WW = (np.equal.outer(of, of) for of in (topology.number_of, topology.node_of))
        between_WW, inside_WW = _between(rank_TK, topology), _inside(rank_TK, topology)
        plan_WW = (rail_WW | node_WW) * COUNT_BYTES
        if options is not None and options.first_hop == "fixed":
            rows = options.capacity or options.step_tokens or options.max_tokens
            assert rows is not None
            between_WW = (rail_WW & ~node_WW) * rows
            plan_WW = node_WW * COUNT_BYTES
        if options is not None and options.inside == "nvlink":
            plan_WW = np.where(node_WW, 0, plan_WW)
        outer, inner = (PLAIN, PLAIN) if options is None else (options.codecs, options.codecs_inside)
        first_hop, second_hop = (
            bytes_of_rides(rows_WW, {verb: codecs.of(verb).row_bytes(hidden, element_size) for verb in VERBS}, top_k)
            for rows_WW, codecs in ((between_WW, outer), (inside_WW, inner))
        )
        return Volume(
            transport=cls.name,
            tokens_W=tuple(len(one) for one in rank_TK),
            rows_WW=between_WW + inside_WW,
            bytes_WW={"plan": plan_WW, **{verb: sent + second_hop[verb] for verb, sent in first_hop.items()}},
        )

    @classmethod
    def buffer_bytes(
        cls, options: HierarchicalOptions, num_ranks: int, hidden: int, element_size: int, top_k: int
    ) -> int:
        """Those of `nvlink` inside. Each of its ranks holds the rows of a rail, so they are about as large as for all
        ranks on one node."""
        if options.inside == "dedup" or options.max_tokens is None or NVLink.why_not(None):
            return 0
        return NVLink.buffer_bytes(options.nvlink, num_ranks, hidden, element_size, top_k)

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        return None

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        return why_not_nodes(group)

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        return why_not_several(topology)

    def __init__(
        self, group: dist.ProcessGroup | None, slots_per_rank: int, options: HierarchicalOptions | None = None
    ) -> None:
        options = options or HierarchicalOptions()
        hops = hops_of(group)
        node_slots = slots_per_rank * len(hops.node_ranks)
        between: FixedRows | Dedup
        if options.first_hop == "fixed":
            assert options.max_tokens is not None
            room = node_room(hops.rail, options.max_tokens, options.capacity, options.step_tokens)
            between = FixedRows(hops.rail, node_slots, options, room)
        else:
            between = Dedup(hops.rail, node_slots, options)
        inside: Dedup | NVLink
        if options.inside == "nvlink":
            inside = NVLink(hops.node, slots_per_rank, options.nvlink_inside(len(hops.rail_ranks)))
        else:
            inside = Dedup(hops.node, slots_per_rank, TransportOptions(codecs=options.codecs_inside))
        super().__init__(group, slots_per_rank, (Hop(between, hops.rail_ranks), Hop(inside, hops.node_ranks)))
        self.between, self.inside = between, inside
        self.graphable = isinstance(between, FixedRows) and isinstance(inside, NVLink)

    @property
    def buffers(self) -> Buffers | None:
        """Of `nvlink` inside the node."""
        return self.inside.buffers if isinstance(self.inside, NVLink) else None

    @property
    def arena(self) -> Arena | None:
        return self.inside.arena

    @property
    def node_room(self) -> NodeRoom | None:
        """Of hop 1, if it has a fixed size."""
        return self.between.room if isinstance(self.between, FixedRows) else None

    @property
    def rooms(self) -> tuple[Room, ...]:
        room = self.node_room
        return (*(() if room is None or not room.counted else (room,)), *self.inside.rooms)

    def check(self) -> None:
        """Raises:
        BufferOverflowError: more rows for another node than hop 1 has room for. All ranks of a group alike."""
        self.inside.check()
        if (room := self.node_room) is None or not (room.counted and room.noted):
            return
        needed = room.needed.clone()
        if self.group is not None:
            dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self.group)
        if (rows := int(needed.item())) > room.capacity:
            raise BufferOverflowError(
                f"rows had no place: transport 'hierarchical' sends {room.capacity} rows to each other node, and "
                f"{rows} were needed. The outputs and gradients since then are NaN. Raise capacity "
                "(HierarchicalOptions), or leave it out: then it suffices for all tokens",
                rows,
            )


def _between(rank_TK: Sequence[Counts], topology: Topology) -> Counts:
    """(W, W) rows of hop 1: of each token one to each other node that it visits."""
    sent_WW, node_W = np.zeros((len(rank_TK), len(rank_TK)), dtype=np.int64), np.array(topology.node_of)
    for rank, ranks_TK in enumerate(rank_TK):
        node_TK = np.where(ranks_TK < 0, -1, node_W[ranks_TK])
        for other in set(range(topology.num_nodes)) - {topology.node_of[rank]}:
            ahead = topology.ranks_of(other)[topology.number_of[rank]]
            sent_WW[rank, ahead] = np.sum(np.any(node_TK == other, axis=1))
    return sent_WW


def _inside(rank_TK: Sequence[Counts], topology: Topology) -> Counts:
    """(W, W) rows of hop 2: what came for a node from a rail, own tokens among them, goes on from there."""
    rail_WW, node_WW = (np.equal.outer(of, of) for of in (topology.number_of, topology.node_of))
    sent_WW: Counts = (rail_WW @ one_row_per_rank(rank_TK, len(rank_TK))) * node_WW
    return sent_WW
