"""What a search may choose among, as people constrain it (nnScaler's constraints, Lin et al., OSDI 2024, section 4).

carpool plan --only ep=8,16 --only memory.layer_activations=save
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from carpool.parallel.schedules import SCHEDULES
from carpool.planner.configuration.candidate import POLICIES
from carpool.planner.search.space import Space
from carpool.plugins.nearest import nearest

# What `--only` calls it, and the field of `Space`.
ONLY: Mapping[str, str] = MappingProxyType({
    **{axis: axis for axis in ("pp", "tp", "cp", "etp", "ep")},
    "dp_replicate": "replicas", "micro_batch": "micro_batches", "transport": "transports", "schedule": "schedules",
    "data_parallel": "data_parallel", "optimizer_offload": "optimizer_offload",
    "optimizer_in_backward": "optimizer_in_backward",
    "pp_schedule": "pipelines",
    **{f"memory.{item}": "policies" for item in POLICIES},
})  # fmt: skip
_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "schedules": ("none", "chunks", "two-batch"),
    "data_parallel": ("zero1", "fsdp"),
    "optimizer_offload": ("none", "host"),
    "optimizer_in_backward": ("false", "true"),
    "pipelines": tuple(SCHEDULES),
})  # fmt: skip
NUMBERS = ("pp", "tp", "cp", "etp", "ep", "replicas", "micro_batches")


def _known(field: str) -> tuple[str, ...]:
    if field == "transports":
        from carpool.transport import between_ranks

        return between_ranks()
    return _KNOWN[field]


def constrained(space: Space, only: Mapping[str, Sequence[Any]]) -> Space:
    """A space of which some fields have only these values, in the order of the space, which is that of what they cost.

    Raises:
        ValueError: a field has none of them."""
    default = Space()
    changed: dict[str, Any] = {}
    for name, values in only.items():
        now = getattr(space, name)
        kept = [one for one in now or () if one in values]
        if not now or now == getattr(default, name):
            kept += [one for one in values if one not in kept]
        if not kept:
            raise ValueError(
                f"{name}: none of {', '.join(map(str, values))} is among what is allowed: {', '.join(map(str, now))}"
            )
        changed[name] = tuple(kept)
    return replace(space, **changed)


def _none_of(one: str, unknown: Sequence[str], known: Iterable[str]) -> str:
    guess = nearest(unknown[0], known)
    hint = f"; did you mean {guess}?" if guess else ""
    return f"--only {one}: {', '.join(unknown)} is none of {', '.join(known)}{hint}"


def read_constraints(space: Space, given: Iterable[str]) -> Space:
    """Of "ep=8,16" and "memory.layer_activations=save".

    Raises:
        ValueError: a name or a value that does not exist."""
    for one in given:
        name, _, text = one.partition("=")
        if name not in ONLY or not text:
            guess = nearest(name, ONLY) if name not in ONLY else None
            raise ValueError(
                f"--only {one}: expected NAME=VALUES such as ep=8,16; names are {', '.join(ONLY)}"
                f"{f'; did you mean {guess}?' if guess else ''}"
            )
        words = [word.strip() for word in text.split(",")]
        field = ONLY[name]
        if field == "policies":
            item = name.removeprefix("memory.")
            if unknown := [word for word in words if word not in POLICIES[item]]:
                raise ValueError(_none_of(one, unknown, POLICIES[item]))
            space = replace(space, policies=tuple(p for p in space.policies if p.get(item, "save") in words))
            if not space.policies:
                raise ValueError(f"--only {one}: no policies of what is kept are left")
            continue
        values: list[Any] = words
        if field in NUMBERS:
            if not all(word.isdigit() and int(word) for word in words):
                raise ValueError(f"--only {one}: {name} is a positive number, or several with commas between them")
            values = [int(word) for word in words]
        elif unknown := sorted(set(words) - set(_known(field))):
            raise ValueError(_none_of(one, unknown, _known(field)))
        elif field == "optimizer_in_backward":
            values = [word == "true" for word in words]
        space = constrained(space, {field: values})
    return space
