"""Was the run good? Six checks, and one sentence that says it.

A run is **healthy** if

1. it ended: all steps that its configuration asked for ran;
2. every recorded loss and gradient norm is a finite number, and so are those of a step that an error ended;
3. the loss fell: the held-out loss from its first evaluation to its last, or, without two evaluations, the training
   loss from the first tenth of the steps to the last by more than its noise; and held-out loss did not rise again;
4. no choice of a token was dropped;
5. ranks were balanced: in the last quarter of the steps the fullest rank computed at most `UNEVEN` times the mean;
6. experts were used: in the last quarter at most `UNUSED` of them got no token in a step.

What cannot be told, because it was not recorded or the run is too short, is neither good nor bad; but a run whose loss
cannot be judged is not called healthy. Whether it computed the model's own function (EXACT or LOSSY) is said elsewhere.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carpool.plugins.counted import counted
from carpool.report.record_types import Eval, RunInfo, Stopped, Summary, Train, median
from carpool.report.units import count_text, percent_text, plain_text

State = Literal["good", "look", "bad", "unknown"]

UNEVEN = 1.3
"""Above this times the mean, the fullest rank makes the others wait noticeably."""

UNUSED = 0.1
"""Above this share of experts without a token, parameters are wasted."""

OVERFITTED = 1.02
"""Above this times its minimum, the held-out loss at the end has risen again."""

SHORTEST = 20
"""With fewer steps, and fewer than two evaluations, it is not said whether the loss fell."""


@dataclass(frozen=True)
class Check:
    """One question about a run: what it is about, the answer, and what to do if that is not good."""

    name: str
    state: State
    told: str
    advice: str = ""


def judge(
    summary: Summary,
    info: RunInfo,
    train: Sequence[Train],
    evals: Sequence[Eval] = (),
    *,
    finished: bool = True,
    planned: int | None = None,
    stop_at: int | None = None,
    stopped: Stopped | None = None,
) -> list[Check]:
    """All checks of a run.

    Args:
        finished: whether it has written its summary.
        planned, stop_at: `training.max_steps` and `training.stop_at_step`; None if not known.
        stopped: the error that ended it.
    """
    checks = [
        _ended(summary, finished, planned, stop_at, stopped),
        _finite(train, stopped),
        _fell(summary, train, evals),
        _drops(info, train),
    ]
    if info.parallelism.get("world_size") != 1:
        checks.append(_balance(train))
    checks.append(_used(info, train))
    return checks


def headline(checks: Sequence[Check], summary: Summary, info: RunInfo) -> tuple[State, str, str]:
    """How the run was: the state, a word for it, and the rest of the first line.

    >>> ("good", "Healthy.", "36 % of the step waited for rides; 28 % fewer bytes than one send per expert.")
    """
    worst = {state: [c for c in checks if c.state == state] for state in ("bad", "look", "unknown")}
    rides = _rides(summary, info)
    if bad := worst["bad"]:
        return "bad", "Not good:", f"{_list(bad)}."
    if look := worst["look"]:
        return "look", "Needs a look:", f"{_list(look)}. {rides}".strip()
    if any(check.name == "Loss fell" for check in worst["unknown"]):
        return "unknown", "Too early to say:", f"{_list(worst['unknown'])}. {rides}".strip()
    return "good", "Healthy.", rides


def _list(checks: Sequence[Check]) -> str:
    return "; ".join(check.told for check in checks)


def _rides(summary: Summary, info: RunInfo) -> str:
    """What the rides cost, and what sharing them saved."""
    if info.parallelism.get("world_size") == 1:
        return "One rank: nothing travels."
    parts = []
    if summary.ride_share is not None:
        parts.append(f"{percent_text(summary.ride_share)} of the step waited for rides")
    ours, theirs = summary.bytes_remote, summary.bytes_remote_alltoall
    if ours is not None and theirs:
        saved = 1 - ours / theirs
        amount = percent_text(abs(saved))
        parts.append(
            f"{amount} {'fewer' if saved > 0 else 'more'} bytes than one send per expert"
            if abs(saved) >= 0.0005
            else "as many bytes as one send per expert"
        )
    return "; ".join(parts) + "." if parts else ""


def _ended(
    summary: Summary, finished: bool, planned: int | None, stop_at: int | None, stopped: Stopped | None
) -> Check:
    name = "Ended"
    done = f"{summary.steps} of {planned} steps" if planned else f"{summary.steps} steps"
    if stopped is not None and stopped.signal is not None:
        told = f"{stopped.signal} ended it after a checkpoint of step {stopped.step}"
        return Check(name, "look", told, "Go on from there with training.resume_from_checkpoint=last.")
    if stopped is not None:
        # An error says first what is wrong, then what to do.
        wrong, _, advice = stopped.why.rstrip(".").partition(". ")
        return Check(name, "bad", f"an error ended it in step {stopped.step}: {wrong}", advice and f"{advice}.")
    if not finished:
        advice = "Either it is still going, or it was stopped: training.resume_from_checkpoint=last goes on."
        return Check(name, "look", f"not finished, {done} so far", advice)
    if planned and summary.steps < planned:
        if stop_at is not None and summary.steps >= stop_at:
            return Check(name, "good", f"{done}, up to training.stop_at_step as asked")
        return Check(
            name, "look", f"stopped early, {done}", "Go on from there with training.resume_from_checkpoint=last."
        )
    return Check(name, "good", f"{done} ran")


def _finite(train: Sequence[Train], stopped: Stopped | None) -> Check:
    name, bad = "Finite", []
    for key, text in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = [getattr(t, key) for t in train]
        # What is no number is written as null: a gap in what was recorded otherwise.
        recorded = any(v is not None for v in values)
        steps = [t.step for t, v in zip(train, values, strict=True) if recorded and (v is None or not math.isfinite(v))]
        if steps:
            bad.append(f"the {text} is no finite number in {counted(len(steps), 'step')}, first in step {steps[0]}")
    if stopped is not None and stopped.finite is False:
        bad.append(f"the loss or the gradient norm of step {stopped.step} is no finite number")
    if bad:
        advice = "Lower training.learning_rate, and look at the gradient norm before that step."
        return Check(name, "bad", "; ".join(bad), advice)
    if all(t.loss is None for t in train):
        return Check(name, "unknown", "no loss was recorded")
    return Check(name, "good", "every recorded loss and gradient norm is a finite number")


def _fell(summary: Summary, train: Sequence[Train], evals: Sequence[Eval]) -> Check:
    name = "Loss fell"
    held = [e for e in evals if _is_number(e.loss)]
    first, last = summary.first_eval_loss, summary.final_eval_loss
    several = len(held) > 1 or (not evals and first != last)
    if several and _is_number(first) and _is_number(last):
        assert first is not None and last is not None
        change = f"from {plain_text(first, 3)} to {plain_text(last, 3)}"
        if last >= first:
            advice = (
                "Lower training.learning_rate if the training loss rises too; if that falls, the data is too little."
            )
            return Check(name, "bad", f"the held-out loss did not fall: {change}", advice)
        lowest = min(held, key=lambda e: e.loss or 0.0, default=None)
        if lowest is not None and lowest.loss is not None and last > OVERFITTED * lowest.loss:
            rise = f"from {plain_text(lowest.loss, 3)} at step {lowest.step} to {plain_text(last, 3)}"
            told = f"the held-out loss rose again, {rise}"
            return Check(name, "look", told, "The model overfits: train for fewer steps or on more data.")
        return Check(name, "good", f"the held-out loss fell {change}")
    losses = [t.loss for t in train if t.loss is not None and math.isfinite(t.loss)]
    if len(losses) < SHORTEST:
        return Check(name, "unknown", f"{counted(len(losses), 'step')} cannot show whether the loss falls")
    tenth = max(5, len(losses) // 10)
    begin, end = losses[:tenth], losses[-tenth:]
    fell = statistics.fmean(begin) - statistics.fmean(end)
    noise = 2 * math.sqrt((_noise(begin) ** 2 + _noise(end) ** 2) / tenth)
    change = f"from {plain_text(statistics.fmean(begin), 3)} to {plain_text(statistics.fmean(end), 3)}"
    if fell > noise:
        return Check(name, "good", f"the training loss fell {change} (means of {tenth} steps)")
    if fell < -noise:
        return Check(name, "bad", f"the training loss rose {change}", "Lower training.learning_rate.")
    advice = "Train longer, or raise training.learning_rate; weights that were trained before may simply be there."
    return Check(name, "look", f"the training loss is flat: {change}, within its noise", advice)


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise around a trend: neighbours differ by noise alone."""
    return math.sqrt(sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2 / max(1, len(values) - 1))


