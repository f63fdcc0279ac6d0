"""Whether models fit into memory, and which fit together, before any of them is built. All of it is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.planner.search.plan import USABLE
from carpool.train.plan.estimate import Memory

CERTAIN = ("parameters", "gradients", "optimizer")
STAYS = ("parameters", "optimizer", "transport", "process")


def check_room(estimates: Mapping[str, Memory], memory: int) -> list[str]:
    """Sentences about contenders that may run out of memory.

    Args:
        estimates: of each contender (`carpool.train.plan.estimate`).
        memory: bytes of a rank.

    Raises:
        ValueError: parameters, gradients and AdamW alone are more than there is.
    """
    told = []
    for name, estimate in estimates.items():
        certain = sum(estimate[part] for part in CERTAIN)
        if certain > memory:
            parts = ", ".join(f"{part} {gib(estimate[part])}" for part in CERTAIN)
            raise ValueError(
                f"{name} does not fit: a rank would hold {gib(certain)} ({parts}), and has {gib(memory)}; lower "
                "--layers, raise --ranks, or use --set model.dtype=bfloat16"
            )
        if estimate["total"] > USABLE * memory:
            told.append(
                f"{name} may run out of memory: {gib(estimate['total'])} are predicted, and a rank has {gib(memory)}; "
                "lower --batch, --sequence or --layers if it does"
            )
    return told


def groups_that_fit(estimates: Mapping[str, Memory], memory: int) -> list[list[str]]:
    """Contenders whose models fit into memory beside each other, in order. One that fits nowhere is alone.

    What stays (parameters, optimizer, buffers) is there for all of a group; what a step needs besides, for one."""
    groups: list[list[str]] = []
    for name in estimates:
        if groups and _together([estimates[one] for one in [*groups[-1], name]]) <= USABLE * memory:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _together(estimates: Sequence[Memory]) -> int:
    stays = [sum(estimate.get(part, 0) for part in STAYS) for estimate in estimates]
    return sum(stays) + max(estimate["total"] - own for estimate, own in zip(estimates, stays, strict=True))


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
