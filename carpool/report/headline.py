"""The block a person can quote, in words and numbers: how the run was, how long a step took, what moved, and whether it
is exact.

`facts` says it once; the plain text that the trainer prints and the top of the HTML page are two ways to show it. For a
run without summary.json (still going, or stopped), `summarise` computes the same numbers from the steps so far.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from carpool.plugins.counted import counted
from carpool.report.health import Check, headline, judge
from carpool.report.read import Run
from carpool.report.record_types import STEP_TIME, Compare, RunInfo, Summary, Train, explain, summarise_steps
from carpool.report.units import bytes_text, count_text, ms_text, percent_text, plain_text

COLUMNS = 100
"""Width of the plain text, in characters."""


@dataclass(frozen=True)
class Fact:
    """One line of the block: a short label, the number, and a sentence that says what the number means."""

    label: str
    value: str
    detail: str


# What is sent of a token, by transport.
_VISITS = {
    "": "one for each rank that the token visits, its own included",
    "hierarchical": "one for each other node that the token visits, and one for each rank, its own included",
}


def text_block(summary: dict[str, Any], run: dict[str, Any], steps: Iterable[dict[str, Any]] = ()) -> str:
    """The quotable block as plain text, from the contents of summary.json, run.json and `train` lines.

    Args:
        steps: the `train` lines of a run that has ended. Without them the first line does not say how the run was.

    Returns lines of at most 100 columns (long words aside) without a trailing newline and without control sequences.
    Errors: ValueError if a field has the wrong type.
    """
    try:
        checked, info = Summary.model_validate(summary), RunInfo.model_validate(run)
        train = [Train.model_validate(step) for step in steps]
    except ValidationError as error:
        raise ValueError(f"the summary of this run cannot be told: {explain(error)}") from None
    return as_text(checked, info, judge(checked, info, train) if train else None)


def as_text(summary: Summary, info: RunInfo, checks: Sequence[Check] | None) -> str:
    """The block; with checks, their sentence comes first."""
    lines = []
    if checks is not None:
        _, word, rest = headline(checks, summary, info)
        lines += textwrap.wrap(f"{word} {rest}", COLUMNS, subsequent_indent="  ")
    lines += textwrap.wrap(f"Carpool: {title(summary, info)}", COLUMNS, subsequent_indent="  ")
    rows = [(fact.label, f"{fact.value}  {fact.detail}".rstrip()) for fact in facts(summary, info)]
    rows.append(verdict(summary, info))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        # Non-breaking spaces keep a number and its unit on one line; in a terminal they are plain spaces.
        wrapped = textwrap.wrap(text, COLUMNS - width - 4, break_on_hyphens=False) or [""]
        lines.append(f"  {label:<{width}}  {wrapped[0]}")
        lines.extend(" " * (width + 4) + more for more in wrapped[1:])
    return "\n".join(lines).replace("\u00a0", " ")


def title(summary: Summary, info: RunInfo) -> str:
    """One line: how long, of what, on what."""
    ranks = info.parallelism.get("world_size")
    on = [counted(ranks, "rank")] if ranks is not None else []
    on += [str(info.environment[key]) for key in ("device",) if info.environment.get(key)]
    on.append(f"transport {info.transport.name}")
    amount = counted(summary.steps, "step")
    if summary.tokens is not None:
        sets = [info.data, *info.data.get("sources", {}).values()]
        learned = "learned " if any("learned_tokens" in one for one in sets) else ""
        amount += f", {count_text(summary.tokens)} {learned}tokens"
    return f"{info.model.architecture}, {amount}, {', '.join(on)}"


def facts(summary: Summary, info: RunInfo) -> list[Fact]:
    """The numbers of the block, each with its meaning; what was not measured is left out or said to be missing."""
    chosen = summary.num_experts_per_tok or info.model.num_experts_per_tok
    compare = summary.compare
    return [
        _step(summary),
        _waiting(summary),
        _moved(summary),
        Fact(
            "ranks per token",
            plain_text(summary.copies_per_token) + (f" of {chosen}" if chosen else ""),
            f"{_VISITS.get(info.transport.name, _VISITS[''])}; one send per expert makes {chosen or 'K'}",
        ),
        _loss(summary),
        *([_against(compare)] if compare is not None and compare.ratio is not None else []),
    ]


def verdict(summary: Summary, info: RunInfo) -> tuple[str, str]:
    """("EXACT" | "LOSSY" | "UNKNOWN", why): whether the run computed the model's own function."""
    reasons = summary.lossy_reasons or info.lossy_reasons
    exact = summary.exact if summary.exact is not None else info.exact
    if reasons or exact is False:
        return "LOSSY", "; ".join(reasons) or "the run says so without giving a reason"
    if exact:
        return "EXACT", "the model's own function: no token was dropped, no payload compressed"
    return "UNKNOWN", "the run does not say whether it changes the model's function"