def _drops(info: RunInfo, train: Sequence[Train]) -> Check:
    name = "Nothing dropped"
    counts = [t.dropped_tokens for t in train if t.dropped_tokens is not None]
    if not counts:
        return Check(name, "unknown", "it was not recorded whether choices were dropped")
    dropped = sum(counts)
    if not dropped:
        return Check(name, "good", "every choice of every token was served")
    chosen, layers = info.model.num_experts_per_tok, len(info.model.moe_layers)
    choices = sum(t.tokens or 0 for t in train) * (chosen or 0) * layers
    share = f", {percent_text(dropped / choices)} of all," if choices else ""
    advice = "moe.capacity_factor or moe.random_second asked for it; without them nothing is dropped."
    return Check(name, "look", f"{count_text(dropped)} choices of tokens{share} were dropped", advice)


def _balance(train: Sequence[Train]) -> Check:
    name = "Ranks balanced"
    load = median(t.rank_load_max_over_mean for t in train[-max(1, len(train) // 4) :])
    if load is None:
        return Check(name, "unknown", "the load of ranks was not recorded")
    told = f"the fullest rank computes {plain_text(load)} × the mean"
    if load <= UNEVEN:
        return Check(name, "good", told)
    advice = (
        "The others wait for it: replicate experts in each ride (moe.spare_slots=2), or weigh balance more "
        "(moe.router_aux_loss_coef)."
    )
    return Check(name, "look", told, advice)


def _used(info: RunInfo, train: Sequence[Train]) -> Check:
    name = "Experts used"
    dead = median(t.dead_experts for t in train[-max(1, len(train) // 4) :])
    experts = (info.model.num_experts or 0) * len(info.model.moe_layers)
    if dead is None or not experts:
        return Check(name, "unknown", "it was not recorded which experts got tokens")
    told = (
        f"{count_text(dead)} of {count_text(experts)} experts got no token in a step"
        if dead
        else (f"all {count_text(experts)} experts got tokens")
    )
    if dead <= UNUSED * experts:
        return Check(name, "good", told)
    return Check(name, "look", told, "Weigh balance more (moe.router_aux_loss_coef), or use larger batches.")


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
