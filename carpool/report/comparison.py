"""Two runs on one page: what differs between them, and what came of it.

A ratio is given only where it means something. Losses are compared at equal steps, if both runs read the same data;
step times, if both ran on the same kind of device; time per step only if a step has as many tokens, else tokens per
second; bytes, if both route through layers of the same shape. What is not compared says why.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from carpool.plugins.flat import flat
from carpool.report.charts import Chart, Line, draw_lines
from carpool.report.figures import EVEN, held_out, series, smoothed, thinned, values_of
from carpool.report.headline import summarise
from carpool.report.health import headline
from carpool.report.page import checks_of
from carpool.report.read import Run, read_run
from carpool.report.record_types import STEP_TIME, Summary
from carpool.report.units import MISSING, bytes_text, count_text, ms_text, percent_text, plain_text
from carpool.report.write import fill, write_page

ROLES = ("loss", "other-run")


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    run: Run
    summary: Summary

    @property
    def tokens_per_step(self) -> float | None:
        return self.run.train[-1].tokens

    @property
    def bytes_per_token(self) -> float | None:
        moved, tokens = self.summary.bytes_remote, self.summary.tokens
        return moved / tokens if moved is not None and tokens else None


def write_comparison(first: Path, second: Path, output: Path | None = None) -> Path:
    """Write the page that compares two runs to `output` (default: compare.html in the second's folder).

    Errors: as `write_report`; ValueError if both are the same run.
    """
    first, second = Path(first), Path(second)
    if first.resolve() == second.resolve():
        raise ValueError(f"{first} and {second} are the same run: give two, for example `carpool report runs/a runs/b`")
    sides = _sides(read_run(first), read_run(second))
    output = Path(output) if output is not None else second / "compare.html"
    return write_page(output, "comparison", lambda: render(*sides))


def _sides(first: Run, second: Run) -> tuple[Side, Side]:
    """Named by their folders, or by their whole paths if those are alike."""
    names = [run.path.resolve().name for run in (first, second)]
    if names[0] == names[1]:
        names = [str(first.path), str(second.path)]
    a, b = (Side(name, run, run.summary or summarise(run)) for name, run in zip(names, (first, second), strict=True))
    return a, b


def render(a: Side, b: Side) -> str:
    """The page as HTML text."""
    said, refused = conclude(a, b)
    return fill(
        "compare.html.j2",
        a=a,
        b=b,
        said=said,
        refused=refused,
        health=[(side, *headline(checks_of(side.run, side.summary), side.summary, side.run.info)) for side in (a, b)],
        rows=numbers(a, b),
        step_time=STEP_TIME,
        config=differences(_config(a.run), _config(b.run)),
        environment=differences(_about(a.run), _about(b.run)),
        cards=_cards(a, b),
    )


def conclude(a: Side, b: Side) -> tuple[str, list[str]]:
    """The first line, and what could not be compared and why."""
    said, refused = [], []
    problem = _speed_problem(a, b)
    if problem is not None:
        refused.append(f"Step times are not compared: {problem}.")
    elif a.tokens_per_step == b.tokens_per_step:
        ratio = (a.summary.step_ms_median or math.nan) / (b.summary.step_ms_median or math.nan)
        said.append(f"{b.name} is {ratio:.2f} × as fast per step as {a.name}")
    else:
        ratio = (b.summary.tokens_per_second_median or math.nan) / (a.summary.tokens_per_second_median or math.nan)
        said.append(f"{b.name} handles {ratio:.2f} × the tokens per second of {a.name}")
        refused.append(
            f"Times per step are not compared: a step of {a.name} has {count_text(a.tokens_per_step)} tokens, one of "
            f"{b.name} {count_text(b.tokens_per_step)}."
        )
    for what, problem, told in (("Losses", _loss_problem(a, b), _losses), ("Bytes", _bytes_problem(a, b), _bytes)):
        if problem is not None:
            refused.append(f"{what} are not compared: {problem}.")
        else:
            said.append(told(a, b))
    if not said:
        said.append(f"{a.name} and {b.name} have nothing in common that could be compared")
    return "; ".join(said) + ".", refused


def _speed_problem(a: Side, b: Side) -> str | None:
    devices = [side.run.info.environment.get("device") for side in (a, b)]
    if devices[0] != devices[1]:
        return f"{a.name} ran on {devices[0]}, {b.name} on {devices[1]}"
    if not (a.summary.step_ms_median and b.summary.step_ms_median and a.tokens_per_step and b.tokens_per_step):
        return "not both runs recorded times and tokens of steps"
    return None


def _loss_problem(a: Side, b: Side) -> str | None:
    for key in ("tokenizer", "source"):
        values = [side.run.info.data.get(key) for side in (a, b)]
        if values[0] != values[1]:
            return f"the {key if key == 'tokenizer' else 'data'} differs ({values[0]}, {values[1]})"
    if not set(_losses_by_step(a.run)) & set(_losses_by_step(b.run)):
        return "no step has a loss in both runs"
    return None


def _bytes_problem(a: Side, b: Side) -> str | None:
    for key, name in (("hidden_size", "hidden size"), ("num_experts_per_tok", "number of experts per token")):
        values = [getattr(side.run.info.model, key) for side in (a, b)]
        if values[0] != values[1]:
            return f"the {name} differs ({values[0]}, {values[1]})"
    layers = [len(side.run.info.model.moe_layers) for side in (a, b)]
    if layers[0] != layers[1]:
        return f"the number of MoE layers differs ({layers[0]}, {layers[1]})"
    if not a.bytes_per_token or b.bytes_per_token is None:
        return f"{a.name if not a.bytes_per_token else b.name} moved or recorded none"
    return None


def _losses_by_step(run: Run) -> dict[int, float]:
    return {t.step: t.loss for t in run.train if t.loss is not None and math.isfinite(t.loss)}


def _losses(a: Side, b: Side) -> str:
    """At equal steps: the difference of the mean over the last twentieth of those that both have."""
    first, second = _losses_by_step(a.run), _losses_by_step(b.run)
    steps = sorted(set(first) & set(second))
    if all(first[step] == second[step] for step in steps):
        return f"the losses of all {len(steps)} common steps are equal, bit by bit"
    last = steps[-max(1, min(len(steps), max(5, len(steps) // 20))) :]
    difference = float(np.mean([second[step] - first[step] for step in last]))
    where = f"mean of steps {last[0]} to {last[-1]}" if len(last) > 1 else f"step {last[0]}"
    if abs(difference) < 0.0005:
        return f"the loss at equal steps differs by less than 0.001 ({where})"
    word = "lower" if difference < 0 else "higher"
    return f"the loss of {b.name} at equal steps is {abs(difference):.3f} {word} ({where})"


def _bytes(a: Side, b: Side) -> str:
    ours, theirs = b.bytes_per_token or 0.0, a.bytes_per_token or 1.0
    if ours == theirs:
        return "both move as many bytes per token"
    return (
        f"{b.name} moves {percent_text(abs(1 - ours / theirs))} {'fewer' if ours < theirs else 'more'} bytes per token"
    )


def numbers(a: Side, b: Side) -> list[list[str]]:
    """Rows of the table: what, of A, of B, B over A."""

    def row(name: str, first: float | None, second: float | None, text: Any, ratio: bool = True) -> list[str]:
        known = ratio and first and second is not None and math.isfinite(first) and math.isfinite(second)
        return [name, text(first), text(second), f"{second / first:.3f}" if known else MISSING]  # type: ignore[operator]

    s, t = a.summary, b.summary
    speed = _speed_problem(a, b) is None
    same = speed and a.tokens_per_step == b.tokens_per_step
    losses, moved = _loss_problem(a, b) is None, _bytes_problem(a, b) is None
    rows = [
        row("Steps", s.steps, t.steps, count_text, False),
        row("Tokens per step", a.tokens_per_step, b.tokens_per_step, count_text),
        row("Step time", s.step_ms_median, t.step_ms_median, ms_text, same),
        row("Tokens per second", s.tokens_per_second_median, t.tokens_per_second_median, count_text, speed),
        row("MFU", s.mfu_median, t.mfu_median, percent_text, speed),
        row("Waiting for rides, of the step", s.ride_share, t.ride_share, percent_text, speed),
    ]
    for part in ("dispatch", "experts", "combine", "rest"):
        rows.append(row(f"{part.capitalize()}, per step", _part_ms(s, part), _part_ms(t, part), ms_text, same))
    rows += [
        row("Bytes between ranks, per token", a.bytes_per_token, b.bytes_per_token, bytes_text, moved),
        row("Ranks per token", s.copies_per_token, t.copies_per_token, plain_text, moved),
        row("Training loss at the end", s.final_loss, t.final_loss, lambda v: plain_text(v, 4), losses),
        row("Held-out loss at the end", s.final_eval_loss, t.final_eval_loss, lambda v: plain_text(v, 4), losses),
        row("Memory, measured peak of a rank", a.run.memory_peak, b.run.memory_peak, bytes_text),
    ]
    return [one for one in rows if one[1] != MISSING or one[2] != MISSING]


def _part_ms(summary: Summary, part: str) -> float | None:
    share = summary.share.get(part)
    return None if share is None or summary.step_ms_median is None else share * summary.step_ms_median


def differences(first: dict[str, str], second: dict[str, str]) -> list[list[str]]:
    """[key, of A, of B] for each key with two values; a missing one is a dash.

    >>> differences({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    [['b', '2', '3']]
    """
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    return [[key, first.get(key, MISSING), second.get(key, MISSING)] for key in keys]


def _config(run: Run) -> dict[str, str]:
    """The configuration, flat; without the folder, which always differs."""
    try:
        settings = flat(tomllib.loads(run.config_text or ""))
    except tomllib.TOMLDecodeError:
        return {}
    return {key: str(value) for key, value in settings.items() if key != "training.output_dir"}


def _about(run: Run) -> dict[str, str]:
    """What was not configured but chosen or found."""
    info = run.info
    about = {**info.environment, "transport": info.transport.name, "carpool": info.carpool_version}
    about |= {"parameters": info.model.parameters, "experts": info.model.num_experts, **info.parallelism}
    return {key: str(value) for key, value in about.items() if key != "hostname"}


def _cards(a: Side, b: Side) -> list[tuple[str, str, str, str | None, str]]:
    """Name, title, caption, picture, and what is said without one."""
    sides = (a, b)
    loss: list[Line] = []
    for side, role in zip(sides, ROLES, strict=True):
        steps = np.array([t.step for t in side.run.train], dtype=float)
        smooth, span = smoothed(values_of(side.run.train, lambda t: t.loss))
        loss.append(Line(f"{side.name}, mean of {span} steps", role, *thinned(steps, smooth)))
        loss += held_out(side.run, f"{side.name}, held out", role)
    problem = _loss_problem(a, b)
    chart = Chart("Losses of both runs over steps", "nats per token", lambda v: plain_text(v, 4), zero=False)
    body = draw_lines(chart, loss) if problem is None else None
    made = [("loss", "Loss", "Points: held-out text.", body, f"Not drawn: {problem}.")]
    for name, title, unit, key, text, low in (
        ("speed", "Time of each step", "milliseconds", "step_ms", ms_text, 0.0),
        ("copies", "Ranks per token", "ranks per token", "copies_per_token", plain_text, 0.0),
        ("rank-load", "Load of ranks", EVEN, "rank_load_max_over_mean", plain_text, 1.0),
    ):
        lines = [
            Line(side.name, role, *series(side.run.train, lambda t, key=key: getattr(t, key)))  # type: ignore[misc]
            for side, role in zip(sides, ROLES, strict=True)
        ]
        typical = [side.summary.step_ms_median for side in sides if side.summary.step_ms_median]
        top = 3 * max(typical) if name == "speed" and typical else None
        known = [float(np.nanmax(line.y)) for line in lines if np.isfinite(line.y).any()]
        top = top if top is not None and known and max(known) > top else None
        chart = Chart(title, unit, text, zero=low == 0.0, low=low, top=top)
        made.append((name, title, "", draw_lines(chart, lines), "Neither run recorded it."))
    return made