def _moved(summary: Summary) -> Fact:
    ours, theirs = summary.bytes_remote, summary.bytes_remote_alltoall
    if ours is None:
        return Fact("bytes moved", bytes_text(None), "not recorded")
    if not ours and not theirs:
        return Fact("bytes moved", bytes_text(0), "between ranks: every expert lives where its tokens are")
    detail = "between ranks, forward and backward"
    if theirs is not None:
        detail += f"; one send per (token, expert) would have moved {bytes_text(theirs)}"
        if ours:
            detail += f", {theirs / ours:.2f}× as much"
    if summary.bytes_network is not None:
        rides = "between nodes, of training steps' rides alone: gradients, parameters and evaluation come beside"
        detail = f"{bytes_text(summary.bytes_network)} of them {rides}; {detail}"
    return Fact("bytes moved", bytes_text(ours), detail)


def _step(summary: Summary) -> Fact:
    detail = f"{STEP_TIME}; {count_text(summary.tokens_per_second_median)} tokens/s"
    if summary.mfu_median is not None:
        detail += f", MFU {percent_text(summary.mfu_median)}"
    return Fact("step time", ms_text(summary.step_ms_median), detail)


def _against(compare: Compare) -> Fact:
    """The ratio only: these passes lack the optimizer, and their times would pass for the step's."""
    assert compare.ratio is not None
    repeats = f", {compare.repetitions} repetitions" if compare.repetitions else ""
    detail = f"forward and backward alone, measured in this run, interleaved{repeats}"
    if compare.ratio < 0.995:
        detail = f"so it was the faster one; {detail}"
    return Fact(f"{compare.transport} takes", f"{compare.ratio:.2f}× as long", detail)


def _waiting(summary: Summary) -> Fact:
    share = summary.share
    if summary.ride_share is None:
        return Fact("waiting for rides", percent_text(None), "not measured")
    parts = [f"{part} {percent_text(share[part])}" for part in ("dispatch", "combine") if part in share]
    return Fact(
        "waiting for rides",
        percent_text(summary.ride_share),
        "of the step" + (f": {', '.join(parts)}" if parts else ""),
    )


def _loss(summary: Summary) -> Fact:
    train = f"training loss {plain_text(summary.final_loss, 3)} at the end"
    if summary.final_eval_loss is None:
        return Fact("held-out loss", plain_text(None), f"not measured; {train}")
    last = plain_text(summary.final_eval_loss, 3)
    if summary.first_eval_loss in (None, summary.final_eval_loss):  # of a single evaluation
        return Fact("held-out loss", last, train)
    return Fact("held-out loss", f"{plain_text(summary.first_eval_loss, 3)} → {last}", train)


def summarise(run: Run) -> Summary:
    """The summary of the steps so far, for a run that has not written its own."""
    train = run.train
    evals = [e.loss for e in run.evals if e.loss is not None]
    dropped = sum(t.dropped_tokens or 0 for t in train)
    reasons = list(run.info.lossy_reasons)
    if dropped and not reasons:
        reasons.append(f"{dropped} tokens were dropped")
    return Summary(
        steps=train[-1].step,
        tokens=train[-1].tokens_seen,
        final_loss=train[-1].loss,
        final_eval_loss=evals[-1] if evals else None,
        first_eval_loss=evals[0] if evals else None,
        bytes_remote=train[-1].bytes_remote_seen,
        bytes_remote_alltoall=train[-1].bytes_remote_alltoall_seen,
        bytes_network=train[-1].bytes_network_seen,
        num_experts_per_tok=run.info.model.num_experts_per_tok,
        compare=_compare(run),
        exact=run.info.exact,
        lossy_reasons=reasons,
        **summarise_steps(train, run.starts),
    )


def _compare(run: Run) -> Compare | None:
    ours = run.info.transport.name
    times: dict[str, list[float]] = {}
    for probe in run.probes:
        times.setdefault(probe.transport, []).extend(probe.step_ms)
    other = next((name for name, ms in times.items() if name != ours and ms), None)
    return Compare.of_times(times, ours, other) if other is not None and times.get(ours) else None
