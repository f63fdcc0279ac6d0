"""Links between ranks: an all-to-all of growing size over each class of link, all ranks at once.

    nvlink or node    the ranks of each node among themselves, all nodes at once
    gathered          the same ranks, an all-gather in place of the all-to-all
    push              copies into the memory of the other GPUs, which no multiprocessor makes
    network           every rank to all ranks of other nodes, all at once
    network, alone    the first rank of every second node sends to the first of the next, while all others wait
    network, alone, both ways    the first ranks of all nodes exchange, while all others wait

What a rank sends while all do is what a ride lets it send, so its rate is that of a ride. If a rank alone sends much
faster, the ranks of a node share a port (`Hardware.shared_network`). It sends one way, because one connection of gloo
reaches half of a link when it works both ways. What it reaches both ways is asked for where one rank sends for all of
its node (`Hardware.network_alone`).

A slow cable shows where each node sends to the next one and receives from the one before, all at once: both of its
neighbours see it, and say so (`slow_nodes`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.metrics.host import synchronize, timed
from carpool.planner.machine.hardware import LinkRate
from carpool.transport.nodes import hops_of, set_topology
from carpool.transport.nvlink.options import why_not

SIZES = (2**12, *(2**power for power in range(16, 28, 2)))  # that a rank sends: 4 KiB, and 64 KiB to 64 MiB
# No size above one that took so long, and so long for the repetitions of one size.
LONGEST, EACH = 0.4, 0.4
# How much faster a rank must be alone, to have shared a port.
SHARED = 1.5
# A node this much slower than the fastest third is named.
SLOW = 0.5
_RING_BYTES = 4 * 2**20


def measure_links(topology: Topology, device: torch.device) -> tuple[list[Fit], bool]:
    """(fits, whether the ranks of a node share a port). All ranks of the run together.

    Raises:
        ValueError: nodes with unequal numbers of ranks."""
    group = dist.group.WORLD
    if topology.num_ranks == 1 or group is None:
        return [], False
    set_topology(group, topology)
    hops = hops_of(group)
    fits = []
    if len(hops.node_ranks) > 1:
        inside = "nvlink" if "nvlink" in topology.pairs else "node"
        fits.append(_measure(inside, hops.node, len(hops.node_ranks) * [1], device))
        fits.append(_measure_gather(hops.node, device))
    if topology.num_nodes == 1:
        return fits, False
    rank = dist.get_rank()
    mine = topology.node_of[rank]
    together = _measure("network", group, [int(node != mine) for node in topology.node_of], device)
    fits.append(together)
    if len(hops.node_ranks) == 1:
        return fits, False
    alone = _measure_alone(_firsts(topology), device)
    first, everyone = hops.node_ranks[0] == rank, len(hops.rail_ranks) * [1]
    fits += [alone, _measure(f"{alone.name}, both ways", hops.rail, everyone, device, first)]
    return fits, alone.rate.bytes_per_second > SHARED * together.rate.bytes_per_second


def _firsts(topology: Topology) -> list[int]:
    """The first rank of each node."""
    return [topology.ranks_of(node)[0] for node in range(topology.num_nodes)]


def _measure(
    name: str, group: dist.ProcessGroup | None, share_W: Sequence[int], device: torch.device, joins: bool = True
) -> Fit:
    """An all-to-all within each rank's `group`, equally much to all that have a share of 1. `joins`: this rank does."""
    own = dist.get_rank(group)
    peers = sum(share_W) - share_W[own]

    def exchange(size: int) -> Callable[[], object]:
        splits = [share * (size // peers) for share in share_W]
        sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        if not joins:
            return lambda: None
        return lambda: dist.all_to_all_single(received, sent, splits, splits, group=group)

    return _fit(name, exchange, device)


def _measure_gather(group: dist.ProcessGroup | None, device: torch.device) -> Fit:
    """An all-gather within each rank's `group`; sizes are of what a rank receives."""
    peers = dist.get_world_size(group) - 1

    def exchange(size: int) -> Callable[[], object]:
        shard = torch.zeros(size // peers, dtype=torch.uint8, device=device)
        whole = torch.empty((peers + 1) * shard.numel(), dtype=torch.uint8, device=device)
        # Newer torch calls it all_gather_single and warns whoever uses the name that torch 2.11 knows.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: gather(whole, shard, group=group)

    return _fit("gathered", exchange, device)


def measure_push(topology: Topology, device: torch.device) -> list[Fit]:
    """Copies into the memory of all others, where all ranks are GPUs that can do that; each begins with the next rank.
    All ranks together."""
    group = dist.group.WORLD
    if device.type != "cuda" or topology.num_ranks == 1 or group is None or why_not(group) is not None:
        return []
    from torch.distributed import _symmetric_memory as symmetric_memory

    rank, number = dist.get_rank(), topology.num_ranks
    most = max(SIZES) // 16 * 16
    source = torch.zeros(most, dtype=torch.uint8, device=device)
    memory = symmetric_memory.empty(number * most, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    places = [
        handle.get_buffer((rank + i) % number, (number * most,), torch.uint8)[rank * most :][:most]
        for i in range(1, number)
    ]

    def push(size: int) -> Callable[[], object]:
        each = size // len(places)

        def once() -> None:
            for place in places:
                place[:each].copy_(source[:each], non_blocking=True)

        return once

    return [_fit("push", push, device)]


def _measure_alone(firsts: Sequence[int], device: torch.device) -> Fit:
    """From each second of these ranks to the next one."""
    rank = dist.get_rank()
    place = firsts.index(rank) if rank in firsts else -1

    def send(size: int) -> Callable[[], object]:
        rows = torch.zeros(size, dtype=torch.uint8, device=device)
        if place >= 0 and place % 2 == 0 and place + 1 < len(firsts):
            return lambda: dist.send(rows, firsts[place + 1])
        if place > 0 and place % 2 == 1:
            return lambda: dist.recv(rows, firsts[place - 1])
        return lambda: None

    return _fit("network, alone", send, device)


def _fit(name: str, make: Callable[[int], Callable[[], object]], device: torch.device) -> Fit:
    """The line through times of what `make` makes of each size."""
    points = []
    for size in SIZES:
        points.append((size, seconds_of(make(size), device)))
        if points[-1][1] > LONGEST:
            break
    return fit(name, points)


def seconds_of(once: Callable[[], object], device: torch.device) -> float:
    """Median seconds of what all ranks do at the same time, on the slowest rank. Collective."""
    once()  # connections are made, memory is touched
    found: list[float] = []
    # All see the times of the slowest rank, and so all repeat equally often.
    while len(found) < 3 or (len(found) < 25 and sum(found) < EACH):
        found.append(timed(once, device).ms / 1e3)
    return statistics.median(found)


def measure_ring(topology: Topology, device: torch.device) -> list[float]:
    """Bytes per second from each node to the next. All ranks together; the first of each node takes part."""
    firsts, rank, nodes = _firsts(topology), dist.get_rank(), topology.num_nodes
    sent = torch.zeros(_RING_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    seconds_N = torch.zeros(nodes, dtype=torch.float64, device=device)
    for _ in range(2):  # the first time makes connections
        dist.barrier()
        if rank in firsts:
            node = firsts.index(rank)
            began = time.perf_counter()
            ops = [
                dist.P2POp(dist.isend, sent, firsts[(node + 1) % nodes]),
                dist.P2POp(dist.irecv, received, firsts[node - 1]),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            synchronize(device)
            seconds_N.zero_()[node - 1] = time.perf_counter() - began
    dist.all_reduce(seconds_N)
    return [_RING_BYTES / seconds for seconds in seconds_N.tolist()]


def slow_nodes(rate_N: Sequence[float]) -> list[int]:
    """The nodes whose cable is slow, by the rates from each node to the next: what they send and what they receive is.
    It takes three nodes to tell."""
    if len(rate_N) < 3:
        return []
    # Not the median: of three rates two are those of one slow node.
    fast = sorted(rate_N)[-(len(rate_N) // 3)]
    slow = [rate < SLOW * fast for rate in rate_N]
    return [node for node in range(len(rate_N)) if slow[node] and slow[node - 1]]


@dataclass(frozen=True)
class Fit:
    """Attributes:
    name: of what was measured.
    residual: root of the mean square of (fitted - measured) / measured.
    points: (bytes, seconds) that were measured.
    """

    name: str
    rate: LinkRate
    residual: float
    points: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit(name: str, points: Sequence[tuple[int, float]]) -> Fit:
    """The line `seconds = alpha + bytes / beta` through at least two points of different sizes, by least squares. Where
    the best latency would be negative, it is 0.

    A point weighs as the inverse of its time. So the latency is not lost in the noise of large messages, as it would be
    if all weighed the same; and large messages decide on the bandwidth, which small ones that fit into some buffer on
    the way seem to exceed.
    """
    size_N, seconds_N = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    weight_N = 1 / np.sqrt(seconds_N)
    terms_N2 = np.stack([np.ones_like(size_N), size_N], axis=1) * weight_N[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(terms_N2, seconds_N * weight_N, rcond=None)
    if alpha < 0 or per_byte <= 0:
        alpha, per_byte = 0.0, float(size_N.sum() / (size_N**2 / seconds_N).sum())
    residual_N = (alpha + per_byte * size_N) / seconds_N - 1
    rate = LinkRate(float(1 / per_byte), float(alpha))
    return Fit(name, rate, float(np.sqrt((residual_N**2).mean())), tuple((int(n), float(s)) for n, s in points))
