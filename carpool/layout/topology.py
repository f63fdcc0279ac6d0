"""Which ranks share a node, and what kind of link joins two ranks.

    4 ranks, 2 on each node, NVLink inside:   node_of = (0, 0, 1, 1), nvlink_of = (0, 0, 1, 1)

                  rank 0     1         2         3
        rank 0    self       nvlink    network   network
        rank 1    nvlink     self      network   network

A run makes one `Topology`, and all ranks agree on it (`agree`). Each rank says where it is, as its launcher told it
(torchrun: GROUP_RANK, Slurm: SLURM_NODEID, otherwise the host's name), or as `parallelism.ranks_per_node` says. Whoever
needs nodes (the placement of experts, limits by node, the cost model) takes it as an argument.

An NVLink domain is a node, or several: the GPUs of a rack that NVLink joins (NVL72) name the fabric that they belong
to, and ranks that name the same one are one domain. Where ranks can write into each other's memory follows from nodes
and domains (`why_no_peer_memory`).

It is in this package because layouts and topologies are what every package above needs to know of ranks. It needs no
PyTorch of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Link = Literal["self", "nvlink", "node", "network"]
# Links that something travels over, the fastest first. "node": through the memory or the PCIe bus of one node.
LINKS: tuple[Link, ...] = ("nvlink", "node", "network")


# What to do, for those who call the library, too: they have no settings.
SAY_NODES = "say how many ranks share a node (carpool.transport.set_topology; of a run, parallelism.ranks_per_node)"


@dataclass(frozen=True)
class Topology:
    """Which ranks share what.

    Attributes:
        node_of: number of each rank's node, in order of the nodes' first ranks.
        nvlink_of: number of each rank's NVLink domain; a rank without NVLink is alone in its domain.
        source: what says so, for people.
    """

    node_of: tuple[int, ...]
    nvlink_of: tuple[int, ...]
    source: str = "given"

    def __post_init__(self) -> None:
        if not self.node_of or len(self.node_of) != len(self.nvlink_of):
            raise ValueError(
                f"a topology needs a node and an NVLink domain for each rank, not {self.node_of} and {self.nvlink_of}"
            )

    @classmethod
    def even(cls, num_ranks: int, num_nodes: int = 1, *, nvlink: bool = True) -> Topology:
        """`num_nodes` nodes with equally many consecutive ranks, each node one NVLink domain (or without NVLink).

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        if num_nodes < 1 or num_ranks < 1 or num_ranks % num_nodes:
            raise ValueError(f"{num_ranks} ranks cannot be divided evenly among {num_nodes} nodes")
        node_of = tuple(rank * num_nodes // num_ranks for rank in range(num_ranks))
        return cls(node_of, node_of if nvlink else tuple(range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        return len(self.node_of)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of))

    def link(self, one: int, other: int) -> Link:
        """The kind of link between two ranks."""
        if one == other:
            return "self"
        if self.nvlink_of[one] == self.nvlink_of[other]:
            return "nvlink"
        return "node" if self.node_of[one] == self.node_of[other] else "network"

    @cached_property
    def pairs(self) -> Mapping[Link, npt.NDArray[np.bool_]]:
        """For each kind of link that exists here, (W, W): True where it joins two ranks."""
        kind_WW = np.array([[self.link(a, b) for b in range(self.num_ranks)] for a in range(self.num_ranks)])
        return {link: kind_WW == link for link in LINKS if (kind_WW == link).any()}

    def of(self, ranks: Iterable[int]) -> Topology:
        """The topology of a group of these ranks, which are numbered anew in the order given."""
        chosen = list(ranks)
        nodes, domains = ([of[rank] for rank in chosen] for of in (self.node_of, self.nvlink_of))
        return Topology(_numbered(nodes), _numbered(domains), self.source)

    def ranks_of(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, of in enumerate(self.node_of) if of == node]

    @cached_property
    def number_of(self) -> tuple[int, ...]:
        """The number of each rank among those of its node. Ranks of equal number are a rail."""
        return tuple(self.node_of[:rank].count(node) for rank, node in enumerate(self.node_of))

    def node_size(self, rank: int) -> int:
        """How many ranks share the node of this one, itself included."""
        return self.node_of.count(self.node_of[rank])

    def why_no_peer_memory(self) -> str | None:
        """Why these ranks cannot write into each other's memory, or None if they can: PyTorch's symmetric memory
        reaches the ranks of a node and those of an NVLink domain. Whether the devices of a node reach each other, only
        they can say."""
        for rank in range(self.num_ranks):
            if apart := [other for other in range(self.num_ranks) if self.link(rank, other) == "network"]:
                return (
                    f"by {self.source} rank {rank} shares neither a node nor an NVLink domain with ranks {_few(apart)}"
                )
        return None

    def even_nodes(self) -> int:
        """The number of nodes, for those who need equally many consecutive ranks on each.

        Raises:
            ValueError: the ranks are not so. The message says how they are, and what to do.
        """
        if self.num_ranks % self.num_nodes or self.node_of != Topology.even(self.num_ranks, self.num_nodes).node_of:
            nodes = [self.ranks_of(node) for node in range(self.num_nodes)]
            raise ValueError(
                "an expert-parallel group needs equally many consecutive ranks on each node, but by "
                f"{self.source} its nodes hold {'; '.join(f'ranks {_few(one)}' for one in nodes)}: start equally many "
                f"ranks on each node, or {SAY_NODES}"
            )
        return self.num_nodes

    def to_dict(self) -> dict[str, Any]:
        return {"node_of": list(self.node_of), "nvlink_of": list(self.nvlink_of), "source": self.source}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Topology:
        return cls(tuple(settings["node_of"]), tuple(settings["nvlink_of"]), settings["source"])


@dataclass(frozen=True)
class Whereabouts:
    """What one rank knows of its own place.

    Attributes:
        node: a name that the ranks of its node have in common, and no others.
        source: what says so.
        ranks_on_node: how many ranks its launcher has started there; None if it does not say.
        nvlink: whether its device is joined to the others of its node by NVLink.
        host: the name of its machine.
        fabric: a name that the GPUs of its NVLink domain have in common, if the domain may be more than a node.
    """

    node: str
    source: str
    ranks_on_node: int | None = None
    nvlink: bool = False
    host: str = ""
    fabric: str | None = None

    @property
    def domain(self) -> str | None:
        """What its NVLink domain is told by; None: it is alone."""
        return self.fabric or (f"node {self.node}" if self.nvlink else None)

    def __str__(self) -> str:
        """For people: "node 1 (gpu07)"; "host gpu07" where nobody numbers the nodes."""
        if self.node == self.host:
            return f"host {self.host}"
        return f"node {self.node.removeprefix('number ')} ({self.host})"


def whereabouts(
    env: Mapping[str, str],
    rank: int,
    host: str,
    ranks_per_node: int | None = None,
    nvlink: bool = False,
    fabric: str | None = None,
) -> Whereabouts:
    """Where this rank is, from its launcher's environment variables.

    Args:
        ranks_per_node: `parallelism.ranks_per_node`, which overrides the launcher.
        host, nvlink, fabric: see `Whereabouts`.
    """
    if ranks_per_node is not None:
        source = f"parallelism.ranks_per_node = {ranks_per_node}"
        return Whereabouts(f"number {rank // ranks_per_node}", source, ranks_per_node, nvlink, host, fabric)
    # torchrun's and PyTorch's agents number the nodes; Slurm does too.
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if variable in env:
            node, source = f"number {env[variable]}", variable
            break
    else:
        node, source = host, "the hosts' names"
    # Only torchrun's word counts: Accelerate sets this variable too, to 1 in processes that it did not start.
    local = env.get("LOCAL_WORLD_SIZE", "") if "GROUP_RANK" in env else ""
    return Whereabouts(node, source, int(local) if local.isdigit() else None, nvlink, host, fabric)


def agree(reports: Sequence[Whereabouts]) -> Topology:
    """The topology that follows from what all ranks say, in their order. Every rank gets the same reports, so the same
    topology.

    Raises:
        ValueError: ranks that contradict each other; the message names them.
    """
    by_source: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        by_source.setdefault(report.source, []).append(rank)
    if len(by_source) > 1:
        said = "; ".join(f"ranks {_few(ranks)} by {source}" for source, ranks in by_source.items())
        raise ValueError(
            f"the ranks do not agree on which of them share a node: {said}. Start all ranks with the same launcher and "
            f"the same configuration, or {SAY_NODES}, for all"
        )
    counts = Counter(report.node for report in reports)
    wrong = [r for r, one in enumerate(reports) if one.ranks_on_node not in (None, counts[one.node])]
    if wrong:
        one = reports[wrong[0]]
        raise ValueError(
            f"ranks {_few(wrong)} do not agree with the others on their nodes: rank {wrong[0]} was told that "
            f"{one.ranks_on_node} ranks share its node, but {counts[one.node]} say that they are on node {one.node} "
            f"(by {one.source}). Start equally many ranks on each node, or {SAY_NODES}"
        )
    for rank, one in enumerate(reports):
        first = next(r for r, other in enumerate(reports) if other.node == one.node)
        if one.host != reports[first].host:
            raise ValueError(
                f"ranks {first} and {rank} share a node by {one.source}, but their hosts are {reports[first].host} and "
                f"{one.host}: leave it to the launcher where that knows the nodes, or {SAY_NODES}"
            )
    nodes = _numbered([one.node for one in reports])
    domains = _numbered([one.domain or f"rank {r}" for r, one in enumerate(reports)])
    return Topology(nodes, domains, reports[0].source)


def _numbered(names: Sequence[Any]) -> tuple[int, ...]:
    """A number for each name, in order of appearance."""
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _few(ranks: Sequence[int]) -> str:
    """For people: "0, 1, 2, 3, ... (16 in all)"."""
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)} in all)"
