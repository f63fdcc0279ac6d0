"""From a run directory to a `Run`: the files, checked, without what a resume made void.

Three things make reading metrics more than parsing lines:

- A run that is still going, or was killed, may end in half a line. That line is left out; damage anywhere else is an
  error that names the line.
- A resumed run goes back. If step 70 was reached and the run then resumed from the checkpoint of step 50, the file
  holds steps 51 to 70 twice, or, if the second attempt is now at 55, a stale 56 to 70. A training line whose step does
  not grow marks such a return: of what stands before it, only earlier steps are kept. Of what is still double, the
  last line counts.
- Per-layer loads are large (layers × experts, each time). Only max/mean per layer is kept of each; at most SAMPLES of
  them, spread over the run, are read in full.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from carpool.report.record_types import (
    Checkpoint,
    Eval,
    Layers,
    Layout,
    Placement,
    Probe,
    Record,
    Recovery,
    RunInfo,
    Sample,
    Stopped,
    Summary,
    Train,
    explain,
)

R = TypeVar("R", bound=Record)

KINDS: dict[str, type[Record]] = {
    "train": Train,
    "layers": Layers,
    "eval": Eval,
    "sample": Sample,
    "probe": Probe,
    "checkpoint": Checkpoint,
    "placement": Placement,
    "layout": Layout,
    "stopped": Stopped,
    "recovery": Recovery,
}


SAMPLES = 48
"""So many `layers` lines are read in full: columns of a map of experts over time."""


@dataclass(frozen=True)
class LayersDigest:
    """What is kept of each `layers` line, per layer: imbalance_L, the busiest expert's load over the mean load, and
    copies_L, ranks per token."""

    step: int
    imbalance_L: list[float]
    copies_L: list[float]


@dataclass
class Run:
    """A run directory in memory. Lists are in order of steps; `summary` is None while the run has not ended."""

    path: Path
    info: RunInfo
    summary: Summary | None = None
    config_text: str | None = None
    train: list[Train] = field(default_factory=list)
    layers: list[LayersDigest] = field(default_factory=list)
    layer_samples: list[Layers] = field(default_factory=list)
    last_layers: Layers | None = None
    evals: list[Eval] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    stopped: Stopped | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def starts(self) -> set[int]:
        """The first step of each process that worked on the run."""
        return {entry.from_step + 1 for entry in self.info.history} or {self.train[0].step}

    @property
    def memory_peak(self) -> int | None:
        """The largest peak that any rank reported in any step, in bytes."""
        return max((t.memory_peak_bytes for t in self.train if t.memory_peak_bytes is not None), default=None)

    def asked(self, key: str) -> int | None:
        """A number of the configuration's [training]; None if there is none."""
        try:
            value = tomllib.loads(self.config_text or "").get("training", {}).get(key)
        except tomllib.TOMLDecodeError:
            return None
        return value if isinstance(value, int) else None


@dataclass(frozen=True)
class _Line:
    """One line of metrics.jsonl: where it stands, what it is, and its record (a digest for `layers`)."""

    number: int
    offset: int
    kind: str
    step: int
    variant: str
    record: Record | LayersDigest


def read_run(run_dir: Path) -> Run:
    """Reads and checks RUN/run.json, metrics.jsonl and, where they exist, summary.json and config.toml.

    Errors: ValueError that names the file, the line and what to do, if the folder is no run, nothing was recorded yet,
    or a file is damaged.
    """
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir} is not a folder: give the output_dir of a run, for example `carpool report runs/a`"
        )
    if not (run_dir / "run.json").is_file():
        hint = ", ".join(sorted(str(p.parent) for p in run_dir.glob("*/run.json"))[:5])
        raise ValueError(
            f"{run_dir} is not a run: it has no run.json, which `carpool train` writes when it starts"
            + (f"; did you mean one of {hint}?" if hint else "; give the output_dir of a run")
        )
    run = Run(run_dir, _read_json(RunInfo, run_dir / "run.json"))
    if (run_dir / "summary.json").is_file():
        run.summary = _read_json(Summary, run_dir / "summary.json")
    if (run_dir / "config.toml").is_file():
        run.config_text = (run_dir / "config.toml").read_text(encoding="utf-8", errors="replace")
    _read_metrics(run_dir / "metrics.jsonl", run)
    if run.summary is not None and run.train[-1].step > run.summary.steps:
        run.notes.append(
            f"summary.json is of step {run.summary.steps}, before the last resume: its numbers are not used"
        )
        run.summary = None
    return run


