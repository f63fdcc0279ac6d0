"""Two hops: a token is sent to a node once, and distributed there to each rank that holds any of its experts.

    4 ranks, 2 on each node. Token 0 of rank 0 chose experts on ranks 2, 3 and 3:

        hop 1, inter-node    rank 0 -> rank 2    [x_0 | its choices on node 1]     one send to each other node
        hop 2, intra-node    rank 2 -> rank 2    [x_0 | its choices on rank 2]     one send to each rank there
                             rank 2 -> rank 3    [x_0 | its choices on rank 3]

Hop 1 joins the ranks of equal number in their nodes (a "rail"). To a rail, a node looks like one rank that holds the
experts of all its ranks. The choices of a token arrive as slots of the node, from which hop 2 is planned. In the
combine the forwarding rank adds up the partial outputs of its node in float32, rounds them to the tokens' dtype, and
sends one partial output per token and node. Gradients take the same hops.

Cost per token: one send to each other node, and one to each rank that it visits, each way. With 8 of 128 experts on 2
nodes of 8 ranks that is 1.0 inter-node send instead of 3.3 with `dedup`, if experts are chosen uniformly.

    hop 1    fixed      all tokens to each other node, or as many as steps need (`FixedSizeDedup`): nothing is counted,
                        and the host does not wait
             counted    those that chose experts there (`dedup.py`): the host waits for their number
    hop 2    nvlink     where every rank of every node can use it: the host does not wait either
             dedup      elsewhere

`HierarchicalOptions.settled` chooses. All are exact.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.2) sends a token once per node; HierMoE and Hybrid-EP sum there.

**Hop 1 of fixed size** (`FixedSizeDedup`). A rank sends another at most as many tokens as it has. So it sends them all,
padded to the largest number of tokens of any rank, and no counts are exchanged:

    3 tokens, capacity 4, 2 ranks; tokens 0 and 2 chose experts on rank 1

        rank 0 (own)    x_0  x_1  x_2          not sent
        rank 1          x_0  x_1  x_2  -       with slots [4, .], [-1, -1], [9, .], [-1, -1]

Only tokens and choices are sent, the host never waits, and shapes are static. The cost is tokens that no expert reads.
If K experts of many are chosen uniformly from N ranks, their share is (1 - 1/N)^K: with K = 8 0.4 % for 2 ranks, 10 %
for 4. Placement makes it larger.

So the capacity may be smaller than the number of tokens (`carpool.transport.token_capacity`). Then only tokens that
chose experts there are sent, in order, and the remaining places are padding:

    capacity 2      rank 1          x_0  x_2       with slots [4, .], [9, .]

If the capacity is too small, the routing weights of all tokens of this rank are NaN, and so are its MoE outputs.
Outputs and gradients do not depend on the capacity, bit for bit.

Evaluation and generation count (`NodeCapacity.whole`): a decoded token would otherwise be sent with the padding of a
whole step, and nothing of them is captured, so that the host may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.activations import Arena
from carpool.layout.topology import Topology
from carpool.metrics.counters import VERBS, Traffic
from carpool.transport.base import BufferOverflowError, bytes_of_rides
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.dedup import Dedup
from carpool.transport.exchange import COUNT_BYTES, ExchangeRoute, SendList, Sizes
from carpool.transport.hierarchical_options import HierarchicalOptions
from carpool.transport.multi_hop import Hop, MultiHop
from carpool.transport.nodes import hops_of, why_not_nodes, why_not_several
from carpool.transport.nvlink import Buffers, NVLink, NVLinkOptions
from carpool.transport.options import TransportOptions
from carpool.transport.token_capacity import NodeCapacity, TokenCapacity, node_capacity
from carpool.transport.volume import Counts, Volume, one_send_per_rank, uniform_ranks_per_token


class Hierarchical(MultiHop):
    """Sends a token once per node, and there once per rank; J = K. Each hop may have codecs.

    Raises:
        ValueError: the nodes of the group do not hold equally many consecutive ranks.
    """

    name = "hierarchical"
    options_class = HierarchicalOptions
    one_send_per_node = True
    between_nodes = True
    writes_to_peers = True
    graphable = True

    @classmethod
    def own_options(cls, options: Any) -> HierarchicalOptions:
        if isinstance(options, NVLinkOptions):
            return HierarchicalOptions(options.max_tokens, options.codecs, nvlink=options)
        own: HierarchicalOptions = super().own_options(options)
        return own

    @classmethod
    def tokens_sent(cls, rank_TK: Sequence[Counts], topology: Topology) -> Counts:
        """With counts in hop 1: the volume that placement can improve."""
        topology.even_nodes()
        return _between(rank_TK, topology) + _inside(rank_TK, topology)

    @classmethod
    def ranks_per_token(cls, num_experts: int, top_k: int, num_ranks: int) -> float:
        """Ranks whose experts a token reaches. The number of inter-node sends depends on the topology as well."""
        return uniform_ranks_per_token(num_experts, top_k, num_ranks)

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
        """Options from `settled` define both hops; without options both hops are counted."""
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
        """Those of the intra-node `nvlink`. Each rank receives the tokens of a rail, so they are about as large as if
        all ranks were on one node."""
        if options.inside == "dedup" or options.max_tokens is None or NVLink.why_not(None):
            return 0
        return NVLink.buffer_bytes(options.nvlink, num_ranks, hidden, element_size, top_k)

    @classmethod
    def planned_buffer_bytes(cls, tokens: int, num_ranks: int, row_bytes: int, top_k: int) -> int:
        return NVLink.planned_buffer_bytes(tokens, num_ranks, row_bytes, top_k)

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
        between: FixedSizeDedup | Dedup
        if options.first_hop == "fixed":
            assert options.max_tokens is not None
            limit = node_capacity(hops.rail, options.max_tokens, options.capacity, options.step_tokens)
            between = FixedSizeDedup(hops.rail, node_slots, options, limit)
        else:
            between = Dedup(hops.rail, node_slots, options)
        inside: Dedup | NVLink
        if options.inside == "nvlink":
            inside = NVLink(hops.node, slots_per_rank, options.nvlink_inside(len(hops.rail_ranks)))
        else:
            inside = Dedup(hops.node, slots_per_rank, TransportOptions(codecs=options.codecs_inside))
        super().__init__(group, slots_per_rank, (Hop(between, hops.rail_ranks), Hop(inside, hops.node_ranks)))
        self.between, self.inside = between, inside
        self.graphable = isinstance(between, FixedSizeDedup) and isinstance(inside, NVLink)

    @property
    def buffers(self) -> Buffers | None:
        """The buffers of the intra-node `nvlink`; None without it."""
        return self.inside.buffers if isinstance(self.inside, NVLink) else None

    @property
    def arena(self) -> Arena | None:
        return self.inside.arena

    @property
    def node_capacity(self) -> NodeCapacity | None:
        """The capacity of hop 1, if it has a fixed size."""
        return self.between.node_capacity if isinstance(self.between, FixedSizeDedup) else None

    @property
    def capacities(self) -> tuple[TokenCapacity, ...]:
        limit = self.node_capacity
        return (*(() if limit is None or not limit.counted else (limit,)), *self.inside.capacities)

    def check(self) -> None:
        """Raises:
        BufferOverflowError: more tokens for another node than the capacity of hop 1. On all ranks of a group."""
        self.inside.check()
        if (limit := self.node_capacity) is None or not (limit.counted and limit.noted):
            return
        needed = limit.needed.clone()
        if self.group is not None:
            dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self.group)
        if (tokens := int(needed.item())) > limit.capacity:
            raise BufferOverflowError(
                f"tokens did not fit: transport 'hierarchical' sends {limit.capacity} tokens to each other node, and "
                f"{tokens} were needed. The outputs and gradients since then are NaN. Raise capacity "
                "(HierarchicalOptions), or leave it out: then it suffices for all tokens",
                tokens,
            )


def _between(rank_TK: Sequence[Counts], topology: Topology) -> Counts:
    """(W, W) sends of hop 1: one per token to each other node that it visits."""
    sent_WW, node_W = np.zeros((len(rank_TK), len(rank_TK)), dtype=np.int64), np.array(topology.node_of)
    for rank, ranks_TK in enumerate(rank_TK):
        node_TK = np.where(ranks_TK < 0, -1, node_W[ranks_TK])
        for other in set(range(topology.num_nodes)) - {topology.node_of[rank]}:
            ahead = topology.ranks_of(other)[topology.number_of[rank]]
            sent_WW[rank, ahead] = np.sum(np.any(node_TK == other, axis=1))
    return sent_WW


def _inside(rank_TK: Sequence[Counts], topology: Topology) -> Counts:
    """(W, W) sends of hop 2: the tokens that arrived at a node over a rail, and own tokens, are distributed there."""
    rail_WW, node_WW = (np.equal.outer(of, of) for of in (topology.number_of, topology.node_of))
    sent_WW: Counts = (rail_WW @ one_send_per_rank(rank_TK, len(rank_TK))) * node_WW
    return sent_WW


class FixedSizeDedup(Dedup):
    """`Dedup` without counts: equally many tokens to each other rank of the group.

    Args:
        options: with `max_tokens`, the same on all ranks.
        capacity: of each message; None: `max_tokens`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots_per_rank: int,
        options: TransportOptions,
        capacity: NodeCapacity | None = None,
    ) -> None:
        super().__init__(group, slots_per_rank, options)
        assert options.max_tokens is not None
        self.node_capacity = NodeCapacity(options.max_tokens) if capacity is None else capacity

    def plan_pieces(
        self,
        slot_C: Sequence[torch.Tensor],
        weight_C: Sequence[torch.Tensor],
        traffic: Traffic,
        together: tuple[int, int] = (1, 1),
    ) -> list[ExchangeRoute]:
        """Raises:
        ValueError: more tokens than `max_tokens`."""
        tokens, pieces, limit = sum(len(slot_TK) for slot_TK in slot_C), len(slot_C), self.node_capacity
        if tokens > limit.most:
            raise ValueError(
                f"{tokens} tokens on this rank, but at most max_tokens={limit.most} were stated, and all "
                "ranks rely on it: state the largest number that any rank will have"
            )
        if limit.whole:
            return super().plan_pieces(slot_C, weight_C, traffic, together)
        here_C = self.whether_here(slot_C)
        if limit.counted and self.num_ranks > 1:
            rows_CW = torch.stack([self.count_sends(here_WTK) for here_WTK in here_C])
            others = rows_CW[:, : self.rank], rows_CW[:, self.rank + 1 :]
            lost = limit.note(torch.cat(others, dim=1).max(), pieces)
            weight_C = [torch.where(lost, torch.nan, weight_TK) for weight_TK in weight_C]
        size_CW = [[limit.of_piece(pieces)] * self.num_ranks for _ in slot_C]
        for size_W, slot_TK in zip(size_CW, slot_C, strict=True):
            size_W[self.rank] = len(slot_TK)
        pairs_C = [sum(size_W) * slot_TK.shape[1] for size_W, slot_TK in zip(size_CW, slot_C, strict=True)]
        return self._routes(slot_C, weight_C, here_C, Sizes(size_CW, size_CW, (), pairs_C), traffic, together)

    def list_sends(self, slot_TK: torch.Tensor, here_WTK: torch.Tensor, num_rows: int) -> SendList:
        if self.node_capacity.whole:
            return super().list_sends(slot_TK, here_WTK, num_rows)
        num_tokens, top_k = slot_TK.shape
        most = (num_rows - num_tokens) // max(1, self.num_ranks - 1)
        every_T = torch.arange(num_tokens, device=slot_TK.device)
        token_W = [
            every_T if rank == self.rank else self._tokens(here_TK.any(-1), most)
            for rank, here_TK in enumerate(here_WTK)
        ]
        # One more entry for each rank: for padding.
        slot_WTK = F.pad(torch.where(here_WTK, slot_TK % self.slots_per_rank, -1), (0, 0, 0, 1), value=-1)
        place_N = torch.cat([token_R + rank * (num_tokens + 1) for rank, token_R in enumerate(token_W)])
        token_N, slot_NJ = torch.cat(token_W), slot_WTK.flatten(0, 1)[place_N].int()
        choice_NJ = token_N.unsqueeze(1) * top_k + torch.arange(top_k, device=slot_TK.device)
        return SendList(token_N, slot_NJ, torch.where(slot_NJ < 0, num_tokens * top_k, choice_NJ))

    def _tokens(self, wanted_T: torch.Tensor, most: int) -> torch.Tensor:
        """(most,) the number of the token in each place of a message, T for padding."""
        num_tokens = len(wanted_T)
        token_T = torch.arange(num_tokens, device=wanted_T.device)
        if most >= num_tokens:
            return F.pad(token_T, (0, most - num_tokens), value=num_tokens)
        place_T = torch.where(wanted_T, wanted_T.cumsum(0) - 1, most).clamp(max=most)
        return token_T.new_full((most + 1,), num_tokens).scatter_(0, place_T, token_T)[:most]

    def tokens_to_send(self, x_TH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        return _one_more(x_TH, 0)[route.token_N]

    def sum_returned(self, rows_NH: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        first, *others = (
            _of_tokens(block_RH, token_R, route.num_tokens)
            for block_RH, token_R in zip(
                rows_NH.split(list(route.send)), route.token_N.split(list(route.send)), strict=True
            )
        )
        total_TH = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for block_TH in others:
            total_TH += block_TH
        return total_TH


def _one_more(rows: torch.Tensor, value: int) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, 1), value=value)


def _of_tokens(block_RH: torch.Tensor, token_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T, H) the row of `block_RH` for each token, zero for tokens without one."""
    if len(token_R) >= num_tokens:
        return block_RH[:num_tokens]
    row_R = torch.arange(len(token_R), device=token_R.device)
    row_T = token_R.new_full((num_tokens + 1,), len(token_R)).scatter_(0, token_R, row_R)[:num_tokens]
    return _one_more(block_RH, 0)[row_T]
