"""A plan in words, and why it is the best: what bounds it, what the next best costs, what would change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from carpool.planner.candidate import KEEP
from carpool.planner.machine.hardware import Hardware, LinkRate
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.plan import USABLE, Found, Plan
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import predict, step_seconds
from carpool.plugins.counted import counted

GiB = 2**30
NAMES = {
    "attention": "attention", "dense": "other matrix products", "experts": "experts",
    "elementwise": "norms and other passes", "loss": "the loss", "optimizer": "the optimizer",
    "dispatch": "dispatches", "combine": "combines", "all-gather": "gathers of parameters",
    "reduction": "reductions of gradients", "send": "sends between stages",
    "offload": "transfers to and from host memory", "host": "the host", "idle": "waiting for other stages",
}  # fmt: skip


def in_words(plan: Plan, per_node: int) -> list[str]:
    """Sentences for who does not know the settings. `per_node`: GPUs of a node."""
    one, degrees = plan.candidate, plan.candidate.degrees
    said = [
        f"{counted(degrees.dp, 'data-parallel rank')}; each step of one is {counted(one.accumulation, 'micro-batch')} "
        f"of {one.micro_batch} x {counted(one.sequence_length, 'token')}."
    ]
    for size, what in (
        (degrees.pp, "The layers are cut into {} stages of a pipeline."),
        (degrees.tp, "{} ranks share each matrix outside of experts."),
        (degrees.cp, "{} ranks share each sequence."),
    ):
        said += [what.format(size)] if size > 1 else []
    if degrees.expert_ranks == 1:
        said.append("Every rank computes all experts of a layer for its own tokens, so that no tokens travel.")
    else:
        inside = sum(rank < per_node for rank in degrees.ranks_along(0, "ep", "etp"))
        where = "one node" if inside == degrees.expert_ranks else f"{degrees.expert_ranks // inside} nodes"
        said.append(
            f"The experts of a layer are spread over {degrees.expert_ranks} ranks of {where}; tokens travel there and "
            f"back by transport {one.transport}."
        )
    if one.spare.slots and degrees.ep > 1:
        said.append(
            f"Each ride fetches replicas into {counted(one.spare.slots, 'spare slot')} of a rank, so that ranks "
            "compute nearly equally much; experts take the time of the balanced load, and rides that of the fetches."
        )
    shards = degrees.non_expert_shards // degrees.tp
    if one.gathers:
        what = "Parameters are" if degrees.efsdp > 1 else "Some parameters are"
        said.append(
            f"{what} sharded over up to {max(shards, degrees.efsdp):,} ranks, and gathered layer by layer (FSDP)."
        )
    if one.whole:
        what = "Parameters, experts too," if degrees.efsdp > 1 else "Non-expert parameters"
        said.append(f"{what} are whole on each rank, and the optimizer's state is sharded (ZeRO-1).")
    again = [item for item, policy in one.policies.items() if policy == "recompute"]
    if "layer_activations" in again:
        rides = ", with their experts" if "moe_outputs" in again else ""
        said.append(f"The backward computes layers again{rides}, so that each saves its input only.")
    elif "expert_activations" in again:
        said.append("The backward computes the experts' first product again.")
    if away := [item for item, policy in one.policies.items() if policy == "offload"]:
        said.append(f"Saved activations go to host memory in part: {', '.join(away)}.")
    if one.optimizer_in_backward:
        said.append("Each gradient is used for its update in the backward, and freed.")
    if one.optimizer_offload != "none":
        said.append("The optimizer's state is in host memory.")
    if (why := one.why_eager) is not None:
        said.append(f"Steps are not CUDA graphs, because {why}.")
    return said


def bounded_by(plan: Plan) -> str:
    """A sentence about what takes the step's time."""
    exposed = plan.prediction.exposed
    step = sum(exposed.values())
    # Rounded, because dispatches and combines are often equally long.
    found = ((round(seconds, 9), kind) for kind, seconds in exposed.items() if seconds > 0.03 * step)
    parts = sorted(found, reverse=True)
    return ", ".join(f"{NAMES.get(kind, kind)} {100 * seconds / step:.0f} %" for seconds, kind in parts)


def next_best(plans: Sequence[Plan]) -> str:
    """A sentence about the first plan of another kind."""
    one = plans[0].candidate
    for plan in plans[1:]:
        two = plan.candidate
        if (one.degrees, one.transport, one.schedule) != (two.degrees, two.transport, two.schedule):
            return longer_than(plans[0], plan)
    return "all others are of the same degrees"


