"""Where the ranks of a group are: each says it, and all agree. The one place where ranks are asked.

    find_topology(None, ranks_per_node=2)     Topology(node_of=(0, 0, 1, 1), ...), the same on all four ranks

A rank knows its node from its launcher or from the configuration (`carpool.layout.topology.whereabouts`). Whether its
NVLink domain is more than its node, the driver knows: it names the fabric that a GPU belongs to (`fabric_of`).
"""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from carpool.layout.topology import Topology, agree, whereabouts


def find_topology(group: dist.ProcessGroup | None, ranks_per_node: int | None = None, nvlink: bool = False) -> Topology:
    """The topology of a group's ranks. Collective over them.

    Args:
        group: None: all ranks.
        ranks_per_node: `parallelism.ranks_per_node`, which overrides the launcher.
        nvlink: whether this rank's GPU is of a kind that NVLink joins inside a node.

    Raises:
        ValueError: ranks that contradict each other (on all ranks alike).
    """
    fabric = fabric_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
    mine = whereabouts(os.environ, dist.get_rank(), socket.gethostname(), ranks_per_node, nvlink, fabric)
    if group is not None and dist.get_world_size(group) < dist.get_world_size():
        # The launcher counts all ranks of a node, of which the group has some.
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
    """The name of the NVLink fabric of a GPU that reaches beyond its node, or None: cluster and clique, as the driver
    says. GPUs of one node are in a fabric as well, whose cluster is all zeros.

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
