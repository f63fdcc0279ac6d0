"""All-to-alls in steps, one row per (token, expert): contenders of `hierarchical`, which sends a token once to a node.

    4 ranks, 2 on each node; a row goes from rank 0 to an expert on rank 3

    1d     0 -> 0, the leader of its node    0 -> 2, leader to leader    2 -> 3, inside
    2d     0 -> 1, inside, to the rank of the destination's number       1 -> 3, between nodes
    2dh    as 2d, in blocks that are all as large as the largest

They save messages, not bytes: between nodes a rank talks to N others instead of W, and `1d` to one per node. Every row
takes two or three hops instead of one. With `1d` all that leaves a node goes through one rank.

`2dh` tells all what each sends to each, and fills blocks up: those for one rank lie side by side ("aligned"), and both
exchanges are of even size.

Each hop is an all-to-all over the ranks of a node or over those of equal number in their nodes, and counts slots as
they are behind its ranks. Nothing is lost.

Sources: 1d: HetuMoE (arXiv 2203.14685, section 3.2). 2d: DeepSpeed-MoE (arXiv 2201.05596, section 5.1). 2dh: Tutel
(arXiv 2206.03382, section 3.4), which has aligned blocks of one capacity; here they are as large as they must be.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.kernels.device import ordered_sum
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS, Traffic
from carpool.transport.alltoall import AllToAll
from carpool.transport.base import bytes_of_rides
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.exchange import COUNT_BYTES, ExchangeRoute, SendList, Sizes
from carpool.transport.multi_hop import Hop, MultiHop
from carpool.transport.nodes import hops_of, why_not_nodes, why_not_several
from carpool.transport.options import TransportOptions
from carpool.transport.volume import Counts, Volume, one_send_per_choice

SIZE_BYTES = 8


class AlignedAllToAll(AllToAll):
    """An all-to-all whose blocks are filled up to the largest of the group."""

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[ExchangeRoute]:
        here_C = self.whether_here(slot_C)
        count_CW = torch.stack([self.count_sends(here_WTK) for here_WTK in here_C])
        count_FW = count_CW  # first those of rank 0
        if self.num_ranks > 1:
            count_FW = count_CW.new_empty(self.num_ranks * len(slot_C), self.num_ranks)
            # Newer torch calls it all_gather_single and warns whoever uses the name that torch 2.11 knows.
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            gather(count_FW, count_CW, group=self.group)
        counts = count_FW.view(self.num_ranks, len(slot_C), self.num_ranks).tolist()
        traffic.add("plan", [1] * self.num_ranks, SIZE_BYTES * self.num_ranks * len(slot_C))
        size_CW, pairs_C = [], []
        for piece in range(len(slot_C)):
            size_CW.append([max(max(of_rank[piece]) for of_rank in counts)] * self.num_ranks)
            pairs_C.append(sum(of_rank[piece][self.rank] for of_rank in counts))
        sizes = Sizes(size_CW, size_CW, counts[self.rank], pairs_C)
        return self._routes(slot_C, weight_C, here_C, sizes, traffic, together)

    def list_sends(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> SendList:
        choices, top_k, block = slot_TK.numel(), slot_TK.shape[1], num_rows // self.num_ranks
        key_C = slot_TK.reshape(-1)
        key_C = torch.where(key_C < 0, self.num_ranks * self.slots_per_rank, key_C)
        order_C = torch.argsort(key_C, stable=True)
        rank_C = key_C[order_C].div(self.slots_per_rank, rounding_mode="floor")
        count_W = here_WTK.sum((1, 2))
        before_W = torch.cat([count_W.cumsum(0) - count_W, count_W.sum().view(1)])
        place_C = rank_C * block + torch.arange(choices, device=slot_TK.device) - before_W[rank_C]
        # The last place is for choices without an expert.
        choice_N = order_C.new_full((num_rows + 1,), choices)
        choice_N.scatter_(0, torch.where(rank_C == self.num_ranks, num_rows, place_C), order_C)
        choice_N = choice_N[:num_rows]
        slot_N = F.pad(slot_TK.reshape(-1), (0, 1), value=-1)[choice_N]
        return SendList(
            token_N=choice_N // max(1, top_k),
            slot_NJ=torch.where(slot_N < 0, -1, slot_N % self.slots_per_rank).int().unsqueeze(1),
            choice_NJ=choice_N.unsqueeze(1),
        )

    def select_tokens(self, x_TH: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        return F.pad(x_TH, (0, 0, 0, 1))[token_N]

    def tokens_to_send(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        return self.select_tokens(x_TH, route.token_N)

    def sum_returned(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        return ordered_sum(rows_NH, route.token_N, route.num_tokens + 1)[: route.num_tokens]


class Step(NamedTuple):
    """What a hop sends: (W, W) rows, between which ranks it exchanges sizes, bytes of these, and whether it crosses to
    other nodes."""

    rows_WW: Counts
    joined_WW: Counts
    size_bytes: int
    between: bool


class Stepwise(MultiHop):
    """Base of the three; J = 1."""

    options_class = TransportOptions

    @classmethod
    @abstractmethod
    def steps(cls, rows_NLNL: Counts) -> list[Step]:
        """What each hop sends.

        Args:
            rows_NLNL: rows from rank l of node n to rank l' of node n'."""

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        total: Counts = np.sum([step.rows_WW for step in cls._steps(rank_TK, topology)], axis=0)
        return total

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        """Rows that reach experts."""
        return float(top_k)

    @classmethod
    def choices_per_send(cls, top_k: int) -> int:
        return 1

    @classmethod
    def volume(
        cls,
        rank_TK: Sequence[Counts],
        topology: Topology,
        top_k: int,
        hidden: int,
        element_size: int,
        options: TransportOptions | None = None,
    ) -> Volume:
        hops: list[dict[str, Counts]] = []
        codecs = PLAIN if options is None else options.codecs
        for step in cls._steps(rank_TK, topology):
            own = codecs if step.between or codecs.inter_node == "all" else PLAIN
            row = {verb: own.of(verb).row_bytes(hidden, element_size) for verb in VERBS}
            hops.append({"plan": step.joined_WW * step.size_bytes, **bytes_of_rides(step.rows_WW, row, 1)})
        bytes_WW = {verb: np.sum([hop[verb] for hop in hops], axis=0) for verb in VERBS}
        tokens_W = tuple(len(one) for one in rank_TK)
        return Volume(cls.name, tokens_W, cls.tokens_sent(rank_TK, topology), bytes_WW, tuple(hops))

    @classmethod
    def _steps(cls, rank_TK: Sequence[Counts], topology: Topology) -> list[Step]:
        num_ranks, num_nodes = topology.num_ranks, topology.even_nodes()
        shape = (num_nodes, num_ranks // num_nodes) * 2
        return cls.steps(one_send_per_choice(rank_TK, num_ranks).reshape(shape))

    @classmethod
    def why_not(cls, group: dist.ProcessGroup | None) -> str | None:
        return why_not_nodes(group)

    @classmethod
    def why_not_on(cls, topology: Topology) -> str | None:
        return why_not_several(topology)

    @classmethod
    def why_no_codecs(cls, codecs: Codecs) -> str | None:
        return None


def _own_options(options: TransportOptions | None) -> tuple[TransportOptions, TransportOptions]:
    """For hops between nodes, and inside them."""
    codecs = PLAIN if options is None else options.codecs
    return TransportOptions(codecs=codecs), TransportOptions(codecs=PLAIN if codecs.inter_node == "nodes" else codecs)


def _inside(rows_NLL: Counts, rest: bool) -> Counts:
    """(W, W) of (N, L, L) rows inside nodes. rest: those that stay on their rank count."""
    num_nodes, per_node, _ = rows_NLL.shape
    rows = np.zeros((num_nodes, per_node, num_nodes, per_node), dtype=np.int64)
    rows[np.arange(num_nodes), :, np.arange(num_nodes)] = rows_NLL
    return _by_rank(rows, rest)


def _between(rows_LNN: Counts, rest: bool) -> Counts:
    """(W, W) of (L, N, N) rows between ranks of equal number."""
    per_node, num_nodes, _ = rows_LNN.shape
    rows = np.zeros((num_nodes, per_node, num_nodes, per_node), dtype=np.int64)
    rows[:, np.arange(per_node), :, np.arange(per_node)] = rows_LNN
    return _by_rank(rows, rest)


def _by_rank(rows_NLNL: Counts, rest: bool) -> Counts:
    num_ranks = rows_NLNL.shape[0] * rows_NLNL.shape[1]
    rows_WW = rows_NLNL.reshape(num_ranks, num_ranks)
    return rows_WW if rest else rows_WW * ~np.eye(num_ranks, dtype=bool)


class AllToAll1D(Stepwise):
    """By the leaders of nodes: gather, exchange, scatter."""

    name = "1d"

    @classmethod
    def steps(cls, rows_NLNL: Counts) -> list[Step]:
        num_nodes, per_node = rows_NLNL.shape[:2]
        node, rail = np.ones((num_nodes, per_node, per_node), int), np.ones((per_node, num_nodes, num_nodes), int)
        up, across, down = np.zeros_like(node), np.zeros_like(rail), np.zeros_like(node)
        up[:, :, 0] = rows_NLNL.sum((2, 3))
        across[0] = rows_NLNL.sum((1, 3))
        down[:, 0] = rows_NLNL.sum((0, 1))
        return [
            Step(_inside(up, False), _inside(node, False), COUNT_BYTES, False),
            Step(_between(across, False), _between(rail, False), COUNT_BYTES, True),
            Step(_inside(down, True), _inside(node, True), COUNT_BYTES, False),
        ]

    def __init__(
        self, group: dist.ProcessGroup | None, slots_per_rank: int, options: TransportOptions | None = None
    ) -> None:
        hops, (between, inside) = hops_of(group), _own_options(options)
        node_slots = slots_per_rank * len(hops.node_ranks)
        # Seen from inside a node, its first rank holds all slots of all nodes.
        up = AllToAll(hops.node, node_slots * len(hops.rail_ranks), inside)
        across, down = AllToAll(hops.rail, node_slots, between), AllToAll(hops.node, slots_per_rank, inside)
        every = (Hop(up, hops.node_ranks), Hop(across, hops.rail_ranks), Hop(down, hops.node_ranks))
        super().__init__(group, slots_per_rank, every)


class AllToAll2D(Stepwise):
    """Inside the node first, then between nodes."""

    name = "2d"
    hop_class: type[AllToAll] = AllToAll

    @classmethod
    def steps(cls, rows_NLNL: Counts) -> list[Step]:
        num_nodes, per_node = rows_NLNL.shape[:2]
        node, rail = np.ones((num_nodes, per_node, per_node), int), np.ones((per_node, num_nodes, num_nodes), int)
        inside, between = rows_NLNL.sum(2), rows_NLNL.sum(1).transpose(2, 0, 1)
        return [
            Step(_inside(inside, False), _inside(node, False), COUNT_BYTES, False),
            Step(_between(between, True), _between(rail, True), COUNT_BYTES, True),
        ]

    def __init__(
        self, group: dist.ProcessGroup | None, slots_per_rank: int, options: TransportOptions | None = None
    ) -> None:
        hops, (between, inside) = hops_of(group), _own_options(options)
        self.num_nodes, self.per_node = len(hops.rail_ranks), len(hops.node_ranks)
        # Seen from inside a node, a rank holds the slots of all ranks of its number.
        first = self.hop_class(hops.node, slots_per_rank * self.num_nodes, inside)
        second = self.hop_class(hops.rail, slots_per_rank, between)
        super().__init__(group, slots_per_rank, (Hop(first, hops.node_ranks), Hop(second, hops.rail_ranks)))

    def renumbered(self, slot_TK: torch.Tensor) -> torch.Tensor:
        """(node, number, slot) as (number, node, slot)."""
        rank_TK = slot_TK.div(self.slots_per_rank, rounding_mode="floor")
        other_TK = rank_TK % self.per_node * self.num_nodes + rank_TK.div(self.per_node, rounding_mode="floor")
        return torch.where(slot_TK < 0, -1, other_TK * self.slots_per_rank + slot_TK % self.slots_per_rank)


class AllToAll2DH(AllToAll2D):
    """As `2d`, in blocks of equal size."""

    name = "2dh"
    hop_class = AlignedAllToAll

    @classmethod
    def steps(cls, rows_NLNL: Counts) -> list[Step]:
        num_nodes, per_node = rows_NLNL.shape[:2]
        found = []
        for step, number, spread in zip(
            super().steps(rows_NLNL), (per_node, num_nodes), (_inside, _between), strict=True
        ):
            blocks = rows_NLNL.sum(2) if spread is _inside else rows_NLNL.sum(1).transpose(2, 0, 1)
            rows = np.broadcast_to(blocks.max((1, 2), keepdims=True), blocks.shape)
            found.append(Step(spread(rows, spread is _between), step.joined_WW, SIZE_BYTES * number, step.between))
        return found
