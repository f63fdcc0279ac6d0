"""Why a plan is the best: what bounds it, what the next best costs, and what would change the answer.

bound by     the largest shares of the step on the busiest stage, and what is exposed
next best    how much longer the first plan takes that differs in its degrees, its transport or its schedule
changes      which of the first plans is best if a link, or the experts' products, were half or twice as fast
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from carpool.planner.events import execute
from carpool.planner.hardware import Hardware, LinkRate
from carpool.planner.lengths import Lengths
from carpool.planner.model_shape import ModelShape
from carpool.planner.routes import Routes
from carpool.planner.search import Plan
from carpool.planner.step import step_graph

NAMES = {
    "dense": "dense products", "attention": "attention", "experts": "experts", "elementwise": "norms and other passes",
    "loss": "the loss", "optimizer": "the optimizer", "dispatch": "dispatches", "combine": "combines",
    "gather": "gathers of parameters", "reduction": "reductions of gradients", "send": "sends between stages",
    "offload": "copies to and from host memory", "host": "the host", "idle": "waiting for other stages",
}  # fmt: skip


def bounded_by(plan: Plan) -> str:
    """A sentence about what takes the step's time."""
    exposed = plan.prediction.exposed
    step = sum(exposed.values())
    parts = sorted(((seconds, kind) for kind, seconds in exposed.items() if seconds > 0.03 * step), reverse=True)
    return ", ".join(f"{NAMES.get(kind, kind)} {100 * seconds / step:.0f} %" for seconds, kind in parts)


def next_best(plans: Sequence[Plan]) -> str:
    """A sentence about the first plan of another kind."""
    first = plans[0]
    for plan in plans[1:]:
        one, two = first.candidate, plan.candidate
        if (one.degrees, one.transport, one.schedule) != (two.degrees, two.transport, two.schedule):
            longer = plan.prediction.seconds.middle / first.prediction.seconds.middle - 1
            return f"{two.label}: {100 * longer:.1f} % longer"
    return "all others are of the same degrees"


def changes(
    plans: Sequence[Plan], shape: ModelShape, hardware: Hardware, per_node: int, routes: Routes | None = None
) -> list[tuple[str, str]]:
    """(what is different, which plan is best then) among the first three of these plans."""
    found, plans = [], plans[:3]
    for name, other in _others(hardware):
        seconds = [execute(step_graph(Lengths(shape, other, plan.candidate, per_node, routes))).step for plan in plans]
        best = min(range(len(plans)), key=seconds.__getitem__)
        change = 100 * (seconds[0] / plans[0].prediction.seconds.middle - 1)
        text = f"the same plan; its step takes {change:+.0f} %"
        if best:
            gain = 100 * (1 - seconds[best] / seconds[0])
            text = (
                f"{plans[best].candidate.label} is {gain:.0f} % faster than the plan, whose step takes {change:+.0f} %"
            )
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
