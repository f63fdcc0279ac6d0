"""Schedules of a pipeline: which stage is where, which layers it has, and in what order micro-batches go through."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from carpool.activations import Arena
from carpool.parallel.pipeline import Pipeline, Tensors, Work
from carpool.parallel.schedules import PAIRED, SCHEDULES, check_micro_batches, cut, stages_of
from carpool.ride.forward_backward import ForwardBesideBackward
from carpool.ride.turns import handover
from tests.ranks import Ranks


def slowest(costs: list[float], ranges: list[range], first: float, last: float) -> float:
    stages = [sum(costs[layer] for layer in layers) for layers in ranges]
    stages[0] += first
    stages[-1] += last
    return max(stages)


def test_no_cut_has_a_faster_slowest_stage() -> None:
    rng = random.Random(0)
    for _ in range(100):
        costs = [float(rng.randint(1, 9)) for _ in range(rng.randint(4, 9))]
        number, first, last = rng.randint(1, 4), float(rng.randint(0, 9)), float(rng.randint(0, 9))
        ranges = cut(costs, number, first, last)
        assert [layer for layers in ranges for layer in layers] == list(range(len(costs))) and all(ranges)
        inner = itertools.combinations(range(1, len(costs)), number - 1)
        every = [[range(a, b) for a, b in itertools.pairwise((0, *ends, len(costs)))] for ends in inner]
        assert slowest(costs, ranges, first, last) == min(slowest(costs, one, first, last) for one in every)


def test_a_head_that_costs_as_much_as_two_layers_counts() -> None:
    assert cut([1.0] * 8, 4, last=2.0) == [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]


def test_too_few_layers() -> None:
    with pytest.raises(ValueError, match=r"3 layers cannot be cut into 4 stages.*pp_schedule"):
        cut([1.0] * 3, 4)


def test_a_v_has_both_ends_on_one_rank() -> None:
    assert stages_of("ZBVZeroBubble", 3) == [(0, 5), (1, 4), (2, 3)]
    assert stages_of("Interleaved1F1B", 3) == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(
    ("schedule", "wrong", "right"), [("1F1B", 3, 4), ("DualPipeV", 7, 8), ("Interleaved1F1B", 9, 8)]
)
def test_numbers_of_micro_batches(schedule: str, wrong: int, right: int) -> None:
    with pytest.raises(ValueError, match=f"gradient_accumulation_steps = {right}"):
        check_micro_batches(schedule, 4, wrong)
    check_micro_batches(schedule, 4, right)


def at_once() -> Any:
    """What runs pairs."""
    return ForwardBesideBackward(nn.Linear(1, 1)).run


def run_toy(schedule: str, micro_batches: int, paired: bool = False) -> float:
    """The largest difference of a gradient from that of the same layers on one process, after two steps."""
    stages = 2 * SCHEDULES[schedule].stages
    torch.manual_seed(0)
    own = [torch.randn(5, 5, dtype=torch.float64, requires_grad=True) for _ in range(stages)]
    theirs = [one.detach().clone().requires_grad_() for one in own]
    inputs = torch.randn(micro_batches, 3, 5, dtype=torch.float64)
    for x in inputs:
        for weight in theirs:
            x = torch.tanh(x @ weight)
        x.square().sum().backward()

    def forward(stage: int, number: int, received: Tensors) -> Tensors:
        x = torch.tanh((received[0] if stage else inputs[number]) @ own[stage])
        return (x.square().sum() if stage == stages - 1 else x,)

    group = dist.group.WORLD
    assert group is not None
    pairs = at_once() if paired else None
    pipeline = Pipeline(schedule, group, stages, Work(forward), torch.device("cpu"), pairs)
    travels = (torch.empty(3, 5, dtype=torch.float64, device="meta"),)
    for _ in range(2):
        for weight in own:
            weight.grad = None
        pipeline.step(micro_batches, travels)
    gradients = [(own[stage].grad, theirs[stage].grad) for stage in pipeline.stages]
    return max(float((a - b).abs().max()) for a, b in gradients if a is not None and b is not None)


def run_toys() -> list[float]:
    found = [run_toy(schedule, micro_batches) for schedule in SCHEDULES for micro_batches in (4, 6)]
    return [*found, *(run_toy(schedule, 6, paired=True) for schedule in PAIRED)]


def test_every_schedule_has_the_gradients_of_one_process(two_ranks: Ranks) -> None:
    assert max(itertools.chain.from_iterable(two_ranks(run_toys))) < 1e-12


class Keep(torch.autograd.Function):
    """Keeps four numbers in an arena until its backward, which takes four more, as rides do. Of a pair, the other one
    goes on in between."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arena: Arena) -> torch.Tensor:
        handover()
        ctx.arena, kept = arena, arena.reserve(4, torch.float32, torch.tensor([1]))
        ctx.lane = kept.arena
        ctx.save_for_backward(kept.start)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        handover()
        assert ctx.arena.reserve(4, torch.float32, torch.tensor([1])).arena is ctx.lane
        return 2 * dy, None


def most_kept(schedule: str, micro_batches: int, paired: bool = False) -> list[int]:
    """The most reservations that were in each lane of an arena at one time."""
    stages, arena = 2 * SCHEDULES[schedule].stages, Arena(1 << 16, torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None

    def forward(stage: int, number: int, received: Tensors) -> Tensors:
        x = received[0] if stage else torch.ones(3, requires_grad=True)
        for _ in range(2):
            x = Keep.apply(x, arena)
        return (x.sum() if stage == stages - 1 else x,)

    pairs = at_once() if paired else None
    work = Work(forward, lane=arena.use_lane)
    pipeline = Pipeline(schedule, group, stages, work, torch.device("cpu"), pairs)
    arena.make_lanes(pipeline.lanes(micro_batches))
    pipeline.step(micro_batches, (torch.empty(3, device="meta"),))
    return [int(one.needed) // 256 for one in (arena, *arena.companions)]


def most_kept_of_all() -> dict[str, list[int]]:
    found = {schedule: most_kept(schedule, 8) for schedule in SCHEDULES}
    return found | {f"{schedule} in pairs": most_kept(schedule, 8, paired=True) for schedule in PAIRED}


def test_what_micro_batches_keep_is_given_back_as_they_are_done(two_ranks: Ranks) -> None:
    for found in two_ranks(most_kept_of_all):
        assert found.pop("GPipe") == [17]
        assert all(max(lanes) == 3 for lanes in found.values()), found
        assert len(found["1F1B"]) == 2
