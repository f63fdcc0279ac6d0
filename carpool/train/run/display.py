"""What a person sees while a run goes on: a live progress display on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Shows steps, held-out losses and messages; only on rank 0.

    Args:
        main: whether this is rank 0.
        total: steps of the whole run.
        start: steps done already.
    """

    def __init__(self, main: bool, total: int, start: int) -> None:
        self.console = Console(quiet=not main, highlight=False)
        self._total = total
        self._progress: Progress | None = None
        if main and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total, completed=start, text="")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, record: dict[str, Any]) -> None:
        """A step's numbers: beside the bar on a terminal; elsewhere a line for every 1/50 of the run."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=_line(record))
        elif step == 1 or step % max(1, self._total // 50) == 0 or step == self._total:
            self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {_line(record)}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _line(record: dict[str, Any]) -> str:
    parts = [
        f"loss {record['loss']:.4f}",
        f"grad {record['grad_norm']:.2f}",
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"copies {record['copies_per_token']:.2f}",
        f"load {record['load_max_over_mean']:.2f}",
    ]
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f}%")
    ms = record["ms"]
    parts.append(f"ms {ms['dispatch']['total']:.0f}+{ms['experts']['total']:.0f}+{ms['combine']['total']:.0f}")
    return "  ".join(parts)
