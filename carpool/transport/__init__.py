"""Transports: how tokens travel to experts and MoE outputs back. One file each.

| name           | sends per token, each way            | what it is for                                        |
|----------------|--------------------------------------|-------------------------------------------------------|
| `gather`       | one to every rank                    | the reference; K larger than W                        |
| `alltoall`     | one per expert                       | the baseline of other systems                         |
| `dedup`        | one per rank that holds an expert    | the default where there is no NVLink                  |
| `nvlink`       | one per rank that holds an expert    | GPUs of one host: kernels write into peers' memory    |
| `hierarchical` | one per other node, then one per     | slow inter-node links; `nvlink` intra-node            |
|                | rank that holds an expert            |                                                       |
| `local`        | none                                 | one rank, for which "auto" picks it                   |

All but `nvlink` run over `torch.distributed`, on any device and backend. `hierarchical` needs several nodes and the
topology of the ranks (from `set_topology`, or the launcher's environment); "auto" picks it where the cost model says
that it is faster (`carpool.planner.transports`). `nvlink` has buffers of a fixed size, so "auto" picks it only if the
maximum number of tokens of a rank is given (`TransportOptions.max_tokens`).

`base.py` defines the contract and what a new transport must declare. `codecs.py` defines how hidden states are encoded
on any transport. `register` adds a transport from outside the package (`carpool.plugins`). `TRANSPORTS` is the only
list: commands, configuration, estimates, benchmarks and recipes read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from carpool.activations import Arrivals, HiddenStates
from carpool.layout.topology import Topology
from carpool.plugins import Registry, unknown
from carpool.transport.alltoall import AllToAll
from carpool.transport.base import BufferOverflowError, Fetched, Pending, RankMissingError, Route, Transport
from carpool.transport.codecs import PLAIN, Codecs
from carpool.transport.dedup import Dedup
from carpool.transport.gather import Gather
from carpool.transport.hierarchical import Hierarchical
from carpool.transport.hierarchical_options import HierarchicalOptions
from carpool.transport.local import Local
from carpool.transport.nodes import known_topology, set_topology, topology_of, why_not_nodes
from carpool.transport.nvlink import NVLink, NVLinkOptions
from carpool.transport.options import TransportOptions

__all__ = [
    "TRANSPORTS",
    "Arrivals",
    "BufferOverflowError",
    "Codecs",
    "Fetched",
    "HiddenStates",
    "HierarchicalOptions",
    "NVLinkOptions",
    "Pending",
    "RankMissingError",
    "Route",
    "Transport",
    "TransportOptions",
    "between_ranks",
    "check_codecs",
    "check_overflow",
    "check_transport",
    "choose_transport",
    "find_transport",
    "make_transport",
    "register",
    "set_topology",
    "topology_of",
    "unfit_transports",
    "why_not_nodes",
]


# Names that the contract had before, of methods and properties that plug-ins define.
_RENAMED = {
    "rows_sent": "tokens_sent", "copies_per_token": "ranks_per_token", "mean_rows": "mean_traffic",
    "choices_per_row": "choices_per_send", "why_no_rows": "why_not_hidden", "rooms": "capacities",
    "one_row_per_rank": "one_send_per_rank", "one_row_per_node": "one_send_per_node", "knows_rows": "knows_counts",
}  # fmt: skip


def _check(name: str, cls: type[Transport]) -> None:
    if old := ", ".join(f"{one} is now {new}" for one, new in _RENAMED.items() if hasattr(cls, one)):
        raise ValueError(f"transport {name!r} ({cls.__name__}) has names of an earlier version: {old}")
    if missing := ", ".join(sorted(cls.__abstractmethods__)):
        raise ValueError(f"transport {name!r} ({cls.__name__}) does not implement {missing}")


# Among transports that send equally many hidden states, "auto" prefers the first one.
TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    "carpool.transports",
    {cls.name: cls for cls in (NVLink, AllToAll, Dedup, Gather, Hierarchical, Local)},
    _check,
    Transport,
)
register = TRANSPORTS.register


def between_ranks() -> tuple[str, ...]:
    """The names of all transports that send tokens between ranks."""
    return tuple(name for name in TRANSPORTS if not TRANSPORTS[name].alone)


def find_transport(name: str) -> type[Transport]:
    """The class of that name.

    Raises:
        ValueError: an unknown name."""
    if name not in TRANSPORTS:
        raise ValueError(unknown(TRANSPORTS, name, "auto"))
    return TRANSPORTS[name]


def choose_transport(name: str, num_ranks: int, top_k: int, unfit: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Resolve "auto": of the transports that it may pick, the one with the fewest sends. Accesses no device.

    Args:
        num_ranks, top_k: W and K.
        unfit: why transports must not be picked, by name (`unfit_transports`). None: unknown, so that only transports
            that work everywhere are picked.

    Returns:
        (name, why): a key of `TRANSPORTS` and a sentence for the log.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        find_transport(name)
        return name, "asked for"
    if num_ranks == 1 and Local.name not in (unfit or {}):
        return Local.name, "one rank has all experts, and reads its tokens where they are"
    ways = [TRANSPORTS[one] for one in TRANSPORTS if TRANSPORTS[one].automatic]
    fits = [cls for cls in ways if (cls.anywhere if unfit is None else cls.name not in unfit)]
    # Which of them sends fewest does not depend on the number of experts.
    experts = num_ranks * max(top_k, 8)
    best = min(fits, key=lambda cls: round(cls.ranks_per_token(experts, top_k, num_ranks), 6))
    unused = "".join(f"; not {one}: {reason}" for one, reason in (unfit or {}).items())
    if best.one_send_per_rank:
        why = f"one row per token for each rank that holds any of its {top_k} experts, not one for each expert"
        if not best.anywhere:
            why = f"the {num_ranks} ranks can use it; {why}"
    elif top_k == 1:
        why = "with one expert per token there is one row per token either way, and its plan is shorter"
    else:
        why = "it sends the fewest rows"
    return best.name, why + unused


def unfit_transports(
    group: dist.ProcessGroup | None,
    hidden: int,
    options: TransportOptions | None,
    *,
    own_forward: bool = False,
    element_size: int = 2,
) -> dict[str, str]:
    """Why "auto" does not pick each transport that it could. All ranks of the group together, with equal arguments.

    Args:
        hidden, element_size: H, and bytes of an element.
        options: of any transport.
        own_forward: experts run a model's own forward.
    """
    found: dict[str, str] = {}
    alone = Local.why_not(group) is None
    if alone and (reason := Local.why_no_codecs(PLAIN if options is None else options.codecs)):
        found[Local.name] = reason
    for cls in (TRANSPORTS[name] for name in TRANSPORTS):
        if not cls.automatic or cls.anywhere:
            continue
        if alone:
            reason = "one rank has nobody to send to"
        elif own_forward and not cls.knows_counts:
            # A model's own forward would compute all places of the buffers, of which most are empty.
            reason = "the experts run their own forward"
        else:
            reason = (
                cls.why_no_codecs(PLAIN if options is None else options.codecs)
                or cls.why_not_automatic(cls.own_options(options))
                or cls.why_not_hidden(hidden, element_size)
                or _why_not(cls, group)
            )
        if reason:
            found[cls.name] = reason
    return found


def check_transport(name: str, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError if a transport is unknown, or was named and cannot be used by the ranks of a group. Collective
    over the group for transports that do not work everywhere."""
    if name == "auto":
        return
    cls = find_transport(name)
    if reason := _why_not(cls, group):
        raise _refused(name, reason)


