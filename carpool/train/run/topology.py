"""What a run finds out about its machine: every rank says where it is, and all agree on topology and hardware."""

from __future__ import annotations

import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.planner.hardware import Hardware, find_hardware, hardware_of
from carpool.train.checkpoints.ranks import from_rank_0
from carpool.train.config.schema import ParallelismSection
from carpool.transport.places import find_topology


def find_machine(section: ParallelismSection, device: torch.device) -> tuple[Topology, Hardware]:
    """The topology of all ranks of a run, and rates of the hardware: what `parallelism.hardware` names, or those of
    rank 0's device. Collective over them.

    Raises:
        ValueError: ranks that contradict each other (on all ranks alike), or hardware that is not known.
    """
    own = hardware_of(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    topology = find_topology(None, section.ranks_per_node, own.nvlink is not None)
    named = section.hardware
    return topology, from_rank_0(lambda: own if named is None else find_hardware(named))


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The run's ranks in an expert-parallel group, in the group's order. None: this rank alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
