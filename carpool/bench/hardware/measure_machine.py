"""`carpool doctor --measure`: links and rates of the machine, as a file for `parallelism.hardware` and `--hardware`.

{"hardware": {...},     what predictions read (`carpool.planner.machine.hardware.Hardware`)
 "links": [...],        each line that was fitted, with its residual and its points
 "topology", "slow_nodes", "seconds", "environment"}
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from carpool.bench.hardware.measure_links import Fit, measure_links, measure_push, measure_ring, slow_nodes
from carpool.bench.hardware.measure_rates import measure_copies, measure_disk, measure_rates, measure_work
from carpool.bench.options import find_ranks
from carpool.bench.result_files import print_table, terminal
from carpool.layout.topology import Topology
from carpool.metrics.host import device_name, environment
from carpool.parallel.ranks import gather
from carpool.planner.machine.hardware import Hardware, LinkRate, Work, hardware_of
from carpool.train.config import Config, load_config
from carpool.train.launch.machine import find_machine, rank_device
from carpool.train.launch.start import run


def measure_machine(
    out: Path, *, ranks: int | None = None, ranks_per_node: int | None = None, debug: bool = False
) -> None:
    """Start the ranks (or be one, under torchrun or Slurm), measure, show and write.

    Raises:
        ValueError: settings that do not fit this machine, or nodes with unequal numbers of ranks.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    cuda, num_ranks = find_ranks("auto", ranks)
    settings = [f"parallelism.num_ranks={num_ranks}", f"parallelism.device={'cuda' if cuda else 'cpu'}"]
    if ranks_per_node is not None:
        settings.append(f"parallelism.ranks_per_node={ranks_per_node}")
    run(load_config(None, settings), "carpool.bench.hardware.measure_machine:measure", debug=debug, out=str(out))


def measure(config: Config, out: str) -> None:
    """One rank's part; the process group is there."""
    began, device, path = time.perf_counter(), rank_device(), Path(out)
    torch.set_num_threads(1)
    topology = find_machine(config.parallelism, device).topology
    links, shared = measure_links(topology, device)
    links += measure_push(topology, device)
    ring = measure_ring(topology, device) if topology.num_nodes > 2 else []
    links += measure_copies(device)
    links += measure_disk(path.parent if path.parent.is_dir() else Path.cwd(), device)
    flops, memory = measure_rates(device)
    kernels = measure_work(device)
    hosts = gather(socket.gethostname())
    if dist.get_rank() != 0:
        return
    slow = [_name(node, topology, hosts) for node in slow_nodes(ring)]
    name = device_name(device)
    found = {
        "hardware": measured_hardware(hardware_of(name), name, links, flops, memory, shared, kernels).to_dict(),
        "links": [one.to_dict() for one in links],
        "topology": topology.to_dict(),
        "slow_nodes": slow,
        "seconds": round(time.perf_counter() - began, 1),
        "environment": environment(device, topology.num_ranks),
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    _show(topology, links, shared, slow, kernels)
    print(f"wrote {path} after {found['seconds']} s; parallelism.hardware={path} takes it", flush=True)


def measured_hardware(
    known: Hardware,
    name: str,
    links: Sequence[Fit],
    flops: float,
    memory: float,
    shared: bool,
    kernels: Mapping[str, Work],
) -> Hardware:
    """What was measured, over what is known of the device: its peak, its capacity, and links that are not here.
    `flops` and `memory`: of `measure_rates`."""
    fits = {one.name: one.rate for one in links}
    changed: dict[str, Any] = measured_links(links)
    if "to host" in fits:
        changed["host"] = slower(fits["to device"], fits["to host"])
    missing = [
        link for link in ("node", "network") if link not in changed and not (link == "node" and "nvlink" in fits)
    ]
    return replace(
        known,
        **changed,
        name=f"{name}, measured",
        flops=flops,
        memory=memory,
        disk=slower(fits["disk, write"], fits["disk, read"]),
        shared_network=shared,
        kernels=kernels,
        source="measured" + (f"; {' and '.join(missing)}: {known.source}" if missing else ""),
    )


def measured_links(links: Sequence[Fit]) -> dict[str, LinkRate]:
    """Rates of the links between ranks, by their fields of `Hardware`."""
    fields = {one: one for one in ("nvlink", "node", "network", "push", "gathered")}
    fields["network, alone, both ways"] = "network_alone"
    return {fields[one.name]: one.rate for one in links if one.name in fields}


def slower(one: LinkRate, other: LinkRate) -> LinkRate:
    """The smaller bandwidth with the larger latency."""
    return LinkRate(min(one.bytes_per_second, other.bytes_per_second), max(one.latency, other.latency))


def _name(node: int, topology: Topology, hosts: Sequence[str]) -> str:
    ranks = topology.ranks_of(node)
    return f"node {node} ({hosts[ranks[0]]}; ranks {', '.join(map(str, ranks))})"


def _show(
    topology: Topology,
    links: Sequence[Fit],
    shared: bool,
    slow: Sequence[str],
    kernels: Mapping[str, Work],
) -> None:
    console = terminal(120)
    rows = [
        [one.name, f"{one.rate.latency * 1e6:,.1f} us", f"{one.rate.bytes_per_second / 1e9:,.3g} GB/s",
         f"{100 * one.residual:.0f} %", str(len(one.points))]
        for one in links
    ]  # fmt: skip
    title = f"links: {topology.num_ranks} ranks on {topology.num_nodes} nodes (by {topology.source})"
    print_table(console, title, ["link", "latency", "per rank, all at once", "residual", "sizes"], rows)
    if shared:
        console.print("the ranks of a node share one port: alone a rank sends faster", highlight=False)
    for name in slow:
        console.print(f"[yellow]slow link:[/] {name} reaches less than half of what others do", highlight=False)
    columns = ["kernels", "latency", "products", "memory", "residual"]
    print_table(console, "kernels: latency + operations / rate + bytes / bandwidth", columns, [
        [name, f"{one.latency * 1e6:,.1f} us", _per_second(one.flops_per_second, "FLOP/s"),
         _per_second(one.bytes_per_second, "bytes/s"), f"{100 * one.residual:.0f} %"]
        for name, one in kernels.items()
    ])  # fmt: skip


def _per_second(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    for prefix, size in (("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:,.3g} {prefix}{unit}"
    return f"{value / 1e6:,.3g} M{unit}"
