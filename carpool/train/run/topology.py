"""What a run finds out about its machine: every rank says where it is, and all agree on topology and hardware."""

from __future__ import annotations

import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.planner.hardware import Hardware, hardware_of
from carpool.train.checkpoints.ranks import gather
from carpool.train.config.schema import ParallelismSection
from carpool.transport.places import find_topology


def find_machine(section: ParallelismSection, device: torch.device) -> tuple[Topology, Hardware]:
    """The topology of all ranks of a run, and rates of rank 0's hardware. Collective over them.

    Raises:
        ValueError: ranks that contradict each other (on all ranks alike).
    """
    hardware = hardware_of(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    topology = find_topology(None, section.ranks_per_node, hardware.nvlink is not None)
    return topology, gather(hardware)[0]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The run's ranks in an expert-parallel group, in the group's order. None: this rank alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
