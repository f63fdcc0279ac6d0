"""What a run decides by a rule: whether parameters are whole on each rank that computes with them, which activations
are saved, and whether decoder layers are compiled.

Parameters are whole where they fit. That spares the gathers of each layer. What is predicted is less than all that a
run needs, so they may take no more than `HEADROOM` of the memory.

Under `memory.budget`, policies of saved activations are those that fit and cost least time. What a policy costs depends
on the others, because what is offloaded shares one link, and because copies hide behind what is computed. So all
combinations of what is open are compared (36 at most), and not items by milliseconds per byte. Of those that take
equally long, the one that saves most items is taken, and then the one with fewer bytes on the device.

A run measures what each policy of each item costs before it chooses, and adds these costs (`measured_milliseconds`,
`carpool.train.build.policy_times`). Where nothing can run, the planner's model of a step says its length under each
combination (`modelled_milliseconds`).

Layers are compiled where all steps of a run together save more time by it than compilation takes. What a step saves is
the difference between two predictions of the model of a step; what compilation takes was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import KEEP, POLICIES, SHAPES, Candidate
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.prediction import step_seconds

# Of a device's memory. The rest is for what the estimate does not count.
HEADROOM = 0.8
Policies = dict[str, str]
MiB = 2**20
# Seconds that the first steps of a run take longer with compiled layers: the compiler's own start, and each kind of
# layer, forward and backward (docs/measurements.md, "What compilation takes"). With a warm cache it is less.
COMPILE_START, COMPILE_LAYER = 8.0, 8.0


def why_not_zero1(degrees: Degrees, priority: bool) -> str | None:
    """Why non-expert parameters cannot be whole; None: they can."""
    if degrees.tp > 1:
        return "tensor parallelism divides non-expert parameters"
    return "moe.priority holds back the reductions of FSDP" if priority else None


def data_parallel_by_rule(
    degrees: Degrees, priority: bool, needed: Callable[[], float], memory: float | None
) -> tuple[str, str]:
    """("fsdp" or "zero1", why).

    Args:
        needed: the bytes of a rank if they are whole.
        memory: the bytes that it has; None: not known, and then they are whole."""
    if degrees.dp_cp == 1:
        return "fsdp", "one data-parallel rank has nothing to shard"
    if (reason := why_not_zero1(degrees, priority)) is not None:
        return "fsdp", reason
    if memory is None:
        return "zero1", "the memory of a rank is not known"
    size, what = needed(), "non-expert parameters" if degrees.efsdp == 1 else "parameters, experts too,"
    sizes = f"about {size / 2**30:.1f} of {memory / 2**30:.1f} GiB of a rank would be used"
    if size > HEADROOM * memory:
        most = f", more than {HEADROOM:.0%}" if size <= memory else ""
        return "fsdp", f"whole {what} do not fit: {sizes}{most}"
    return "zero1", f"whole {what} fit: {sizes}"


def combinations(given: Mapping[str, str | None]) -> list[Policies]:
    """All policies that agree with what is given; None: open. The cheapest to compute come first."""
    items = list(POLICIES)
    found = []
    for one in product(*((given[item],) if given.get(item) else POLICIES[item] for item in items)):
        policies: Policies = dict(zip(items, map(str, one), strict=True))
        repeats = policies["moe_outputs"] == "recompute"
        if repeats and (
            policies["layer_activations"] != "recompute"
            or "offload" in (policies["expert_inputs"], policies["expert_activations"])
        ):
            continue
        found.append(policies)
    return found


def modelled_milliseconds(
    shape: ModelShape, hardware: Hardware, candidate: Candidate, per_node: int
) -> Callable[[Mapping[str, str]], float]:
    """What policies add to a micro-batch's forward and backward, as a function of them. Whatever the candidate saves is
    left aside."""

    def seconds(policies: Mapping[str, str]) -> float:
        one = replace(candidate, policies=policies, accumulation=1)
        return step_seconds(shape, hardware, one, per_node)

    kept = seconds(KEEP)
    # To the nanosecond: what hides costs nothing, and not what rounding leaves.
    return lambda policies: round(1e3 * (seconds(policies) - kept), 6)


def measured_milliseconds(times: Mapping[str, Mapping[str, float]], policies: Mapping[str, str]) -> float:
    """What policies add to a micro-batch: the sum of what each adds by itself. `times`: by item and policy; 0 for
    others.

    Example: {"expert_inputs": {"resend": 3.0}}, {"expert_inputs": "resend", "expert_activations": "save"} -> 3.0"""
    return sum(times.get(item, {}).get(policy, 0.0) for item, policy in policies.items())


def choose_policies(
    budget: int,
    given: Mapping[str, str | None],
    total_bytes: Callable[[Policies], int],
    milliseconds: Callable[[Policies], float],
    how: str = "modelled",
    preferred: Callable[[Policies], bool] = lambda _: True,
) -> tuple[Policies, str]:
    """(the policies that fit into a budget and cost least, why).

    Args:
        budget: bytes of a rank's device.
        given: policies that the user has chosen, by item; None: open.
        total_bytes: of a rank under some policies.
        milliseconds: that they add to a micro-batch.
        how: these are known, for people.
        preferred: others are taken only where all are others.

    Raises:
        ValueError: none fits. Says the smallest budget for which one does."""
    found = combinations(given)
    found = [one for one in found if preferred(one)] or found
    every = [(total_bytes(one), milliseconds(one), one) for one in found]
    fitting = [one for one in every if one[0] <= budget]
    if not fitting:
        least, _, policies = min(every, key=lambda one: one[0])
        shown = " ".join(f"memory.{item}={policy}" for item, policy in policies.items())
        # Rounded up, so that it is enough.
        raise ValueError(
            f"memory.budget = {budget // MiB:,} MiB is not enough under any policies; the smallest that is: "
            f"memory.budget={-(-least // MiB)}MiB, which takes {shown}"
        )

    def price(one: tuple[int, float, Policies]) -> tuple[float, int, int]:
        return round(one[1], 6), sum(policy != "save" for policy in one[2].values()), one[0]

    size, cost, policies = min(fitting, key=price)
    why = f"{size // MiB:,} of {budget // MiB:,} MiB, for {cost:.1f} ms more in a micro-batch ({how})"
    return policies, why


def compiled_by_rule(
    settings: Mapping[str, Mapping[str, Any]],
    shape: ModelShape,
    hardware: Hardware,
    candidate: Candidate,
    per_node: int,
) -> tuple[bool, str]:
    """(whether layers are compiled, why).

    Args:
        settings: sections and keys, with their defaults; without training.max_steps a run is taken for a long one.
        candidate: the same, with eager layers."""
    data, training, degrees = settings["data"], settings["training"], candidate.degrees
    if hardware.name == "cpu":
        return False, "there is no GPU"
    if training["full_determinism"]:
        return False, "training.full_determinism asks for PyTorch's own kernels"
    if data["pad_to"] == "longest" and data["packing"] == "off":
        return False, SHAPES
    if candidate.divides_tokens or settings["memory"]["experts"] != "device":
        return False, "not with ranks that divide tokens, or experts that are elsewhere"
    if any(layer.kind == "linear" for layer in shape.layers):
        return False, "compilation unrolls the loops of linear attention"
    # Micro-batches of a pipeline fill its stages together.
    alone = candidate if degrees.pp > 1 else replace(candidate, accumulation=1)
    eager, compiled = (step_seconds(shape, hardware, replace(alone, compiled=one), per_node) for one in (False, True))
    if (saved := candidate.accumulation / alone.accumulation * (eager - compiled)) <= 0:
        return False, "a step would not be shorter, as modelled"
    # Of a model with adapters the first layer has a graph of its own: its inputs have no gradient.
    took = COMPILE_START + COMPILE_LAYER * (len(shape.kinds) + (settings["adapter"]["kind"] is not None))
    pays, steps = math.ceil(took / saved), training["max_steps"]
    why = f"compilation takes about {took:.0f} s and saves {1e3 * saved:,.1f} ms of each step (modelled)"
    length = "as many as its data give" if steps is None else f"{steps:,}"
    return steps is None or steps >= pays, f"{why}, so it pays from step {pays:,}, and the run has {length}"
