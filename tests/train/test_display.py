"""The progress bar and the plain lines: what they say, how often, and how long is left."""

from __future__ import annotations

import io
import re
from collections import deque

import pytest
from rich.console import Console

from carpool.train.records.display import LINES, SILENCE, Display, details, time_left

RECORD = {
    "loss": 2.35123, "step_ms": 412.3, "tokens_per_second": 4952.4, "grad_norm": 0.714, "copies_per_token": 2.84,
    "load_max_over_mean": 1.98, "mfu": None,
}  # fmt: skip


def _run(total: int, seconds: float, terminal: bool, start: int = 0, steps: int | None = None, width: int = 120) -> str:
    """What is written while steps of so many seconds go by."""
    now = [100.0]
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False, legacy_windows=False)
    display = Display(True, total, start, console, clock=lambda: now[0])
    for step in range(start + 1, start + 1 + (total - start if steps is None else steps)):
        now[0] += seconds
        display.step(step, RECORD)
    display.say("[bold]done[/]")
    display.close()
    return out.getvalue()


def test_a_line_says_what_matters() -> None:
    lines = _run(420, 1.0, terminal=False, steps=84).splitlines()
    assert lines[0].startswith("step   1/420  loss 2.3512  412 ms  4,952 tokens/s  grad 0.71")
    assert (
        lines[-2]
        == "step  80/420  loss 2.3512  412 ms  4,952 tokens/s  grad 0.71  ranks/token 2.84  load 1.98  6 min left"
    )
    assert lines[-1] == "[bold]done[/]"
    said = details(RECORD | {"rank_load_before": 1.731, "rank_load_after": 1.024})
    assert said[-2:] == ["load 1.98", "load of ranks 1.73 -> 1.02"]
    # One line for 1/50 of a long run would come after hours.
    shown = len(re.findall("^step", _run(100_000, SILENCE / 4, False, steps=40), re.MULTILINE))
    assert shown == 10


@pytest.mark.parametrize("start", [0, 100])
def test_lines_are_few_and_hold_both_ends(start: int) -> None:
    steps = [int(n) for n in re.findall(r"^step +(\d+)/", _run(500, 0.1, False, start), re.MULTILINE)]
    assert steps[0] == start + 1 and steps[-1] == 500
    assert len(steps) <= LINES + 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_has_a_bar(width: int) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", _run(420, 1.0, terminal=True, steps=84, width=width))
    last = shown.replace("\r", "\n").rstrip().splitlines()[-1]
    for text in ("84/420", "6 min left", "loss 2.3512", "412 ms", "4,952 tokens/s", *(["20%"] if width > 100 else [])):
        assert text in last, last
    assert "━━━━━" in last and len(last) <= width


@pytest.mark.parametrize(
    ("seconds", "steps", "said"),
    [(1.0, 40, "40 s left"), (1.0, 0, ""), (60.0, 45, "45 min left"), (60.0, 125, "2 h 5 min left")],
)
def test_the_time_left(seconds: float, steps: int, said: str) -> None:
    # The first step took an hour of warming up, before `done` begins.
    assert time_left(steps, deque([(1, 3600.0), (2, 3600.0 + seconds), (3, 3600.0 + 2 * seconds)])) == said


def test_no_time_left_is_said_before_there_is_a_pace() -> None:
    assert time_left(9, deque([(1, 50.0), (2, 51.0)])) == ""
    # Only every tenth step is shown.
    assert time_left(10, deque([(1, 0.0), (10, 9.0), (20, 19.0)])) == "10 s left"