def longer_than(first: Plan, plan: Plan) -> str:
    """How much longer another plan's step is, and by what: the largest differences of what is exposed."""
    seconds, exposed = first.prediction.seconds.middle, first.prediction.exposed
    longer = plan.prediction.seconds.middle / seconds - 1
    other = plan.prediction.exposed
    more = {kind: other.get(kind, 0.0) - exposed.get(kind, 0.0) for kind in {**exposed, **other}}
    largest = sorted(more.items(), key=lambda one: -abs(round(one[1], 9)))[:4]
    parts = [f"{NAMES.get(kind, kind)} {s:+.2g} s" for kind, s in largest if abs(s) > 0.01 * seconds]
    return f"{plan.candidate.label}: {100 * longer:.1f} % longer{': ' if parts else ''}{', '.join(parts)}"


def without_limit(
    plan: Plan, shape: ModelShape, hardware: Hardware, per_node: int, routes: Routes, usable: float
) -> str | None:
    """A sentence about the same degrees if memory were no limit: nothing is computed again or in host memory. None: so
    it is in the plan. `usable`: bytes of a rank."""
    free = replace(plan.candidate, policies=KEEP, optimizer_offload="none", optimizer_in_backward=False)
    if free == replace(plan.candidate, optimizer_in_backward=False):
        return None
    one, memory = predict(shape, hardware, free, per_node, routes), memory_of(shape, free, routes)
    parts = sorted(((size, name) for name, size in memory.parts.items()), reverse=True)[:4]
    few = memory.parts["optimizer"] - memory_of(shape, replace(free, moments="int8"), routes).parts["optimizer"]
    mfu = "" if one.mfu is None else f", {100 * one.mfu.middle:.1f} % MFU"
    return (
        f"a step of {one.seconds.middle:.3g} s{mfu}, with {memory.total / GiB:.1f} GiB of a rank: "
        f"{', '.join(f'{name} {size / GiB:.1f}' for size, name in parts)}; {usable / GiB:.1f} may be used"
        + (f", and 8-bit moments (lossy) would need {few / GiB:.1f} less" if few > 0.1 * GiB else "")
    )


def with_all_memory(found: Found, capacity: float) -> str | None:
    """A sentence about the plan that the memory which is held back would allow; None: no faster one. `capacity`: bytes
    of the device."""
    if (tight := found.tight) is None:
        return None
    less = 1 - tight.prediction.seconds.middle / found.plans[0].prediction.seconds.middle
    return (
        f"{tight.candidate.label} would take {100 * less:.1f} % less, with {tight.memory.total / GiB:.1f} of "
        f"{capacity / GiB:.0f} GiB; {100 * (1 - USABLE):.0f} % are held back for what the prediction misses "
        "(--memory says otherwise)"
    )


def changes(
    plans: Sequence[Plan], shape: ModelShape, hardware: Hardware, per_node: int, routes: Routes | None = None
) -> list[tuple[str, str]]:
    """(what is different, which of these plans is best then)."""
    found = []

    def seconds_on(one: Hardware) -> list[float]:
        return [step_seconds(shape, one, plan.candidate, per_node, routes) for plan in plans]

    now = seconds_on(hardware)[0]
    for name, other in _others(hardware):
        seconds = seconds_on(other)
        best = min(range(len(plans)), key=seconds.__getitem__)
        change = round(100 * (seconds[0] / now - 1))
        longer = f"its step takes {change:+} %" if change else "its step takes as long"
        text = f"the same plan; {longer}"
        if best:
            less = 100 * (1 - seconds[best] / seconds[0])
            text = f"{plans[best].candidate.label} is best, by {less:.0f} %; of the plan, {longer}"
        found.append((name, text))
    return found


def _others(hardware: Hardware) -> list[tuple[str, Hardware]]:
    def times(rate: LinkRate, factor: float) -> LinkRate:
        return replace(rate, bytes_per_second=factor * rate.bytes_per_second)

    found = [
        ("network twice as fast", replace(hardware, network=times(hardware.network, 2))),
        ("network half as fast", replace(hardware, network=times(hardware.network, 0.5))),
    ]
    if hardware.nvlink is not None:
        push = None if hardware.push is None else times(hardware.push, 0.5)
        found.append(("NVLink half as fast", replace(hardware, nvlink=times(hardware.nvlink, 0.5), push=push)))
    names = ("experts", "experts backward")
    slower = {
        name: replace(work, flops_per_second=work.flops_per_second / 2)
        for name in names
        if (work := hardware.kernel(name)).flops_per_second is not None
    }
    found.append(("experts half as fast", replace(hardware, kernels={**hardware.kernels, **slower})))
    return found
