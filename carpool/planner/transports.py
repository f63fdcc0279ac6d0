"""What plans ask of transports, and what "auto" becomes. All of it comes from the registry: no name of one stands here.

A transport is chosen by `carpool.transport.choose_transport`. On several nodes the model of costs then says whether two
hops pay: one row to each other node, passed on there, in place of one row to each rank.

    2 nodes of 8 H200s, 8 experts of a token chosen uniformly, 8192 tokens of H 2048

    one hop     3.2 rows between nodes    2.8 inside      the slower link    2.2 ms a ride
    two hops    1.0 between nodes         5.6 inside      both in turn       1.3 ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from carpool.parallel.degrees import Degrees
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.planner.machine.hardware import Hardware

if TYPE_CHECKING:
    from carpool.layout.topology import Topology
    from carpool.transport import Transport


@cache
def transport_class(name: str) -> type[Transport]:
    """What a transport says of itself. Searches ask thousands of times.

    Raises:
        ValueError: an unknown name."""
    from carpool.transport import find_transport

    return find_transport(name)


def preferred_transport() -> str:
    """What "auto" becomes on GPUs of one node that can use everything."""
    from carpool.transport import choose_transport

    return choose_transport("auto", 2, 2, {})[0]


def planned_transports() -> tuple[str, ...]:
    """Those that a search tries unless it is told which: a token is sent once to a rank, or to a node. Those that do
    not wait for the host come first, then those that send least between nodes."""
    from carpool.transport import between_ranks

    ways = [way for way in map(transport_class, between_ranks()) if way.one_send_per_rank or way.one_send_per_node]
    return tuple(
        way.name
        for way in sorted(ways, key=lambda way: (not way.graphable, way.hops_in_turn, not way.one_send_per_node))
    )


def usable_transports(degrees: Degrees, per_node: int, hardware: Hardware, among: Sequence[str]) -> list[str]:
    """Those that the expert-parallel group can use, without those of which another sends the same rows sooner.

    Args:
        per_node: GPUs of a node, consecutive ranks."""
    if degrees.expert_ranks == 1:
        from carpool.transport import TRANSPORTS

        return [name for name in TRANSPORTS if transport_class(name).alone][:1]
    ranks = degrees.ranks_along(0, "ep" if degrees.ep > 1 else "etp")
    return _usable(tuple(rank // per_node for rank in ranks), hardware.nvlink is not None, tuple(among))


@cache
def _usable(node_of: tuple[int, ...], nvlink: bool, among: tuple[str, ...]) -> list[str]:
    """The same for a group whose ranks are on these nodes."""
    from carpool.layout.topology import Topology

    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_of))}
    topology = Topology(*2 * (tuple(map(numbers.__getitem__, node_of)),), "the settings")
    several = topology.num_nodes < topology.num_ranks  # otherwise no node has a second rank to pass rows on to
    found = [
        way
        for way in map(transport_class, among)
        if not way.alone
        and (nvlink or not way.needs_nvlink)
        and (several or not way.one_send_per_node)
        and way.why_not_on(topology) is None
    ]
    sooner = any(way.one_send_per_rank and way.graphable for way in found)
    return [way.name for way in found if way.graphable or not (sooner and way.one_send_per_rank)]


def foreseen_unfit(
    topology: Topology, hardware: Hardware | None, hidden: int, why_not: Callable[[Any], str | None] = lambda cls: None
) -> dict[str, str]:
    """Why "auto" is not to take transports, by name, for GPUs that are not asked.

    Args:
        topology: of the ranks of an expert-parallel group.
        hardware: of another machine; None: it is this one.
        why_not: what else keeps a transport from being taken; None: nothing does."""
    from carpool.transport import TRANSPORTS

    found: dict[str, str] = {}
    for cls in map(transport_class, TRANSPORTS):
        if not cls.automatic or cls.anywhere:
            continue
        reason = cls.why_not_on(topology)
        if reason is None and cls.needs_nvlink and hardware is not None and hardware.nvlink is None:
            reason = f"{hardware.name} has no NVLink"
        if reason := reason or cls.why_not_hidden(hidden, 2) or why_not(cls):
            found[cls.name] = reason
    return found


def automatic_transport(
    num_ranks: int, top_k: int, unfit: Mapping[str, str] | None, topology: Topology | None, **about: Any
) -> tuple[str, str]:
    """What "auto" becomes, and why: the one rule, of runs, of layers by themselves, and of predictions.

    Args:
        unfit: as of `carpool.transport.choose_transport`.
        topology: of the ranks of an expert-parallel group; None: nodes are not to be looked at.
        about: what else `way_between_nodes` asks for.
    """
    from carpool.transport import choose_transport

    name, why = choose_transport("auto", num_ranks, top_k, unfit)
    return (name, why) if topology is None else way_between_nodes(name, why, topology, top_k=top_k, **about)


def way_between_nodes(
    name: str,
    why: str,
    topology: Topology,
    *,
    top_k: int,
    hidden: int,
    element_size: int,
    tokens: int | None,
    hardware: Hardware,
    limited: bool,
) -> tuple[str, str]:
    """What "auto" takes where the ranks of an expert-parallel group lie on several nodes.

    Args:
        name, why: the transport of one hop that it would take, and why.
        topology: of the group; nodes hold equally many consecutive ranks, or are not looked at.
        tokens: of a rank; None: nobody has said.
        limited: each token's experts are on few ranks or nodes, which is not modelled.

    Returns:
        `name` or a transport `between_nodes`, whichever has the shorter modelled rides if experts are chosen uniformly,
        and why.
    """
    from carpool.transport import TRANSPORTS

    if topology.num_nodes == 1 or tokens is None:
        return name, why

    def milliseconds(way: str) -> float:
        cost = CostModel(hidden=hidden, element_size=element_size, hardware=hardware, transport=way)
        return 1e3 * cost.ride_seconds(_rows(topology, top_k, tokens, way), topology) / RIDES

    modelled = f"on {hardware.name}, as modelled"
    for other in [one for one in TRANSPORTS if transport_class(one).between_nodes]:
        if limited:
            why += f"; not {other}: routing is limited, and its costs are modelled for choices that are not"
            continue
        try:
            topology.even_nodes()
        except ValueError as error:
            why += f"; not {other}: {error}"
            continue
        one, two = milliseconds(name), milliseconds(other)
        if two < one:
            name, why = other, f"a ride takes {two:.3g} ms in two hops, and {one:.3g} ms with {name}, {modelled}"
        else:
            why += f"; not {other}: a ride would take {two:.3g} ms, and takes {one:.3g} ms, {modelled}"
    return name, why


def _rows(topology: Topology, top_k: int, tokens: int, name: str) -> np.ndarray:
    """(W, W) rows that are expected from rank to rank."""
    num_ranks, num_nodes, way = topology.num_ranks, topology.num_nodes, transport_class(name)
    to_rank, to_node = (1 - (1 - 1 / number) ** top_k for number in (num_ranks, num_nodes))
    if not way.one_send_per_node:
        # One row for a rank, or for an expert.
        each = to_rank if way.one_send_per_rank else top_k / num_ranks
        return np.full((num_ranks, num_ranks), each * tokens)
    same_WW = np.equal.outer(topology.node_of, topology.node_of)
    rail_WW = np.equal.outer(topology.number_of, topology.number_of) & ~same_WW
    # A rank passes on what came over its rail, its own tokens among it.
    return tokens * (rail_WW * to_node + same_WW * num_nodes * to_rank)