def check_topology(name: str, topology: Topology) -> None:
    """Raise ValueError if ranks on these nodes cannot use a transport that was named. Not collective."""
    if name != "auto" and (reason := find_transport(name).why_not_on(topology)):
        raise _refused(name, reason)


def _refused(name: str, reason: str) -> ValueError:
    # What "auto" picks where nothing is known.
    anywhere, _ = choose_transport("auto", 2, 2)
    return ValueError(f"transport {name!r} cannot be used here: {reason}; use 'auto' or {anywhere!r}")


def check_codecs(name: str, codecs: Codecs) -> None:
    """Raise ValueError if the transport `name`, which is not "auto", cannot use these codecs."""
    if reason := find_transport(name).why_no_codecs(codecs):
        raise ValueError(f"transport {name!r} does not take these codecs: {reason}")


def make_transport(
    name: str, group: dist.ProcessGroup | None, slots_per_rank: int, options: TransportOptions | None = None
) -> Transport:
    """Construct the transport `name` (a key of `TRANSPORTS`) for a process group, with the options that apply to it."""
    cls: type[Any] = find_transport(name)
    check_codecs(name, PLAIN if options is None else options.codecs)
    own = cls.own_options(options)
    made: Transport = cls(group, slots_per_rank) if own is None else cls(group, slots_per_rank, own)
    return made


def check_overflow(transport: Transport | None) -> None:
    """`Transport.check`, if there is one."""
    if transport is not None:
        transport.check()


# Results that the ranks of a group have agreed on. They are freed with the group.
_FOUND: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def _why_not(cls: type[Transport], group: dist.ProcessGroup | None) -> str | None:
    """`Transport.why_not`, asked once per group: it is collective."""
    if cls.anywhere or group is None:
        return cls.why_not(group)
    found = _FOUND.setdefault(group, {})
    key = (cls.name, known_topology(group))
    if key not in found:
        # `why_not` may determine the topology.
        found[key] = found[cls.name, known_topology(group)] = cls.why_not(group)
    return found[key]
