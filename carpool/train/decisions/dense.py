"""How dense parameters lie on the ranks of a run (see `carpool.planner.decisions.chosen` for when it is chosen).

    parallelism.dense   a run that starts                                        a run that is resumed
    auto                replicate, if it fits into memory; otherwise fsdp        as recorded in run.json
    any other           that one                                                 that one

Checkpoints are the same files under both, so a run may change this when it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, Record
from carpool.planner.decisions.dense import dense_by_rule, why_not_whole
from carpool.train.config.schema import Config


def _read(record: Record) -> str:
    if record["name"] not in ("fsdp", "replicate"):
        raise ValueError(f"dense = {record['name']!r} is not known")
    return str(record["name"])


DENSE_KIND: Kind[str] = Kind("dense", lambda name: {"name": name}, _read)


def choose_dense(
    config: Config, degrees: Degrees, predict: Callable[[str], int], memory: int, decisions: Decisions
) -> Chosen[str]:
    """Choose "fsdp" or "replicate". All ranks together.

    Args:
        predict: the bytes that a rank will need with one or the other.
        memory: the bytes that it has.
        decisions: of the run.

    Raises:
        ValueError: what was asked for cannot be.
    """
    shape: Mapping[str, Any] = {
        "requested": config.parallelism.dense,
        **degrees.record(),
        "memory": memory,
        "priority": config.moe.priority,
    }

    def decide(kept: Chosen[str] | None, note: str) -> tuple[Chosen[str], bool]:
        answer, why = decide_dense(config, degrees, predict, memory)
        if config.parallelism.dense != "auto":
            return Chosen(answer, shape, "given", why), False
        return kept or Chosen(answer, shape, "default", why + note), False

    return decisions.choose(DENSE_KIND, shape, decide)


def decide_dense(config: Config, degrees: Degrees, predict: Callable[[str], int], memory: int) -> tuple[str, str]:
    """("fsdp" or "replicate", why), as `choose_dense`, in one process and without a record."""
    wanted = config.parallelism.dense
    if degrees.dp_cp == 1:
        return dense_by_rule(degrees, config.moe.priority, lambda: predict("replicate"), memory)
    reason = why_not_whole(degrees, config.moe.priority)
    if wanted == "replicate" and reason is not None:
        raise ValueError(f"parallelism.dense = 'replicate' cannot be used here: {reason}; use 'fsdp' or 'auto'")
    if wanted != "auto":
        return wanted, "asked for"
    if reason is None and config.adapter.base_dtype is not None:
        return "replicate", "experts that are quantised are beside whole dense parameters"
    return dense_by_rule(degrees, config.moe.priority, lambda: predict("replicate"), memory)
