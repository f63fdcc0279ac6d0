"""Properties of the pipeline schedules, for the planner, configuration checks and the pipeline itself.

Names and orders are those of `torch.distributed.pipelining`. `carpool.parallel.pipeline` runs them, and
`carpool.planner.step.pipelines` simulates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

Action = TypeVar("Action")


class Kind(NamedTuple):
    """A schedule.

    Attributes:
        stages: per rank.
        is_v: whether a rank's stages are r and 2P - 1 - r, instead of r and P + r.
        splits: whether weight gradients are actions of their own.
        has_pairs: whether the forward and the backward of two micro-batches can run at the same time.
    """

    stages: int = 1
    is_v: bool = False
    splits: bool = False
    has_pairs: bool = False


SCHEDULES = {
    "GPipe": Kind(),
    "1F1B": Kind(),
    "Interleaved1F1B": Kind(2, has_pairs=True),
    "InterleavedZeroBubble": Kind(2, splits=True),
    "ZBVZeroBubble": Kind(2, is_v=True, splits=True),
    "DualPipeV": Kind(2, is_v=True, splits=True, has_pairs=True),
}
PAIRED = tuple(name for name, kind in SCHEDULES.items() if kind.has_pairs)


def rank_of(schedule: str, ranks: int, stage: int) -> int:
    """The rank of a stage. In loops: 0 1 2 0 1 2; in a V: 0 1 2 2 1 0."""
    loop, place = divmod(stage, ranks)
    return ranks - 1 - place if SCHEDULES[schedule].is_v and loop else place


def stages_of(schedule: str, ranks: int) -> list[tuple[int, ...]]:
    """The stages of each rank, in order.

    Example: ZBVZeroBubble on 2 ranks has 4 stages: [(0, 3), (1, 2)]; Interleaved1F1B: [(0, 2), (1, 3)].
    """
    every = range(ranks * SCHEDULES[schedule].stages)
    return [tuple(stage for stage in every if rank_of(schedule, ranks, stage) == rank) for rank in range(ranks)]


def check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raise ValueError, with the nearest possible number, if a schedule cannot run so many micro-batches."""
    least = {"GPipe": 1, "ZBVZeroBubble": 1, "DualPipeV": 2 * ranks}.get(schedule, ranks)
    # PyTorch's interleaved schedules run in rounds of equally many micro-batches.
    rounds = max(1, micro_batches // ranks) if schedule.startswith("Interleaved") else 1
    if micro_batches < least or micro_batches % rounds:
        nearest = max(least, round(micro_batches / ranks) * ranks)
        raise ValueError(
            f"parallelism.pp_schedule = {schedule!r} on parallelism.pp_size = {ranks} ranks cannot run "
            f"{micro_batches} micro-batches: set training.gradient_accumulation_steps = {nearest}"
        )


def in_flight(schedule: str, ranks: int, micro_batches: int, paired: bool = False, rank: int = 0) -> float:
    """The largest number of micro-batches in flight on a rank (forward begun, backward not done), averaged over its
    stages.

    Args:
        paired: pairs run at the same time.
        rank: of the pipeline. The first has the most.

    Example: 4 ranks, 8 micro-batches: GPipe 8, 1F1B 4, Interleaved1F1B 5.5, or 6 in pairs, a V 4.5.
    """
    if schedule == "GPipe":
        return micro_batches
    # With two stages on a rank, each stage of a micro-batch counts half.
    if schedule == "1F1B":
        most: float = ranks - rank
    elif schedule.startswith("Interleaved"):
        # In a pair the forward begins before the backward is done; in DualPipeV, too, where fewer are in flight.
        most = (3 * ranks - 2 * rank - (not paired)) / 2
    else:
        most = ranks + 0.5
    return min(micro_batches, most)


def in_pairs(order: Sequence[Action], kind: Callable[[Action], str]) -> list[tuple[Action, ...]]:
    """The order of a rank in Interleaved1F1B with pairs (F, B) of a backward and the forward that follows it.

    Neither waits for the other, because the forward is of a later micro-batch. In PyTorch's order each rank has two
    micro-batches more in flight than the next one, so pairs of all ranks follow each other without a gap, as in Pangu
    Ultra MoE (arXiv 2505.04519, section 4) and Megatron-Core.

    Args:
        kind: of an action: "F" or "B".

    Example: F0 F1 B0 F2 B1 B2 becomes F0 F1 (F2 B0) B1 B2.
    """
    found: list[tuple[Action, ...]] = []
    for action in order:
        if kind(action) == "F" and found and len(found[-1]) == 1 and kind(found[-1][0]) == "B":
            found[-1] = action, *found[-1]
        else:
            found.append((action,))
    return found


def cut(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """The layers of each stage, so that the slowest stage is as fast as possible.

    Args:
        costs: of each layer, in any unit.
        first, last: costs before the layers (the embedding) and after them (the head).

    Returns:
        Consecutive ranges, none of them empty. Of equally good cuts, the one with the most equal stages.

    Raises:
        ValueError: there are fewer layers than stages.

    Example: cut([1] * 8, 4, last=2.0) == [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
    """
    number = len(costs)
    if number < stages:
        raise ValueError(
            f"{number} layers cannot be cut into {stages} stages: lower parallelism.pp_size, so that there are "
            f"{number} or fewer, or take a pp_schedule with one stage on each rank (GPipe, 1F1B)"
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def cost_of(begin: int, end: int, stage: int) -> float:
        return before[end] - before[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    @cache
    def best(stage: int, begin: int) -> tuple[float, float, tuple[int, ...]]:
        """The best cut of the layers from `begin` into the stages from `stage`: (largest cost, sum of squares,
        ends)."""
        if stage == stages - 1:
            own = cost_of(begin, number, stage)
            return own, own**2, (number,)
        ways = []
        for end in range(begin + 1, number - (stages - stage - 1) + 1):
            own, (slowest, squares, ends) = cost_of(begin, end, stage), best(stage + 1, end)
            ways.append((max(own, slowest), squares + own**2, (end, *ends)))
        return min(ways)

    ends = best(0, 0)[2]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
