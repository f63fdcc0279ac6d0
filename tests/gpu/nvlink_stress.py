"""Thousands of random rides over real GPUs, each compared bit by bit (nvlink_rides.py), and cases for other checks."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from carpool.metrics.counters import Traffic
from carpool.transport.nvlink import NVLink, NVLinkOptions
from tests.gpu.nvlink_rides import PATTERNS, Case, Mismatches, Ride, Shape, draw_routings, draw_sizes

# Kernels are compiled for each of these, so they are few: (a shape's fields, options).
STRESS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"hidden": 2048, "top_k": 8, "slots": 16}, {}),
    ({"hidden": 1024, "top_k": 4, "slots": 3, "dtype": torch.float32}, {"dispatch_ctas": 5, "combine_ctas": 3}),
    ({"hidden": 200, "top_k": 9, "slots": 40}, {"dispatch_ctas": 2, "combine_ctas": 1}),
    ({"hidden": 200, "top_k": 2, "slots": 7, "dtype": torch.float32}, {"side_stream": True}),
    ({"hidden": 64, "top_k": 1, "slots": 1}, {}),
    ({"hidden": 1024, "top_k": 6, "slots": 2}, {"side_stream": True}),
]
BATCH = 64  # routings that are drawn at once
SPARE = 2048  # rows beside those of a case: each case takes its rows from another place


def world() -> tuple[int, int, torch.device, Any]:
    """(ranks, rank, device, group); the group is None for one rank, as the transport wants it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return ranks, rank, torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD if ranks > 1 else None


def from_rank_0(*tensors: torch.Tensor) -> None:
    """Overwrite the tensors with rank 0's: that ranks draw the same numbers is not relied on."""
    for tensor in tensors:
        dist.broadcast(tensor, 0)


class Cases:
    """Cases of one shape, the same on all ranks, drawn in batches. full: every rank has all T tokens."""

    def __init__(self, shape: Shape, seed: int, full: bool = False) -> None:
        self.shape, self.full = shape, full
        _, _, self.device, _ = world()
        self.draw = random.Random(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        rows = (shape.ranks, shape.tokens + SPARE, shape.hidden)
        self.rows_WNH = torch.randn(rows, generator=self.generator, device=self.device).to(shape.dtype)
        from_rank_0(self.rows_WNH)
        self.waiting: list[Case] = []

    def next(self) -> Case:
        if not self.waiting:
            self._draw_batch()
        return self.waiting.pop()

    def _draw_batch(self) -> None:
        shape, draw = self.shape, self.draw
        all_of_them = (shape.tokens,) * shape.ranks
        sizes = [all_of_them if self.full else draw_sizes(shape.ranks, shape.tokens, draw) for _ in range(BATCH)]
        slot, weight = draw_routings(shape, sizes, self.generator, self.device)
        from_rank_0(slot, weight)
        for number, size in enumerate(sizes):
            x, dy = (self.rows_WNH[:, at : at + shape.tokens] for at in (draw.randint(0, SPARE) for _ in range(2)))
            self.waiting.append(Case(size, slot[number], weight[number], x, dy))


class Stress:
    """Rides of one shape in pairs, so that two dispatches may be in flight.

    Attributes:
        sent_W, served_W: rows that this rank's tokens need on each rank, and that it serves for each."""

    def __init__(self, number: int, found: Mismatches) -> None:
        fields, options = STRESS[number]
        ranks, rank, device, group = world()
        self.found, self.shape = found, Shape(ranks, **fields)
        self.options = NVLinkOptions(max_tokens=self.shape.tokens, **options)
        self.transport = NVLink(group, self.shape.slots, self.options)
        self.cases, self.traffic = Cases(self.shape, seed=number), Traffic(ranks, rank)
        self.sent_W, self.served_W = torch.zeros(2, ranks, dtype=torch.int64, device=device)

    def run(self, count: int) -> float:
        """Run `count` cases, an even number; seconds that it took. Kernels are compiled before."""
        self._pair(PATTERNS[0])
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for pair in range(count // 2):
            self._pair("together" if self.options.side_stream and pair % 2 else PATTERNS[pair % len(PATTERNS)])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        rows = self.traffic.rows
        for verb in ("dispatch", "combine", "combine_backward", "dispatch_backward"):
            want_W = self.sent_W if verb in ("dispatch", "combine_backward") else self.served_W
            self.found.add("traffic", torch.tensor(rows[verb], device=want_W.device) != want_W)
        return seconds

    def _pair(self, pattern: str) -> None:
        rides = {letter: self._ride() for letter in "ab"}
        if pattern != "together":
            for letter in pattern:
                rides[letter].step()
            return
        for _ in range(4):
            pending = [ride.start() for ride in rides.values()]
            for ride, sent in zip(rides.values(), pending, strict=True):
                ride.finish(sent)

    def _ride(self) -> Ride:
        self.found.number += 1
        ride = Ride(self.transport, self.shape, self.cases.next(), self.traffic, self.found)
        ranks_W11 = torch.arange(self.shape.ranks, device=ride.device)[:, None, None]
        self.sent_W += (ride.slot_TK // self.shape.slots == ranks_W11).any(2).sum(1)
        self.served_W += ride.want_WT.sum(1)
        return ride


def stress(total: int) -> tuple[bool, str]:
    """(whether all was right on this rank, what to say about all ranks)."""
    ranks, rank, device, _ = world()
    found, seconds = Mismatches(device), 0.0
    each = -(-total // len(STRESS) // 2) * 2
    for number in range(len(STRESS)):
        rides = Stress(number, found)
        took = rides.run(each)
        seconds += took
        if rank == 0:
            print(f"  {rides.shape} {STRESS[number][1] or ''}: {each} cases in {took:.1f} s, {found}", flush=True)
    right = not found.counts.any() and not rides.transport.buffers.overflow()
    if ranks > 1:
        dist.all_reduce(found.counts)
        dist.all_reduce(found.first, op=dist.ReduceOp.MIN)
    return bool(right), f"{each * len(STRESS)} cases on {ranks} ranks in {seconds:.1f} s, {found}"
