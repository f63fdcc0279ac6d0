"""The input of a solver: a recorded routing, ranks and their nodes, and limits of memory and balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.trace import Array, LayerTrace
from carpool.planner.machine.cost import CostModel

OVERLOAD = 4.0  # cost in sends of a pair above the load limit; a swap changes at most 2 sends per pair of load


@dataclass(frozen=True)
class Problem:
    """One layer to be placed.

    Args:
        experts_per_rank: capacity of each rank in experts. None: equal; if the ranks do not divide the experts, the
            first ranks have one more. If the total capacity exceeds the experts, LPT, EPLB and the search use it where
            it helps; the other solvers leave the same share of every rank's capacity free.
        load_limit: the largest load of a rank over the mean. The search satisfies it, if possible.
        expert_groups: number of groups of consecutive experts that EPLB places on one node each. None: no groups.
        seed: of all random numbers.
        cost: of inter-node and intra-node sends.
        load_E: (E,) expected loads, for LPT and EPLB. None: those of the trace.

    Raises:
        ValueError: an impossible layout.
    """

    trace: LayerTrace
    topology: Topology
    experts_per_rank: Sequence[int] | None = None
    load_limit: float = 1.1
    expert_groups: int | None = None
    seed: int = 0
    cost: CostModel = field(default_factory=CostModel)
    load_E: Array | None = None

    def __post_init__(self) -> None:
        ExpertLayout.contiguous(self.trace.num_experts, self.num_ranks)  # raises for fewer experts than ranks
        if self.experts_per_rank is not None:
            given = list(self.experts_per_rank)
            if len(given) != self.num_ranks or min(given) < 0 or sum(given) < self.trace.num_experts:
                raise ValueError(
                    f"experts_per_rank must be {self.num_ranks} numbers with a sum of at least "
                    f"the {self.trace.num_experts} experts, not {given}"
                )
        if not self.load_limit >= 1:
            raise ValueError(f"load_limit is the largest load by the mean, so at least 1.0, not {self.load_limit}")
        if self.load_E is not None and np.shape(self.load_E) != (self.trace.num_experts,):
            raise ValueError(f"load_E must be one number for each of {self.trace.num_experts} experts")
        groups = self.expert_groups
        if groups is not None and (groups < 1 or self.trace.num_experts % groups or groups % self.num_nodes):
            raise ValueError(
                f"expert_groups={groups} must divide {self.trace.num_experts} experts and be a multiple of "
                f"{self.num_nodes} nodes"
            )

    @property
    def num_experts(self) -> int:
        return self.trace.num_experts

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @cached_property
    def node_W(self) -> Array:
        """(W,) the node of each rank."""
        return np.array(self.topology.node_of)

    @property
    def expected_E(self) -> Array:
        """(E,) the loads to balance."""
        return self.trace.load_E if self.load_E is None else self.load_E

    @cached_property
    def capacity_W(self) -> Array:
        """(W,) capacity of each rank in experts."""
        if self.experts_per_rank is not None:
            return np.array(self.experts_per_rank, dtype=np.int64)
        return np.array([len(rank) for rank in ExpertLayout.contiguous(self.num_experts, self.num_ranks).homes])

    @cached_property
    def fill_W(self) -> Array:
        """(W,) experts of each rank if all use the same share of their capacity."""
        exact_W = self.capacity_W * self.num_experts / self.capacity_W.sum()
        fill_W = np.floor(exact_W + 1e-9).astype(np.int64)
        missing = self.num_experts - int(fill_W.sum())
        fill_W[np.argsort(fill_W - exact_W, kind="stable")[:missing]] += 1
        return fill_W

    @property
    def network_weight(self) -> float:
        """The cost of an inter-node send, in intra-node sends."""
        return self.cost.network_weight(self.topology)

    @property
    def node_weight(self) -> float:
        """The cost of one more node that a token visits, in addition to its ranks there. 0 if a token is sent once per
        rank: then only the number of ranks matters, because a token's own node is arbitrary."""
        return self.network_weight if self.cost.copies_per_node and self.num_nodes > 1 else 0.0

    @property
    def rank_weight(self) -> float:
        """The cost of one more rank that a token visits: an intra-node send, or the mean over all pairs of ranks."""
        if self.cost.copies_per_node or self.num_nodes == 1:
            return 1.0
        pairs = self.num_ranks * (self.num_ranks - 1)
        inside = (np.equal.outer(self.node_W, self.node_W).sum() - self.num_ranks) / pairs
        return float(inside + (1 - inside) * self.network_weight)

    def layout(self, rank_E: Array) -> ExpertLayout:
        """The layout in which rank_E[e] is the home of expert e."""
        homes = [np.flatnonzero(rank_E == rank).tolist() for rank in range(self.num_ranks)]
        assert all(len(home) <= capacity for home, capacity in zip(homes, self.capacity_W, strict=True)), (
            "a solver broke the sizes"
        )
        return ExpertLayout(tuple(map(tuple, homes)))


def homes_of(layout: ExpertLayout) -> Array:
    """(E,) the rank of each expert's (or slice's) home."""
    return np.array([rank for rank, _ in layout.home_of])
