"""How the learning rate goes from step to step: a registry of schedules, by the names of Transformers.

A schedule says which share of the peak a step has, after a linear warm-up that all of them share:

    cosine(step, warmup, steps, minimum)  ->  minimum + (1 - minimum) * 0.5 * (1 + cos(pi * done))

It is a pure function of the step, so there is no scheduler state to save, and a resumed run may have another one. Its
keyword arguments are what `training.lr_scheduler_kwargs` takes. At the same step the shares are those of
`transformers.optimization`, where that has the schedule, with the minimum of `training.min_lr_ratio`. Its `LambdaLR`
gives the first update the rate of step 0, which is 0; here it has that of step 1.

    warmup_stable_decay      1 |    /----------\\            MiniCPM (arXiv 2404.06395); 1-sqrt: Hägele et al.
                               |   /            \\           (arXiv 2405.18392)
                       minimum |  /              \\
                               +--+---+----------+--> step
                                warmup   steps - num_decay_steps

`training.decay_from = N` begins the decay after step N, wherever that is: a run that has only been stable so far is
ended by it, at `training.max_steps`. Further schedules: `register`, or the entry points "carpool.lr_schedules".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from carpool.plugins import Registry

if TYPE_CHECKING:
    from carpool.train.config.schema_training import TrainingSection

# (step, warmup, steps, minimum, **options) -> the share of the peak at a step after warm-up.
Schedule = Callable[..., float]
Decay = Literal["linear", "cosine", "1-sqrt"]
_LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}


def _fallen(left: float, minimum: float) -> float:
    return minimum + (1 - minimum) * left


def _done(step: int, warmup: int, steps: int) -> float:
    return (step - warmup) / max(1, steps - warmup)


def constant(step: int, warmup: int, steps: int, minimum: float) -> float:
    """The peak."""
    return 1.0


def linear(step: int, warmup: int, steps: int, minimum: float) -> float:
    """A straight line to the minimum at the last step."""
    return _fallen(_LEFT["linear"](_done(step, warmup, steps)), minimum)


def cosine(step: int, warmup: int, steps: int, minimum: float) -> float:
    """Half a wave to the minimum at the last step."""
    return _fallen(_LEFT["cosine"](_done(step, warmup, steps)), minimum)


def cosine_with_restarts(step: int, warmup: int, steps: int, minimum: float, *, num_cycles: int = 1) -> float:
    """`num_cycles` such waves, each from the peak."""
    if num_cycles < 1:
        raise ValueError(f"num_cycles = {num_cycles}: expected at least 1")
    done = _done(step, warmup, steps)
    return _fallen(0.0 if done >= 1 else _LEFT["cosine"]((num_cycles * done) % 1.0), minimum)


def polynomial(step: int, warmup: int, steps: int, minimum: float, *, power: float = 1.0) -> float:
    """(1 - done) ** power."""
    if not power > 0:
        raise ValueError(f"power = {power:g}: expected a number above 0")
    return _fallen((1 - _done(step, warmup, steps)) ** power, minimum)


def inverse_sqrt(step: int, warmup: int, steps: int, minimum: float, *, timescale: int = 0) -> float:
    """1 / sqrt(steps since warm-up, over `timescale`, and 1); never below the minimum. 0: as long as warm-up."""
    if timescale < 0:
        raise ValueError(f"timescale = {timescale}: expected a number of steps")
    timescale = timescale or warmup or 10_000
    return max(minimum, 1 / math.sqrt((step + timescale - warmup) / timescale))


def decay_steps(num_decay_steps: float, steps: int) -> float:
    """Of a run of `steps`: below 1, `num_decay_steps` is a share."""
    return num_decay_steps if num_decay_steps >= 1 else math.ceil(num_decay_steps * steps)


def warmup_stable_decay(
    step: int,
    warmup: int,
    steps: int,
    minimum: float,
    *,
    num_decay_steps: float = 0.2,
    decay_type: Decay = "cosine",
) -> float:
    """The peak until `num_decay_steps` before the end (below 1: a share of all steps), then the minimum at the end."""
    decay = decay_steps(num_decay_steps, steps)
    if not 0 <= decay <= steps - warmup:
        raise ValueError(f"num_decay_steps = {num_decay_steps:g} of {steps} steps begin before warm-up ends")
    done = (step - (steps - decay)) / max(1, decay)
    return 1.0 if done <= 0 else _fallen(_LEFT[decay_type](min(1.0, done)), minimum)


def _check(name: str, schedule: Schedule) -> None:
    if not callable(schedule) or list(inspect.signature(schedule).parameters)[:4] != [
        "step", "warmup", "steps", "minimum",
    ]:  # fmt: skip
        raise ValueError(f"learning-rate schedule {name!r} ({schedule!r}) must take step, warmup, steps and minimum")


LR_SCHEDULES: Registry[Schedule] = Registry(
    "learning-rate schedule",
    "carpool.lr_schedules",
    {
        **{one.__name__: one for one in (cosine, linear, constant, warmup_stable_decay, polynomial, inverse_sqrt)},
        # Other names of Transformers for what has warm-up and a minimum here anyway.
        "constant_with_warmup": constant,
        "cosine_with_min_lr": cosine,
        "cosine_with_restarts": cosine_with_restarts,
    },
    _check,
)
register = LR_SCHEDULES.register


def options_of(name: str) -> dict[str, Any]:
    """The types of a schedule's options by name."""
    schedule = LR_SCHEDULES[name]
    hints, parameters = get_type_hints(schedule), inspect.signature(schedule).parameters.values()
    return {one.name: hints.get(one.name, Any) for one in parameters if one.kind is one.KEYWORD_ONLY}


def learning_rate(step: int, training: TrainingSection) -> float:
    """The learning rate of step 1, 2, ...: linear warm-up, then `training.lr_scheduler_type`.

    Raises:
        ValueError: an option of the schedule has a value that it cannot have."""
    warmup, schedule, options = (
        training.warmup(),
        LR_SCHEDULES[training.lr_scheduler_type],
        training.lr_scheduler_kwargs,
    )
    if step <= warmup:
        return training.learning_rate * step / warmup
    if training.decay_from is not None:
        if schedule is not warmup_stable_decay:
            schedule, options = warmup_stable_decay, {}
        options = {**options, "num_decay_steps": training.steps - training.decay_from}
    return training.learning_rate * schedule(step, warmup, training.steps, training.min_lr_ratio, **options)
