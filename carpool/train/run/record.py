"""Where a run's numbers go: `metrics.jsonl` always, the terminal, and whatever trackers `report_to` names.

Only rank 0 writes. Trackers are transformers' own integrations (TensorBoard, Weights & Biases, MLflow, ...), driven by
the same callbacks that its Trainer uses, so that all it knows is available here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carpool.train.run.files import METRICS


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise ValueError for a tracker that transformers does not know. On all ranks: one alone would leave the others
    waiting."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if unknown := [name for name in report_to if name not in INTEGRATION_TO_CALLBACK]:
        raise ValueError(
            f"training.report_to names {', '.join(unknown)}, which transformers does not know; it knows "
            f"{', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
        )


class Recorder:
    """Appends records to a run directory and passes them on. On other ranks than 0 it does nothing.

    Args:
        folder: the run directory; it exists.
        main: whether this is rank 0.
        report_to: names that transformers knows, such as "tensorboard".
        settings: the configuration, for the trackers' overview.
        max_steps: for the trackers.

    Raises:
        ValueError: a tracker whose package is missing.
    """

    def __init__(
        self, folder: Path, main: bool, report_to: Sequence[str], settings: dict[str, Any], max_steps: int
    ) -> None:
        self._main = main
        self._trackers = _Trackers(folder, report_to, settings, max_steps) if main and report_to else None
        if main:
            _cut_partial_line(folder / METRICS)
        self._file = (folder / METRICS).open("a", encoding="utf-8") if main else None

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One line of metrics, on disk when this returns."""
        if self._file is None:
            return
        # Numbers that are no numbers are legal here but no JSON: they are written as null.
        line = json.dumps(_finite({"kind": kind, "step": step, "time": time.time(), **fields}), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        if self._trackers is not None and kind in ("train", "eval"):
            self._trackers.log(step, _flatten(kind, fields))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def _cut_partial_line(path: Path) -> None:
    """What a killed writer left of its last line would become a malformed line in the middle."""
    if path.exists():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


class _Trackers:
    def __init__(self, folder: Path, report_to: Sequence[str], settings: dict[str, Any], max_steps: int) -> None:
        from transformers.integrations.integration_utils import get_reporting_integration_callbacks
        from transformers.trainer_callback import TrainerControl, TrainerState

        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        self._args = _Arguments(folder, settings)
        self._state = TrainerState(max_steps=max_steps, is_world_process_zero=True, is_local_process_zero=True)
        self._control = TrainerControl()
        try:
            self._callbacks = [callback() for callback in get_reporting_integration_callbacks(list(report_to))]
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"training.report_to = {list(report_to)}: {error}") from error
        for callback in self._callbacks:
            callback.on_train_begin(self._args, self._state, self._control)

    def log(self, step: int, logs: dict[str, float]) -> None:
        self._state.global_step = step
        for callback in self._callbacks:
            callback.on_log(self._args, self._state, self._control, logs=dict(logs))

    def close(self) -> None:
        for callback in self._callbacks:
            callback.on_train_end(self._args, self._state, self._control)


class _Arguments:
    """What the integrations read of transformers' TrainingArguments; building a real one would set up devices."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.output_dir = str(folder)
        self.logging_dir = str(folder / "tensorboard")
        self.run_name = folder.name
        self.project, self.trackio_space_id, self.hub_private_repo = "carpool", None, None
        self.push_to_hub, self.load_best_model_at_end, self.process_index = False, False, 0
        self._settings = settings

    def to_dict(self) -> dict[str, Any]:
        return self._settings

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self._settings.items()}

    def to_json_string(self) -> str:
        return json.dumps(self._settings, indent=2, default=str)


def _flatten(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """`{"ms": {"dispatch": {"p50": 1}}}` -> `{"ms/dispatch/p50": 1}`; held-out numbers are prefixed with eval_."""
    flat: dict[str, float] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{k}": v for k, v in _flatten("", value).items()})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"eval_{key}" if kind == "eval" else key] = value
    return flat


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
