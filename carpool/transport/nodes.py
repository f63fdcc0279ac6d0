"""Which ranks of an expert-parallel group share a node, and the process groups of rails and nodes.

A run has determined its topology before, and sets it (`set_topology`). Otherwise the ranks of a group exchange their
nodes once (`find_topology`).

    find_topology(None, ranks_per_node=2)     Topology(node_of=(0, 0, 1, 1), ...), the same on all four ranks

The node of a rank comes from its launcher or from the configuration (`carpool.layout.topology.whereabouts`). Whether
its NVLink domain is larger than its node comes from the driver, which names the fabric of a GPU (`fabric_of`).
"""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from carpool.layout.topology import SAY_NODES, Topology, agree, whereabouts


@dataclass(frozen=True)
class Hops:
    """The two process groups of this rank, None where it is alone, and their ranks by their number in the
    expert-parallel group.

    Attributes:
        rail, rail_ranks: the ranks of equal number in their nodes, in order of the nodes.
        node, node_ranks: the ranks of its node.
    """

    rail: dist.ProcessGroup | None
    rail_ranks: tuple[int, ...]
    node: dist.ProcessGroup | None
    node_ranks: tuple[int, ...]


# By group; freed with it.
_TOPOLOGIES: weakref.WeakKeyDictionary[dist.ProcessGroup, Topology] = weakref.WeakKeyDictionary()
_HOPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Hops]] = weakref.WeakKeyDictionary()


def set_topology(group: dist.ProcessGroup | None, topology: Topology) -> None:
    """Set the topology of an expert-parallel group, before a transport needs it. The same on all its ranks.

    Raises:
        ValueError: another number of ranks."""
    if group is None:
        return
    if topology.num_ranks != dist.get_world_size(group):
        raise ValueError(f"a topology of {topology.num_ranks} ranks for a group of {dist.get_world_size(group)}")
    _TOPOLOGIES[group] = topology


def topology_of(group: dist.ProcessGroup | None) -> Topology:
    """The topology of a group. The first call is collective over the group, unless `set_topology` was called.

    Raises:
        ValueError: the ranks contradict each other."""
    if group is None:
        return Topology.even(1)
    if group not in _TOPOLOGIES:
        _TOPOLOGIES[group] = find_topology(group)
    return _TOPOLOGIES[group]


def known_topology(group: dist.ProcessGroup) -> Topology | None:
    """The topology of a group if it is known already, else None. Not collective."""
    return _TOPOLOGIES.get(group)


def why_not_nodes(group: dist.ProcessGroup | None) -> str | None:
    """Why the ranks of a group are not on several nodes of equally many consecutive ranks; None: they are."""
    return None if group is None else why_not_several(topology_of(group))


def why_not_several(topology: Topology) -> str | None:
    """As `why_not_nodes`, for a given topology."""
    if topology.num_nodes == 1:
        return (
            f"by {topology.source} all {topology.num_ranks} ranks of the expert-parallel group are on one node, "
            f"and it needs several: use more expert-parallel ranks, or {SAY_NODES}"
        )
    try:
        topology.even_nodes()
    except ValueError as error:
        return str(error)
    return None


def hops_of(group: dist.ProcessGroup | None) -> Hops:
    """The rail and the node of this rank. The first call is collective over the group.

    Raises:
        ValueError: the nodes do not hold equally many consecutive ranks."""
    if group is None:
        return Hops(None, (0,), None, (0,))
    topology, rank = topology_of(group), dist.get_rank(group)
    made = _HOPS.setdefault(group, {})
    if topology.node_of not in made:
        nodes = [tuple(topology.ranks_of(node)) for node in range(topology.even_nodes())]
        rails = list(zip(*nodes, strict=True))
        rail_ranks, node_ranks = rails[topology.number_of[rank]], nodes[topology.node_of[rank]]
        along, inside = _part(group, rails, rail_ranks), _part(group, nodes, node_ranks)
        made[topology.node_of] = Hops(along, rail_ranks, inside, node_ranks)
    return made[topology.node_of]


def _part(
    group: dist.ProcessGroup, parts: Sequence[tuple[int, ...]], mine: tuple[int, ...]
) -> dist.ProcessGroup | None:
    """The process group of this rank's part of a group. Collective over the group alone: others make their own."""
    if len(mine) == 1:
        return None
    backend = dist.get_backend(group)
    made: dist.ProcessGroup | None
    if backend == "nccl" and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # There `new_group` is a collective over all ranks of the run, members or not.
        made = dist.split_group(group, [list(part) for part in parts], timeout=timeout_of(group))
    else:
        members = [dist.get_global_rank(group, rank) for rank in mine]
        made = dist.new_group(members, timeout_of(group), backend, use_local_synchronization=True)
    return made


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives, which groups made from it do not inherit. None: unknown."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def find_topology(group: dist.ProcessGroup | None, ranks_per_node: int | None = None, nvlink: bool = False) -> Topology:
    """The topology of a group's ranks. Collective over them.

    Args:
        group: None: all ranks.
        ranks_per_node: `parallelism.ranks_per_node`, which overrides the launcher.
        nvlink: whether this rank's GPU has NVLink to the others of its node.

    Raises:
        ValueError: ranks that contradict each other (on all ranks alike).
    """
    fabric = fabric_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
    mine = whereabouts(os.environ, dist.get_rank(), socket.gethostname(), ranks_per_node, nvlink, fabric)
    if group is not None and dist.get_world_size(group) < dist.get_world_size():
        # The launcher counts all ranks of a node; the group may have only some of them.
        mine = replace(mine, ranks_on_node=None)
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, mine, group=group)
    return agree(reports)


_NVML_FABRIC_COMPLETED = 3


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def fabric_of(device: torch.device, library: str = "libnvidia-ml.so.1") -> str | None:
    """The name of the NVLink fabric of a GPU, if it reaches beyond its node, or None: cluster and clique, from the
    driver. GPUs of one node are in a fabric as well, whose cluster is all zeros.

    Args:
        library: of the driver (NVML).
    """
    try:
        nvml = ctypes.CDLL(library)
        ask = nvml.nvmlDeviceGetGpuFabricInfo
    except (OSError, AttributeError):  # no driver, or one from before there were such fabrics
        return None
    handle, info = ctypes.c_void_p(), _FabricInfo()
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        return None
    if ask(handle, ctypes.byref(info)) or info.status or info.state != _NVML_FABRIC_COMPLETED or not any(info.cluster):
        return None
    return f"fabric {bytes(info.cluster).hex()}, clique {info.clique}"
