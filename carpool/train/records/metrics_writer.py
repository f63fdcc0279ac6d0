"""Where a run's numbers go: `metrics.jsonl` always, the terminal, and whatever trackers `report_to` names.

Only rank 0 writes. Trackers are transformers' own integrations (TensorBoard, Weights & Biases, MLflow, Trackio, ...),
driven by the same callbacks that its Trainer uses, so that all it knows is available here. Another one is a
`TrainerCallback` in `TRACKERS` (entry points "carpool.trackers"); samples go to its `on_sample(step, text)`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from html import escape
from io import FileIO
from pathlib import Path
from typing import Any

from carpool.plugins import Registry
from carpool.plugins.flat import flat
from carpool.plugins.redact import redact
from carpool.train.records.run_folder import METRICS, lock

TRACKERS: Registry[type[Any]] = Registry("tracker", "carpool.trackers", {})
# How the clients of transformers' callbacks show a text.
_SHOW_TEXT: dict[str, Callable[[Any, int, str], Any]] = {
    "TensorBoardCallback": lambda of, step, text: of.tb_writer.add_text("sample", text, step),
    "WandbCallback": lambda of, step, text: of._wandb.log(
        {"sample": of._wandb.Html(f"<pre>{escape(text)}</pre>"), "train/global_step": step}
    ),
    "MLflowCallback": lambda of, step, text: of._ml_flow.log_text(text, f"samples/{step:08d}.txt"),
    "TrackioCallback": lambda of, step, text: of._trackio.log({"sample": text, "train/global_step": step}),
}
# Bytes of records that wait for a disk; beyond, they are dropped and counted.
_MOST_WAITING = 64 << 20


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise ValueError for a tracker that transformers does not know, or whose package is missing. On all ranks: one
    alone would leave the others waiting."""
    if not report_to:
        return  # transformers' trackers take a second to import
    from transformers.integrations import integration_utils

    known = {*integration_utils.INTEGRATION_TO_CALLBACK, *TRACKERS}
    if unknown := [name for name in report_to if name not in known]:
        raise ValueError(
            f"training.report_to names {', '.join(unknown)}, which transformers does not know; known are "
            f"{', '.join(sorted(known))}"
        )
    for name in report_to:
        # Asked before there is a callback: some fail once more when they are thrown away.
        if not getattr(integration_utils, f"is_{name}_available", lambda: True)():
            raise ValueError(f"training.report_to names {name}, which is not installed: pip install {name}")
    _make_callbacks(report_to)


