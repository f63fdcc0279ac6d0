"""The topology of a run: every rank says where it is, and all agree."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from carpool.layout.topology import Topology, agree, whereabouts
from carpool.train.config.schema import ParallelismSection


def find_topology(section: ParallelismSection, device: torch.device) -> Topology:
    """The topology of all ranks of a run. Collective over them.

    Raises:
        ValueError: ranks that contradict each other (on all ranks alike).
    """
    mine = whereabouts(
        os.environ, dist.get_rank(), socket.gethostname(), section.ranks_per_node, nvlink=device.type == "cuda"
    )
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    return agree(reports)


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The run's ranks in an expert-parallel group, in the group's order. None: this rank alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
