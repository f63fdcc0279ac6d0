"""Whether dense parameters are whole on each rank or in shards, where `parallelism.dense = "auto"`: the rule of runs,
of their dry runs and of `carpool simulate`.

Whole ones spare the gathers of each layer. They need room, and what is predicted is less than all that a run needs, so
they may take no more than `ROOM` of the memory.
"""

from __future__ import annotations

from collections.abc import Callable

from carpool.parallel.degrees import Degrees

# Of a device's memory. The rest is for what the estimate does not count.
ROOM = 0.8


def why_not_whole(degrees: Degrees, priority: bool) -> str | None:
    """Why dense parameters cannot be whole; None: they can."""
    if degrees.tp > 1:
        return "tensor parallelism divides dense parameters"
    return "moe.priority holds back the reductions of FSDP" if priority else None


def dense_by_rule(
    degrees: Degrees, priority: bool, needed: Callable[[], float], memory: float | None
) -> tuple[str, str]:
    """("fsdp" or "replicate", why).

    Args:
        needed: the bytes of a rank if they are whole.
        memory: the bytes that it has; None: not known, and then they are whole."""
    if degrees.dp_cp == 1:
        return "fsdp", "one data-parallel rank has nothing to shard"
    if (reason := why_not_whole(degrees, priority)) is not None:
        return "fsdp", reason
    if memory is None:
        return "replicate", "the memory of a rank is not known"
    size = needed()
    sizes = f"about {size / 2**30:.1f} of {memory / 2**30:.1f} GiB of a rank would be used"
    if size > ROOM * memory:
        most = f", more than {ROOM:.0%}" if size <= memory else ""
        return "fsdp", f"whole dense parameters do not fit: {sizes}{most}"
    return "replicate", f"whole dense parameters fit: {sizes}"
