"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere.

    a terminal   step 84/420 ━━━━━╺━━━━━━━━━━━━━━━━━━━  20% 0:00:36  2 min left  loss 2.3512  412 ms  4,952 tokens/s
    elsewhere    step  84/420  loss 2.3512  412 ms  4,952 tokens/s  grad 0.71  ranks/token 2.84  load 1.98  2 min left

Everything shown is in the step's record, so that nothing waits for the device. The time left is that of the steps that
remain at the pace of the latest ones; what lies between steps (evaluations, checkpoints) is part of the pace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from carpool.plugins.redact import redact

LINES = 50
"""Elsewhere than on a terminal, about so many lines over a run,"""
SILENCE = 60.0
"""and one after at most so many seconds (or one step)."""
PACE = 50
"""The time left follows so many of the latest steps."""


class Display:
    """Shows steps, held-out losses and messages; only on rank 0 (`main`).

    Args:
        total: the last step of this process;  start: steps done already.
        console: where to write; None: standard output.
        clock: seconds that only grow.
    """

    def __init__(
        self, main: bool, total: int, start: int, console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.console = console if console is not None else Console(quiet=not main, highlight=False)
        self._total, self._clock = total, clock
        # When each of the latest steps was done.
        self._done: deque[tuple[int, float]] = deque(maxlen=PACE + 1)
        self._first, self._said = start + 1, -SILENCE
        self._progress: Progress | None = None
        if main and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                # A narrow terminal has no room for what the bar says already.
                *([TaskProgressColumn(), TimeElapsedColumn()] if self.console.width >= 100 else []),
                TextColumn("{task.fields[text]}", markup=False),
                console=self.console,
                expand=True,
                # The numbers change once per step; the elapsed time once per second.
                refresh_per_second=2,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total, completed=start, text="")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(redact(text), markup=False, soft_wrap=True)

    def step(self, step: int, record: dict[str, Any]) -> None:
        """The numbers of a step that is done, from its `train` record: into the bar, or, now and then, a line."""
        now = self._clock()
        self._done.append((step, now))
        left = time_left(self._total - step, self._done)
        if self._progress is not None:
            text = "  ".join(["", *([left] if left else []), *essence(record)])
            self._progress.update(self._task, completed=step, text=text)
            return
        due = step % max(1, self._total // LINES) == 0 or now - self._said >= SILENCE
        if due or step in (self._first, self._total):
            self._said = now
            numbers = [*essence(record), *details(record), *([left] if left else [])]
            self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {'  '.join(numbers)}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def essence(record: dict[str, Any]) -> list[str]:
    """Loss, step time, speed."""
    milliseconds = record["step_ms"]
    took = f"{milliseconds:.0f} ms" if milliseconds < 9999.5 else f"{milliseconds / 1000:.1f} s"
    return [f"loss {record['loss']:.4f}", took, f"{record['tokens_per_second']:,.0f} tokens/s"]


def details(record: dict[str, Any]) -> list[str]:
    """What a line has room for besides."""
    parts = [
        f"grad {record['grad_norm']:.2f}",
        f"ranks/token {record['copies_per_token']:.2f}",
        f"load {record['load_max_over_mean']:.2f}",
    ]
    if "rank_load_after" in record:
        parts.append(f"load of ranks {record['rank_load_before']:.2f} -> {record['rank_load_after']:.2f}")
    if record.get("distillation_loss") is not None:
        parts.insert(0, f"distillation {record['distillation_loss']:.4f}")
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f}%")
    return parts


def time_left(steps: int, done: deque[tuple[int, float]]) -> str:
    """How long `steps` more take at the pace of those in `done` (step, seconds): "40 s left", "2 h 5 min left".

    Empty if no step remains, or if there is no pace yet: the first step warms up."""
    if steps <= 0 or len(done) < 3:
        return ""
    # From the end of the first step that is known, so that its warming up does not count.
    (first, began), (last, now) = done[0], done[-1]
    return f"{duration(steps * (now - began) / max(1, last - first))} left"


def duration(seconds: float) -> str:
    """For people: "40 s", "5 min", "2 h 5 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