class Recorder:
    """Appends records to a run directory and passes them on. On other ranks than 0 it does nothing.

    A disk that is full or a folder that was deleted ends no run: the first write that fails is said, lines wait in
    memory, and each further write tries again. `lost` has what was not saved in the end.

    Args:
        folder: the run directory; it exists.
        main: whether this is rank 0.
        report_to: names that transformers knows, such as "tensorboard".
        settings, max_steps: for the trackers' overview.
        say: shows a line to the user.
        restore: writes the run directory's other files again, after it was deleted.

    Raises:
        ValueError: a tracker whose package is missing, or another run writes into the folder.
    """

    def __init__(
        self,
        folder: Path,
        main: bool,
        report_to: Sequence[str],
        settings: dict[str, Any],
        max_steps: int,
        *,
        say: Callable[[str], None] = print,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._main, self._say, self._restore = folder / METRICS, main, say, restore
        self._trackers = _Trackers(folder, report_to, settings, max_steps) if main and report_to else None
        self._file: FileIO | None = None
        self._waiting, self._error = b"", ""
        self._last_step, self._dropped = 0, 0
        self._deleted_after: int | None = None
        if main:
            self._file = FileIO(self._path, "a")
            if not lock(self._file):
                raise ValueError(f"another run has just begun to write into {folder}: choose another folder")
            _cut_partial_line(self._path)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One line of metrics, in the file when this returns, unless that failed."""
        if not self._main:
            return
        # Numbers that are no numbers are legal here but no JSON: they are written as null.
        line = json.dumps(_finite({"kind": kind, "step": step, "time": time.time(), **fields}), allow_nan=False)
        self._waiting += redact(line).encode() + b"\n"
        self._write_waiting()
        self._last_step = step
        if self._trackers is not None and kind in ("train", "eval", "sample"):
            try:
                if kind == "sample":
                    self._trackers.show(step, fields["text"])
                else:
                    self._trackers.log(step, _numbers(kind, fields))
            except Exception as error:  # whatever theirs raise; no run ends for it
                self._say(f"warning: trackers get no more numbers after step {step}: {error}")
                self._trackers = None

    def lost(self) -> list[str]:
        """What is not in the file, as sentences; none if all is."""
        found = []
        if self._deleted_after is not None:
            found.append(
                f"{self._path} was deleted while the run went on, and with it the records up to step "
                f"{self._deleted_after}"
            )
        if self._waiting or self._dropped:
            count = self._waiting.count(b"\n") + self._dropped
            found.append(f"{count} records could not be written to {self._path} ({self._error})")
        return found

    def close(self) -> None:
        if self._main:
            self._write_waiting()
        if self._file is not None:
            self._file.close()
            self._file, self._main = None, False
        if self._trackers is not None:
            try:
                self._trackers.close()
            except Exception as error:  # the run has all that it needs
                self._say(f"warning: a tracker was not closed: {error}")
            self._trackers = None

    def _write_waiting(self) -> None:
        try:
            self._open_if_gone()
            assert self._file is not None
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._error:
                self._say(
                    f"warning: {self._path} cannot be written ({error.strerror}); the run goes on and tries again "
                    "with each record"
                )
            self._error = error.strerror or str(error)
            if len(self._waiting) > _MOST_WAITING:
                self._dropped += self._waiting.count(b"\n")
                self._waiting = b""
        else:
            if self._error and not self._dropped:
                self._say(f"{self._path} can be written again; nothing is missing")
            self._error = self._error if self._dropped else ""

    def _open_if_gone(self) -> None:
        """A file that was deleted takes what is written to it without an error, and nobody can read it."""
        try:
            if self._file is not None and os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            pass
        if self._file is not None:
            self._file.close()
            self._file, self._deleted_after = None, self._last_step
            self._say(
                f"warning: {self._path} was deleted while the run goes on: the records up to step {self._last_step} "
                "are lost. It is written anew from here"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._restore()
        self._file = FileIO(self._path, "a")
        lock(self._file)


def _cut_partial_line(path: Path) -> None:
    """What a killed writer left of its last line would become a malformed line in the middle."""
    if path.exists():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


# Read by transformers' callback when it is made.
_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"


class _Trackers:
    def __init__(self, folder: Path, report_to: Sequence[str], settings: dict[str, Any], max_steps: int) -> None:
        from transformers.trainer_callback import TrainerControl, TrainerState

        given = os.environ.get(_TENSORBOARD)
        os.environ.setdefault(_TENSORBOARD, str(folder / "tensorboard"))
        self._args = _Arguments(folder, settings)
        self._state = TrainerState(max_steps=max_steps, is_world_process_zero=True, is_local_process_zero=True)
        self._control = TrainerControl()
        try:
            self._callbacks = _make_callbacks(report_to)
        finally:
            if given is None:
                del os.environ[_TENSORBOARD]  # or the next run of this process would write into this one's folder
        try:
            for callback in self._callbacks:
                callback.on_train_begin(self._args, self._state, self._control)
        except Exception as error:  # whatever theirs raise: nobody has logged in, nothing can be reached
            raise ValueError(f"training.report_to = {list(report_to)}: {error}") from error

    def log(self, step: int, logs: dict[str, float]) -> None:
        self._state.global_step = step
        for callback in self._callbacks:
            callback.on_log(self._args, self._state, self._control, logs=dict(logs))

    def show(self, step: int, text: str) -> None:
        for callback in self._callbacks:
            if (of_theirs := _SHOW_TEXT.get(type(callback).__name__)) is not None:
                of_theirs(callback, step, text)
            elif hasattr(callback, "on_sample"):
                callback.on_sample(step, text)

    def close(self) -> None:
        for callback in self._callbacks:
            callback.on_train_end(self._args, self._state, self._control)


def _make_callbacks(report_to: Sequence[str]) -> list[Any]:
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    try:
        theirs = get_reporting_integration_callbacks([name for name in report_to if name not in TRACKERS])
        return [callback() for callback in [*theirs, *(TRACKERS[name] for name in report_to if name in TRACKERS)]]
    except (RuntimeError, ImportError) as error:
        raise ValueError(f"training.report_to = {list(report_to)}: {error}") from error


class _Arguments:
    """What the integrations read of transformers' TrainingArguments; building a real one would set up devices."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.output_dir = str(folder)
        self.logging_dir = str(folder / "tensorboard")
        self.run_name = folder.name
        self.project, self.trackio_space_id, self.hub_private_repo = "carpool", None, None
        self.trackio_bucket_id, self.trackio_static_space_id = None, False
        self.push_to_hub, self.load_best_model_at_end, self.process_index = False, False, 0
        # By SECTION.KEY: MLflow leaves out a value of more characters than a section has.
        shown = json.loads(redact(json.dumps(settings, default=str)))
        self._settings = {f"{name}.{key}": one for name, keys in shown.items() for key, one in keys.items()}

    def to_dict(self) -> dict[str, Any]:
        return self._settings

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self._settings.items()}

    def to_json_string(self) -> str:
        return json.dumps(self._settings, indent=2, default=str)


def _numbers(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """`{"ms": {"dispatch": {"p50": 1}}}` -> `{"ms/dispatch/p50": 1}`; held-out numbers are prefixed with eval_."""
    return {
        f"eval_{key}" if kind == "eval" and key in fields else key: value
        for key, value in flat(fields, "/").items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
