"""What "auto" becomes, for non-expert parameters and for transports: the rules of runs, of their dry runs, of layers by
themselves, and of `carpool simulate`.

Non-expert parameters are whole on each rank where they fit. That spares the gathers of each layer. What is predicted is
less than all that a run needs, so they may take no more than `HEADROOM` of the memory.

A transport is chosen by `carpool.transport.choose_transport`. On several nodes the model of costs then says whether two
hops pay: one row to each other node, passed on there, in place of one row to each rank.

    2 nodes of 8 H200s, 8 experts of a token chosen uniformly, 8192 tokens of H 2048

    dedup           3.2 rows between nodes    2.8 inside      the slower link    2.2 ms a ride
    hierarchical    1.0 between nodes         5.6 inside      both in turn       1.3 ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.planner.machine.hardware import Hardware

# Of a device's memory. The rest is for what the estimate does not count.
HEADROOM = 0.8
TWO_HOPS = "hierarchical"


def why_not_zero1(degrees: Degrees, priority: bool) -> str | None:
    """Why non-expert parameters cannot be whole; None: they can."""
    if degrees.tp > 1:
        return "tensor parallelism divides non-expert parameters"
    return "moe.priority holds back the reductions of FSDP" if priority else None


def data_parallel_by_rule(
    degrees: Degrees, priority: bool, needed: Callable[[], float], memory: float | None
) -> tuple[str, str]:
    """("fsdp" or "zero1", why).

    Args:
        needed: the bytes of a rank if they are whole.
        memory: the bytes that it has; None: not known, and then they are whole."""
    if degrees.dp_cp == 1:
        return "fsdp", "one data-parallel rank has nothing to shard"
    if (reason := why_not_zero1(degrees, priority)) is not None:
        return "fsdp", reason
    if memory is None:
        return "zero1", "the memory of a rank is not known"
    size = needed()
    sizes = f"about {size / 2**30:.1f} of {memory / 2**30:.1f} GiB of a rank would be used"
    if size > HEADROOM * memory:
        most = f", more than {HEADROOM:.0%}" if size <= memory else ""
        return "fsdp", f"whole non-expert parameters do not fit: {sizes}{most}"
    return "zero1", f"whole non-expert parameters fit: {sizes}"


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
    for cls in (TRANSPORTS[name] for name in TRANSPORTS):
        if not cls.automatic or cls.anywhere:
            continue
        reason = cls.why_not_on(topology)
        if reason is None and hardware is not None and hardware.nvlink is None:
            reason = f"{hardware.name} has no NVLink"
        if reason := reason or cls.why_no_rows(hidden, 2) or why_not(cls):
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
        `name` or "hierarchical", whichever has the shorter modelled rides if experts are chosen uniformly, and why.
    """
    if topology.num_nodes == 1 or tokens is None:
        return name, why
    if limited:
        return name, f"{why}; not {TWO_HOPS}: routing is limited, and its costs are modelled for choices that are not"
    try:
        topology.even_nodes()
    except ValueError as error:
        return name, f"{why}; not {TWO_HOPS}: {error}"
    seconds = {
        way: CostModel(hidden=hidden, element_size=element_size, hardware=hardware, transport=way).ride_seconds(
            _rows(topology, top_k, tokens, way), topology
        )
        for way in (name, TWO_HOPS)
    }
    one, two = (f"{1e3 * seconds[way] / RIDES:.3g} ms" for way in (name, TWO_HOPS))
    modelled = f"on {hardware.name}, as modelled"
    if seconds[TWO_HOPS] < seconds[name]:
        return TWO_HOPS, f"a ride takes {two} in two hops, and {one} with {name}, {modelled}"
    return name, f"{why}; not {TWO_HOPS}: a ride would take {two}, and takes {one}, {modelled}"


def _rows(topology: Topology, top_k: int, tokens: int, way: str) -> np.ndarray:
    """(W, W) rows that are expected from rank to rank."""
    num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
    to_rank, to_node = (1 - (1 - 1 / number) ** top_k for number in (num_ranks, num_nodes))
    if way != TWO_HOPS:
        # One row for a rank, or for an expert.
        from carpool.transport import find_transport

        each = to_rank if find_transport(way).one_row_per_rank else top_k / num_ranks
        return np.full((num_ranks, num_ranks), each * tokens)
    same_WW = np.equal.outer(topology.node_of, topology.node_of)
    rail_WW = np.equal.outer(topology.number_of, topology.number_of) & ~same_WW
    # A rank passes on what came over its rail, its own tokens among it.
    return tokens * (rail_WW * to_node + same_WW * num_nodes * to_rank)