def measured_costs(folder: Path) -> tuple[float, float]:
    """Seconds for which a run waited for a checkpoint, and from a failure until it went on: medians of all that it has
    recorded, whatever became of them.

    Raises:
        ValueError: it has recorded no checkpoint, or no recovery."""
    path = folder / "metrics.jsonl"
    lines = list(_lines(path, [])) if path.is_file() else []
    waits = [line.record.seconds for line in lines if isinstance(line.record, Checkpoint)]
    recoveries = [line.record.seconds for line in lines if isinstance(line.record, Recovery)]
    known = [one for one in waits if one is not None]
    if not known or not recoveries:
        raise ValueError(
            f"{folder} has recorded {len(known)} checkpoints and {len(recoveries)} recoveries, and both are needed: "
            "name a run of `carpool train --elastic` that has lost an agent"
        )
    return statistics.median(known), statistics.median(recoveries)


def _read_json(model: type[R], path: Path) -> R:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or report on another run") from None
    if not isinstance(data, dict):
        raise ValueError(
            f"{path} holds a {type(data).__name__} where an object is expected: is this file from Carpool?"
        )
    return _validated(model, data, str(path))


def _validated(model: type[R], data: dict[str, Any], where: str) -> R:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error)}; the file was changed or is from another version") from None


def _read_metrics(path: Path, run: Run) -> None:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run has recorded no step yet; wait for its first one")
    lines = list(_lines(path, run.notes))
    if not any(line.kind == "train" for line in lines):
        raise ValueError(f"{path} holds no training step: the run has not finished its first one, or died before it")
    kept = _without_stale(lines)
    stale = len(lines) - len(kept)
    if stale:
        run.notes.append(f"{stale} lines from before a resume, superseded by later ones, are left out")

    def records(kind: str) -> list[Any]:
        return [line.record for line in kept if line.kind == kind]

    run.train, run.layers, run.evals = records("train"), records("layers"), records("eval")
    run.samples, run.probes, run.checkpoints = records("sample"), records("probe"), records("checkpoint")
    run.placements, run.layouts = records("placement"), records("layout")
    # An error counts until the run was started again.
    ends = [line for line in lines if line.kind in ("train", "stopped", "layout")]
    if ends[-1].kind == "stopped":
        assert isinstance(ends[-1].record, Stopped)
        run.stopped = ends[-1].record
    _read_samples(path, [line.offset for line in kept if line.kind == "layers"], run)


def _read_samples(path: Path, offsets: list[int], run: Run) -> None:
    """Some `layers` lines in full, evenly spread; the first and the last are among them."""
    if not offsets:
        return
    count = min(SAMPLES, len(offsets))
    chosen = sorted({round(i * (len(offsets) - 1) / max(1, count - 1)) for i in range(count)} | {len(offsets) - 1})
    with path.open("rb") as file:
        for number in chosen:
            file.seek(offsets[number])
            run.layer_samples.append(Layers.model_validate(json.loads(file.readline())))
    run.last_layers = run.layer_samples[-1]


def _lines(path: Path, notes: list[str]) -> Iterator[_Line]:
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            try:
                data = json.loads(raw)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                if not raw.endswith(b"\n"):
                    notes.append(f"line {number} of metrics.jsonl, the last, is cut off and left out")
                    return
                raise ValueError(f"{where} is not JSON ({error}): delete that line to report on the rest") from None
            if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
                raise ValueError(f'{where} has no "kind": delete that line to report on the rest')
            model = KINDS.get(data["kind"])
            if model is None:
                continue
            record: Any = _validated(model, data, where)
            variant = data.get("transport") or data.get("prompt") or data.get("event") or ""
            if isinstance(record, Layers):
                copies_L = [math.nan if copies is None else copies for copies in record.copies]
                record = LayersDigest(record.step, [_max_over_mean(load_E) for load_E in record.load], copies_L)
            yield _Line(number, start, data["kind"], record.step, str(variant), record)


def _max_over_mean(load_E: list[float]) -> float:
    total = sum(load_E)
    return max(load_E) * len(load_E) / total if total else float("nan")


def _without_stale(lines: list[_Line]) -> list[_Line]:
    """Drops what a return to an earlier step made void, then all but the last of equal (kind, step, variant).

    The variant tells apart lines that rightly share a step: probes of two transports, samples of two prompts, a move
    and what was measured before it.
    """
    kept: list[_Line] = []
    latest_train: _Line | None = None
    for line in lines:
        if line.kind == "train":
            if latest_train is not None and line.step <= latest_train.step:
                # Lines between the two training lines that have exactly this step are the new attempt's own.
                kept = [
                    k for k in kept if k.step < line.step or (k.step == line.step and k.number > latest_train.number)
                ]
            latest_train = line
        kept.append(line)
    last = {(line.kind, line.step, line.variant): line for line in kept}
    return sorted(last.values(), key=lambda line: (line.step, line.number))
