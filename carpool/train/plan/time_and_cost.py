"""How long a run takes, and what that costs: predicted before it starts, measured once it goes on.

    predicted   seconds of a step by the planner's model of costs, times steps. Evaluations and checkpoints come on top:
                how long they take is not modelled
    measured    after the first steps, and again after the first checkpoint: what is left, with evaluations and
                checkpoints at what the latest one took

On CPUs, and where a part of the model is trained, nothing is predicted; a dry run says that it will be measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from carpool.planner.decisions.configured import candidate_of
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.prediction import Prediction, predict
from carpool.plugins.counted import counted
from carpool.train.blueprint import planned_attention
from carpool.train.plan.auto_plan import MEASURED, SKIPPED
from carpool.train.plan.resolve import Plan
from carpool.train.records.display import duration


def predict_step(plan: Plan) -> Prediction | str:
    """By the planner's model of costs; why not, where it knows nothing of it."""
    config, machine = plan.config, plan.machine
    if not machine.cuda:
        return "the model of costs is of GPUs"
    if config.adapter.is_used or config.training.freeze is not None:
        return "the model of costs is of runs that train the whole model"
    settings = config.model_dump()
    settings["moe"]["transport"] = plan.transport.answer
    settings["parallelism"]["data_parallel"] = plan.data_parallel.answer
    settings["memory"] |= plan.policies.answer
    per_node = machine.topology.node_size(0)
    try:
        model = plan.blueprint.model
        attention = planned_attention(config, plan.degrees, model, machine.cuda)
        shape = ModelShape.read(model.config.to_dict(), attention)
        candidate, _ = candidate_of(settings, plan.degrees, shape, machine.hardware, per_node)
        return predict(shape, machine.hardware, candidate, per_node)
    except ValueError as error:
        return str(error)


def describe_time(plan: Plan, done: int | None = None) -> list[str]:
    """Lines about how long a step and the run take, before it starts.

    Args:
        done: steps that an earlier part of the run has done. None: of a dry run, which says why nothing is predicted; a
            run has the time measured soon."""
    found, training = predict_step(plan), plan.config.training
    if isinstance(found, str):
        why = f"time of a step: not predicted, because {found}; the run says it after {SKIPPED + MEASURED} steps"
        return [why] if done is None else []
    low, middle, high = found.seconds
    mfu = "" if found.mfu is None else f", MFU {found.mfu.middle:.0%}"
    lines = [
        f"time of a step: {1e3 * middle:,.0f} ms ({1e3 * low:,.0f} to {1e3 * high:,.0f}), "
        f"{found.tokens_per_second():,.0f} tokens/s per GPU{mfu} (modelled, with balanced routing)"
    ]
    if training.max_steps is None:
        return [*lines, "time of the run: known once the data is read, which says how many steps an epoch has"]
    steps = min(training.max_steps, training.stop_at_step or training.max_steps) - (done or 0)
    cost = describe_cost(steps * middle, plan.machine.ranks, plan.config.parallelism.price_per_device_hour)
    return [
        *lines,
        f"time of the run: {duration(steps * middle)} ({duration(steps * low)} to {duration(steps * high)}) for "
        f"{steps:,} steps{cost}; evaluations and checkpoints come on top",
    ]


def describe_left(
    steps: int, seconds: float, pauses: Mapping[str, tuple[int, float | None]], ranks: int, price: float | None
) -> str:
    """A line about what is left of a run, as measured.

    Args:
        seconds: of a step.
        pauses: of evaluations and checkpoints, how many are left, and the seconds of one; None: there was none yet."""
    total, parts, unknown = steps * seconds, [f"{counted(steps, 'step')} of {1e3 * seconds:,.0f} ms"], []
    for name, (count, one) in pauses.items():
        if count and one is None:
            unknown.append(counted(count, name))
        elif count and one is not None and one >= 0.05:
            total += count * one
            parts.append(f"{counted(count, name)} of {one:,.1f} s")
    rest = f"; without {' and '.join(unknown)}, not measured yet" if unknown else ""
    return f"time left: {duration(total)}: {', '.join(parts)} (measured){describe_cost(total, ranks, price)}{rest}"


def describe_cost(seconds: float, ranks: int, price: float | None) -> str:
    """Of so many devices for so long; "" where no price is known."""
    if price is None:
        return ""
    device_hours = ranks * seconds / 3600
    return f", {device_hours:,.2f} device-hours, which cost {price * device_hours:,.2f} at {price:g} each"
