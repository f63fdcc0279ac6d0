"""What tests/gpu/test_tiles_gpu.py runs on every GPU: `torchrun --nproc-per-node 4 -m tests.gpu.tiles_worker MODE`.

    equal N    N random rides in tiles, in changing numbers of parts and between rides of other schedules on the same
               buffers: sums, gradients of rows and of routing weights are those of the plain ride bit by bit, gradients
               of the experts to rounding, and all are the same when the ride is taken again
    slow N     the same while some rank, each time another, comes late
    sync       no ride waits for the device
    missing    rank 1 does not ride: the others raise and name it

Rank 0 prints one line, `MODE: ...`, with "ok" if all ranks found everything right; else the exit code is 1.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from carpool.activations import ActivationPolicies
from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.experts.gemm.choices import Choices
from carpool.metrics.counters import LayerStats
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import RankMissingError
from carpool.transport.nvlink import NVLink, NVLinkOptions
from tests.gpu.nvlink_stress import world
from tests.gpu.ranks import run_mode
from tests.no_waits import no_waits

PARTS = (1, 2, 3, 8)  # kernels are compiled for each
TOKENS, HIDDEN, INNER, SLOTS, TOP_K = 700, 512, 264, 6, 4
ROWS = ("y", "dx", "dweight")
LATE_CYCLES = 5_000_000  # some milliseconds


class Problem:
    """One layer, and a way to ride for each schedule, all over the group's buffers."""

    def __init__(self, seed: int = 0, resend: bool = False, **options: Any) -> None:
        self.ranks, self.rank, self.device, group = world()
        self.policies = ActivationPolicies(expert_inputs="resend" if resend else "save")
        common = NVLinkOptions(max_tokens=TOKENS, arena_bytes=1 << 28, num_leases=4, **options)
        ways = [Schedule(), Schedule("chunks", 3), *(Schedule("tiles", parts) for parts in PARTS)]
        self.transports = {str(way): (NVLink(group, SLOTS, common.under(way, resend)), way) for way in ways}
        # The same kernels for all: others round elsewhere.
        choices = Choices(up="flat", down="flat", dact="wide", dx="flat", dup="wide", ddown="square")
        self.experts = GroupedExperts(ExpertFunction(make_activation("silu", True)), choices)
        self.common, self.own = random.Random(seed), random.Random(1000 * seed + self.rank)
        self.generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        self.weights = ExpertWeights(self.draw(SLOTS, 2 * INNER, HIDDEN), self.draw(SLOTS, HIDDEN, INNER))

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).mul_(0.1).to(torch.bfloat16)

    def case(self) -> tuple[torch.Tensor, ...]:
        """(x_TH, dy_TH, slot_TK, weight_TK) of this rank; ranks have other numbers of tokens."""
        tokens = self.own.choice((0, 1, 15, 16, 17, 129, 300, 512, 693, TOKENS))
        every = self.ranks * SLOTS
        slot_TK = torch.rand(tokens, every, generator=self.generator, device=self.device).argsort(1)[:, :TOP_K].int()
        kind = self.own.choice(("all", "holes", "one rank", "one expert", "nobody"))
        if kind == "holes":
            slot_TK[torch.rand(slot_TK.shape, generator=self.generator, device=self.device) < 0.5] = -1
        elif kind == "one rank":
            slot_TK = (
                torch.rand(tokens, SLOTS, generator=self.generator, device=self.device).argsort(1)[:, :TOP_K].int()
            )
            slot_TK += SLOTS * self.own.randrange(self.ranks)
        elif kind == "one expert":
            slot_TK[:, 0], slot_TK[:, 1:] = self.own.randrange(every), -1
        elif kind == "nobody":
            slot_TK[:] = -1
        weight_TK = torch.rand(slot_TK.shape, generator=self.generator, device=self.device)
        return self.draw(tokens, HIDDEN), self.draw(tokens, HIDDEN), slot_TK.contiguous(), weight_TK

    def ride(self, schedule: str, case: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        x, dy, slot_TK, weight = case
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        own = ExpertWeights(*(w.clone().requires_grad_() for w in self.weights if w is not None))
        transport, way = self.transports[schedule]
        stats = LayerStats(self.ranks * SLOTS, self.ranks, self.rank)
        setup = RideSetup(transport, self.experts, stats, way.order(transport, self.device), policies=self.policies)
        y, _ = ride(x, Routing(slot_TK, weight), slot_TK, own, setup)
        y.backward(dy)
        named = {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, "up": own[0].grad, "down": own[1].grad}
        return {name: value for name, value in named.items() if value is not None}


def compare(problem: Problem, rides: int, late: bool) -> tuple[bool, str]:
    wrong = torch.zeros(3, dtype=torch.int64, device=problem.device)
    begin = time.monotonic()
    for number in range(rides):
        case = problem.case()
        want = problem.ride("none", case)
        if number % 5 == 4:
            problem.ride("chunks=3", case)
        parts = problem.common.choice(PARTS)
        if late and problem.common.randrange(problem.ranks) == problem.rank:
            torch.cuda._sleep(LATE_CYCLES)
            time.sleep(0.002 * problem.own.random())
        got = problem.ride(f"tiles={parts}", case)
        again = problem.ride(f"tiles={parts}", case)
        wrong[0] += sum(((got[name] != want[name]).sum() for name in ROWS), start=wrong[0] * 0)
        wrong[1] += sum(((got[name] != again[name]).sum() for name in got), start=wrong[1] * 0)
        for name in ("up", "down"):
            # One step of bf16, and what an order of additions in float32 makes where terms cancel.
            allowed = want[name].float().abs() * 2**-7 + 1e-5 * want[name].float().abs().max() + 1e-30
            wrong[2] += (~((got[name].float() - want[name].float()).abs() <= allowed)).sum()
    rows, reruns, weights = wrong.tolist()
    for transport, _ in problem.transports.values():
        transport.buffers.check()
    seconds = time.monotonic() - begin
    text = f"{rides} rides on {problem.ranks} ranks in {seconds:.1f} s, elements that differ: {rows} of rows, "
    return rows == reruns == weights == 0, text + f"{weights} of gradients of experts, {reruns} in reruns"


def equal(rides: str) -> tuple[bool, str]:
    right, text = compare(Problem(), int(rides), late=False)
    again, more = compare(Problem(1, resend=True, dispatch_ctas=5, combine_ctas=3), int(rides) // 4, late=False)
    return right and again, f"{text}; sent again: {more}"


def slow(rides: str) -> tuple[bool, str]:
    return compare(Problem(2), int(rides), late=True)


def sync() -> tuple[bool, str]:
    problem = Problem(3)
    case = problem.case()
    problem.ride("none", case)
    problem.ride("tiles=2", case)
    torch.cuda.synchronize()
    with no_waits():
        problem.ride("tiles=2", case)
    return True, "no wait for the device"


def missing() -> tuple[bool, str]:
    problem = Problem(4)
    case = problem.case()
    problem.ride("tiles=2", case)  # ranks may compile at different speeds
    torch.cuda.synchronize()
    impatient = NVLinkOptions(max_tokens=TOKENS, timeout_seconds=3.0)
    group = dist.new_group(list(range(problem.ranks)))
    tiles = Schedule("tiles", 2)
    problem.transports[str(tiles)] = NVLink(group, SLOTS, impatient.under(tiles)), tiles
    problem.ride("tiles=2", case)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    told, begin = "nothing raised", time.monotonic()
    if problem.rank != 1:
        try:
            for _ in range(2):
                problem.ride("tiles=2", case)
                torch.cuda.synchronize()
        except RankMissingError as error:
            told = f"ranks {list(error.ranks)}"
    seconds = time.monotonic() - begin
    right = problem.rank == 1 or (told == "ranks [1]" and 2.5 <= seconds <= 15)
    return right, f"rank 0 was told {told} after {seconds:.1f} s"


MODES: dict[str, Callable[..., tuple[bool, str]]] = {fn.__name__: fn for fn in (equal, slow, sync, missing)}


if __name__ == "__main__":
    run_mode(MODES)
