"""Two hops: a token crosses to a node once, and is passed on there to each rank that holds any of its experts.

    4 ranks, 2 on each node. Token 0 of rank 0 chose experts on ranks 2, 3 and 3:

        hop 1, between nodes    rank 0 -> rank 2    [x_0 | its choices on node 1]     one row for each other node
        hop 2, inside a node    rank 2 -> rank 2    [x_0 | its choices on rank 2]     one row for each rank there
                                rank 2 -> rank 3    [x_0 | its choices on rank 3]

Hop 1 joins the ranks of equal number in their nodes (a "rail"). Seen by a rail, a node is one rank that holds the
experts of all its ranks; so hop 1 is `dedup` over the rail, and what arrives names its choices by their slots in the
node, which is what `dedup` inside the node plans hop 2 with. On the way back the rank in the middle adds up the
partial sums of its node in float32, rounds them to the rows' dtype, and sends one row for each (token, node).
Gradients go the same ways.

Cost per token: one row for each other node, and one for each rank that it visits, both ways. With 8 of 128 experts on
2 nodes of 8 ranks that is 1.0 row between nodes instead of 3.3 with `dedup`, if experts are chosen uniformly.

Both hops exchange exact counts, so the host waits in a plan: for each hop, and for what is counted. A first hop of
fixed size (T rows for each other node) would need no counts, but the second, as long as it is `dedup`, waits for the
host all the same.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.2) sends a token once per node; HierMoE and Hybrid-EP sum there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.layout.uniform import uniform_copies
from carpool.observe.traffic import Traffic
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES, Pending, Route, Transport
from carpool.transport.codecs import PLAIN, ROW_VERBS, Codecs
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import COUNT_BYTES, ExchangeRoute
from carpool.transport.nodes import hops_of, topology_of
from carpool.transport.options import TransportOptions
from carpool.transport.volume import Counts, Volume, one_row_per_rank


class HopTraffic(Traffic):
    """Counts what one hop sends, in the layer's counts.

    Args:
        layer: the layer's counts, by rank of the expert-parallel group.
        ranks: of the hop's group, by their number in the expert-parallel group.
        own: this rank's number there. None: rows that stay on this rank count too.
    """

    def __init__(self, layer: Traffic, ranks: Sequence[int], own: int | None) -> None:
        self._layer, self._ranks, self._own = layer, ranks, own

    def add(self, verb: str, rows_W: Sequence[int], row_bytes: int) -> None:
        rows = [0] * self._layer.num_ranks
        for rank, count in zip(self._ranks, rows_W, strict=True):
            rows[rank] = 0 if rank == self._own else count
        self._layer.add(verb, rows, row_bytes)

    def add_baseline(self, verb: str, choices_W: Sequence[int], row_bytes: int) -> None:
        """The ride counts it, once for both hops."""


@dataclass(kw_only=True)
class HierarchicalRoute(Route):
    """Attributes:
    between, inside: the routes of the two hops.
    """

    between: ExchangeRoute
    inside: ExchangeRoute

    def again(self) -> Self:
        return replace(self, between=self.between.again(), inside=self.inside.again())

    def count_baseline(self, way: Literal["out", "back"], row: torch.Tensor, choice_bytes: int) -> None:
        row_bytes = row.shape[1] * row.element_size()
        self.traffic.add_baseline(self.verb(way), self.choices_W, row_bytes + choice_bytes)


class Hierarchical(Transport):
    """One row per (token, node) between nodes, one per (token, rank) inside; J = K. Each hop may have codecs.

    Raises:
        ValueError: the nodes of the group do not hold equally many consecutive ranks.
    """

    name = "hierarchical"
    anywhere = False
    options_class = TransportOptions
    one_row_per_node = True

    @classmethod
    def rows_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        num_ranks, num_nodes = topology.num_ranks, topology.even_nodes()
        per_node = num_ranks // num_nodes
        node_TK = [np.where(ranks < 0, -1, ranks // per_node) for ranks in rank_TK]
        rows_WN = np.array([[np.sum(np.any(of == node, axis=1)) for node in range(num_nodes)] for of in node_TK])
        sent_WW = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        for rank in range(num_ranks):
            node, number = divmod(rank, per_node)
            for other in set(range(num_nodes)) - {node}:
                sent_WW[rank, other * per_node + number] = rows_WN[rank, other]
            # What came for its node from the ranks of its number, its own tokens among them, goes on from here.
            held = [rank_TK[other * per_node + number] for other in range(num_nodes)]
            sent_WW[rank] += _to_node(held, node, per_node, num_ranks)
        return sent_WW

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
        options: Any = None,
    ) -> Volume:
        volume = super().volume(rank_TK, topology, top_k, hidden, element_size, options)
        number_W = np.arange(topology.num_ranks) % (topology.num_ranks // topology.even_nodes())
        inside_WW = np.equal.outer(topology.node_of, topology.node_of)
        joined_WW = inside_WW | np.equal.outer(number_W, number_W)
        bytes_WW = {**volume.bytes_WW, "plan": joined_WW * COUNT_BYTES}
        if options is not None and options.codecs.hop == "nodes":
            plain = super().volume(rank_TK, topology, top_k, hidden, element_size).bytes_WW
            for verb in ROW_VERBS:
                bytes_WW[verb] = np.where(inside_WW, plain[verb], bytes_WW[verb])
        return replace(volume, bytes_WW=bytes_WW)

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        return None

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        if group is None:
            return None
        topology = topology_of(group)
        if topology.num_nodes == 1:
            return (
                f"by {topology.source} all {topology.num_ranks} ranks of the expert-parallel group are on one node, "
                "and it needs several: raise parallelism.ep_size, or set parallelism.ranks_per_node"
            )
        try:
            topology.even_nodes()
        except ValueError as error:
            return str(error)
        return None

    def __init__(
        self, group: dist.ProcessGroup | None, slots_per_rank: int, options: TransportOptions | None = None
    ) -> None:
        super().__init__(group, slots_per_rank)
        self.hops = hops_of(group)
        codecs = PLAIN if options is None else options.codecs
        # Seen by a rail, a node is one rank with the slots of all its ranks.
        self.between = Dedup(
            self.hops.rail, slots_per_rank * len(self.hops.node_ranks), TransportOptions(codecs=codecs)
        )
        inside = PLAIN if codecs.hop == "nodes" else codecs
        self.inside = Dedup(self.hops.node, slots_per_rank, TransportOptions(codecs=inside))

    @property
    def processors(self) -> int:
        return max(self.between.processors, self.inside.processors)

    def plan(self, slot_TK: torch.Tensor, weight_TK: torch.Tensor, traffic: Traffic) -> HierarchicalRoute:
        return self.plan_pieces([slot_TK], [weight_TK], traffic)[0]

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[HierarchicalRoute]:
        """Pieces share counts and choices. Rows and gradients do not share messages: the second hop of a piece would
        wait for the first of another."""
        ranks_W11 = torch.arange(self.num_ranks, device=slot_C[0].device).view(-1, 1, 1)
        chosen = [(s.div(self.slots_per_rank, rounding_mode="floor") == ranks_W11).sum((1, 2)) for s in slot_C]
        between = self.between.plan_pieces(slot_C, weight_C, HopTraffic(traffic, self.hops.rail_ranks, self.rank))
        arrived = self.between.exchange_choices(between)
        inside = self.inside.plan_pieces(
            [slot_RK for slot_RK, _ in arrived],
            [weight_RK for _, weight_RK in arrived],
            HopTraffic(traffic, self.hops.node_ranks, None),
        )
        self.between.send_gradients_apart(between)
        return [
            HierarchicalRoute(
                num_tokens=outer.num_tokens,
                top_k=outer.top_k,
                num_rows=inner.num_rows,
                choices_per_row=inner.choices_per_row,
                num_pairs=inner.num_pairs,
                choices_W=tuple(choices_W),
                traffic=traffic,
                between=outer,
                inside=inner,
            )
            for outer, inner, choices_W in zip(between, inside, torch.stack(chosen).tolist(), strict=True)
        ]

    def dispatch(self, x_TH: torch.Tensor, route: HierarchicalRoute) -> Pending:
        route.count_baseline("out", x_TH, CHOICE_BYTES)
        there = self.between.dispatch_rows(x_TH, route.between)
        return Pending(lambda: self.inside.dispatch(there.wait().data, route.inside).wait())

    def dispatch_again(self, x_TH: torch.Tensor, route: HierarchicalRoute) -> Pending:
        route.count_baseline("out", x_TH, 0)
        there = self.between.dispatch_again(x_TH, route.between)
        return Pending(lambda: self.inside.dispatch_again(there.wait().data, route.inside).wait())

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: HierarchicalRoute) -> Pending:
        route.backward = True
        route.count_baseline("out", dy_TH, 0)
        there = self.between.dispatch_gradients(dy_TH, route.between)
        return Pending(lambda: self.inside.dispatch_gradients(there.wait().data, route.inside).wait())

    def combine(self, route: HierarchicalRoute, partial_RH: torch.Tensor) -> Pending:
        route.count_baseline("back", partial_RH, 0)
        node, dtype = self.inside.combine(route.inside, partial_RH), partial_RH.dtype
        return Pending(lambda: self.between.combine(route.between, node.wait().to(dtype)).wait())

    def combine_gradients(self, route: HierarchicalRoute, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Pending:
        route.count_baseline("back", dx_RH, GRADIENT_BYTES)
        node, dtype = self.inside.combine_gradients(route.inside, dx_RH, dweight_RJ), dx_RH.dtype

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            dx_NH, dweight_NK = node.wait()
            home: tuple[torch.Tensor, torch.Tensor] = self.between.combine_gradients(
                route.between, dx_NH.to(dtype), dweight_NK
            ).wait()
            return home

        return Pending(finish)


def _to_node(held: Sequence[Counts], node: int, per_node: int, num_ranks: int) -> Counts:
    """(W,) rows that a rank of a node sends on to each rank of it, of the tokens that it holds."""
    ranks = one_row_per_rank(held, num_ranks).sum(0)
    ranks[np.arange(num_ranks) // per_node != node] = 0
    return ranks
