"""What a run runs on: found by its ranks together, or imagined for a dry run."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.metrics.host import device_name
from carpool.parallel.ranks import from_rank_0
from carpool.parallel.world import find_world
from carpool.planner.machine.hardware import HARDWARE, Hardware, find_hardware, hardware_of
from carpool.plugins.nearest import did_you_mean
from carpool.train.config.schema import Config, ParallelismSection
from carpool.train.launch.start import local_ranks
from carpool.train.launch.worker import use_cuda
from carpool.transport.nodes import find_topology

# GPUs of a node, where nobody says how many there are.
NODE = 8


@dataclass(frozen=True)
class Machine:
    """As far as the decisions about a run depend on it.

    Attributes:
        topology, hardware: of all ranks; rates for the cost model.
        memory: bytes that a rank may use.
        here: it is this machine, which can be asked; not another one, of which only the datasheet is known.
        device, rank: this rank's; without a device no rank runs, and nothing can be measured.
    """

    topology: Topology
    hardware: Hardware
    memory: int
    cuda: bool
    here: bool = True
    device: torch.device | None = None
    rank: int = 0

    @property
    def ranks(self) -> int:
        return self.topology.num_ranks


def find_machine(section: ParallelismSection, device: torch.device) -> Machine:
    """Every rank says where it is, and all agree on the topology and on the rates of the hardware: what
    `parallelism.hardware` names, or those of rank 0's device. Collective over all ranks. Raises ValueError for ranks
    that contradict each other (on all ranks alike), or hardware that is not known."""
    own, cuda, rank = hardware_of(device_name(device)), device.type == "cuda", dist.get_rank()
    topology = find_topology(None, section.ranks_per_node, own.nvlink is not None)
    named = section.hardware
    hardware = from_rank_0(lambda: own if named is None else find_hardware(named))
    return Machine(topology, hardware, rank_memory(cuda, topology.node_size(rank)), cuda, device=device, rank=rank)


def imagine_machine(config: Config, gpu: str | None) -> Machine:
    """What a run would find, without its ranks. `gpu`: the name of a GPU for which the run is meant; None: it is meant
    for this machine. Raises ValueError for a GPU or hardware that is not known, or more ranks than there are GPUs."""
    section = config.parallelism
    if gpu is not None:
        cuda, own = True, find_gpu(gpu)
        # Whoever has cards without NVLink has mostly one of them.
        ranks = section.num_ranks or (1 if own.nvlink is None else NODE)
        memory, per_node = int(own.capacity or 0), min(NODE, ranks)
    else:
        cuda, world = use_cuda(config), find_world(os.environ)
        ranks = world.world_size if world is not None else local_ranks(config)
        own = hardware_of(torch.cuda.get_device_name() if cuda else "cpu")
        memory, per_node = rank_memory(cuda, ranks), ranks
    per_node = section.ranks_per_node or per_node
    # The last node may have fewer.
    node_of = tuple(rank // per_node for rank in range(ranks))
    topology = Topology(node_of, node_of if own.nvlink is not None else tuple(range(ranks)), "the settings")
    hardware = own if section.hardware is None else find_hardware(section.hardware)
    return Machine(topology, hardware, memory, cuda, here=gpu is None)


def find_gpu(name: str) -> Hardware:
    """The profile of a GPU by its name, such as "h100" or "rtx4090", with or without spaces. ValueError if none with
    known memory has it."""
    known = {one.lower(): profile for one, profile in HARDWARE.items() if profile.capacity is not None}
    letters = "".join(one for one in name.lower() if one.isalnum())
    if (found := next((one for one in known if one.replace(" ", "") == letters), None)) is not None:
        return known[found]
    raise ValueError(f"--gpu {name} is not known{did_you_mean(name.lower(), known)}; known are {', '.join(known)}")


def rank_device() -> torch.device:
    """The device of this rank, whose process group is there."""
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def rank_memory(cuda: bool, ranks: int) -> int:
    """Bytes that a rank may use: of its GPU, or its share of the memory of this machine, on which `ranks` are."""
    if cuda:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The run's ranks in an expert-parallel group, in the group's order. None: this rank alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
