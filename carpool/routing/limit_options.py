"""What routing may be limited to; carpool/routing/limit.py says what each limit does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from carpool.layout.topology import Topology

LimitBy = Literal["score", "groups"]


@dataclass(frozen=True)
class LimitOptions:
    """What the routing is limited to; see carpool/routing/limit.py. The defaults limit nothing.

    Args:
        topology: of the ranks of the expert-parallel group, for limits by node. None: all are on one node.
    """

    limit_ranks: int | None = None
    limit_nodes: int | None = None
    limit_by: LimitBy = "score"
    topology: Topology | None = None

    @property
    def num_nodes(self) -> int:
        return 1 if self.topology is None else self.topology.num_nodes

    def check(self, num_ranks: int) -> None:
        """Raise ValueError for what cannot be on `num_ranks` ranks."""
        if self.limit_by not in ("score", "groups"):
            raise ValueError(f"limit_by={self.limit_by!r} is not known; use 'score' or 'groups'")
        if self.topology is not None and self.topology.num_ranks != num_ranks:
            raise ValueError(
                f"the topology of the limit has {self.topology.num_ranks} ranks, but the expert-parallel group "
                f"{num_ranks}: give the topology of the group (`Topology.of`)"
            )
        if self.topology is not None and self.limit_nodes is not None:
            self.topology.even_nodes()
        for name, limit in (("limit_ranks", self.limit_ranks), ("limit_nodes", self.limit_nodes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit} must be at least 1, or None for no limit")

    def active(self, num_ranks: int) -> bool:
        """Whether this changes any routing on `num_ranks` ranks: a limit of all ranks is none."""
        return (self.limit_ranks is not None and self.limit_ranks < num_ranks) or (
            self.limit_nodes is not None and self.limit_nodes < self.num_nodes
        )

    def lossy_reasons(self, num_ranks: int) -> list[str]:
        """For logs and reports: how this changes the model's function."""
        reasons = []
        if self.limit_nodes is not None and self.limit_nodes < self.num_nodes:
            reasons.append(
                f"each token's experts are limited to {counted(self.limit_nodes, 'node')}, by {self.limit_by}"
            )
        if self.limit_ranks is not None and self.limit_ranks < num_ranks:
            reasons.append(
                f"each token's experts are limited to {counted(self.limit_ranks, 'rank')}, by {self.limit_by}"
            )
        return reasons


def counted(number: int, what: str) -> str:
    """For people: 1 rank, 2 ranks."""
    return f"{number} {what}{'' if number == 1 else 's'}"
