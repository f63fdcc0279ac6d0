"""Trackers get configuration, numbers and samples, and nothing secret is written.

None of wandb, mlflow and trackio is installed here: they are stand-ins that record calls. Their functions have the
parameters that transformers' callbacks pass, and those of the packages' repositories where Carpool calls them itself
(`wandb.Html`, `wandb.log`, `mlflow.log_text`, `trackio.log`): another call is a TypeError. No release of them was run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import TrainerCallback

from carpool.report.page import write_report
from carpool.train.records import metrics_writer
from carpool.train.records.metrics_writer import Recorder
from tests.train.test_loop import MODEL

NOTE = """
import inspect, json, os
def note(*args, **kwargs):
    name, file = inspect.stack()[1].function, os.environ["CALLS"]
    open(file, "a").write(json.dumps([f"{__name__}.{name}", args], default=str) + "\\n")
class Config(dict):
    def update(self, values, allow_val_change=None): note(values)
config = Config()
"""
STAND_INS = {
    "wandb": NOTE + """
class Run:
    id = name = url = "run"; summary = {}
    def _label(self, code=None): pass
run = None
def init(project=None, name=None):
    global run
    run = Run(); note(project, name)
def define_metric(name, step_metric=None, step_sync=None): pass
def log(data, step=None, commit=None): note(data)
def Html(data, inject=True): return data
def finish(): pass
""",
    "mlflow": NOTE + """
from mlflow import utils
__version__ = "3.4.0"
def is_tracking_uri_set(): return True
def get_tracking_uri(): return "file"
class Active:
    class info:
        run_id = "1"
active = None
def active_run(): return active
def start_run(run_name=None, nested=False):
    global active
    active = Active; note(run_name)
def log_params(params, synchronous=None): note(params)
def log_metrics(metrics, step=None, synchronous=None): note(metrics, step)
def log_text(text, artifact_file, run_id=None): note(text, artifact_file)
def end_run(): note()
""",
    "trackio": NOTE + """
__version__ = "0.22.0"
class context_vars:
    class current_space_id:
        get = staticmethod(lambda: None)
def init(project, name=None, space_id=None, resume="never", private=None, bucket_id=None): note(project, name)
def log(metrics, step=None): note(metrics)
def finish(): note()
""",
}  # fmt: skip
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_tracked_and_keeps_its_secrets(tmp_path: Path, text: list[str]) -> None:
    modules, calls, folder = tmp_path / "modules", tmp_path / "calls", tmp_path / "run"
    for name, code in STAND_INS.items():
        (modules / name).mkdir(parents=True)
        (modules / name / "__init__.py").write_text(code)
    (modules / "wandb" / "sdk" / "lib").mkdir(parents=True)
    (modules / "wandb" / "sdk" / "lib" / "config_util.py").write_text("class ConfigError(Exception): pass")
    (modules / "mlflow" / "utils").mkdir()
    (modules / "mlflow" / "utils" / "__init__.py").write_text("from mlflow.utils import validation")
    (modules / "mlflow" / "utils" / "validation.py").write_text(
        "MAX_PARAM_VAL_LENGTH = 250\nMAX_PARAMS_TAGS_PER_BATCH = 100"
    )
    settings = [
        "parallelism.device=cpu",
        "parallelism.num_ranks=1",
        "training.max_steps=2",
        'training.sample_prompt="d"',
    ]
    command = [sys.executable, "-m", "carpool", "train", *MODEL, *text, *settings, f"training.output_dir={folder}"]
    command.append("training.report_to=['wandb','mlflow','trackio','tensorboard']")
    root = str(Path(__file__).resolve().parents[2])
    secrets = {name: f"secret-of-{name}" for name in SECRETS}
    env = {**os.environ, **secrets, "PYTHONPATH": f"{modules}:{root}", "CALLS": str(calls), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=500)
    assert done.returncode == 0 and "warning: " not in done.stdout, done.stdout + done.stderr
    found: dict[str, list[Any]] = {}
    for line in calls.read_text().splitlines():
        name, args = json.loads(line)
        found.setdefault(name, []).append(args)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sample = next(line["text"] for line in lines if line["kind"] == "sample")
    loss = next(line["loss"] for line in lines if line["kind"] == "train" and line["step"] == 2)
    for config in (found["wandb.update"][0][0], found["trackio.update"][0][0]):
        assert config["training.max_steps"] == 2 and config["moe.transport"] == "auto"
    params = {key: value for args in found["mlflow.log_params"] for key, value in args[0].items()}
    assert params["training.max_steps"] == 2 and found["mlflow.start_run"] == [["run"]]
    assert any(args[0].get("train/loss") == loss for args in found["wandb.log"])
    assert any(args[0].get("train/loss") == loss for args in found["trackio.log"])
    assert any(args[0].get("loss") == loss and args[1] == 2 for args in found["mlflow.log_metrics"])
    assert found["mlflow.log_text"][0] == [sample, "samples/00000000.txt"]
    assert any(args[0].get("sample") == sample for args in found["trackio.log"])
    assert any("<pre>" in str(args[0].get("sample")) for args in found["wandb.log"])
    assert found["mlflow.end_run"] and found["trackio.finish"]
    write_report(folder)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 10
    for content in (*(path.read_bytes() for path in written), done.stdout.encode(), done.stderr.encode()):
        assert b"secret-of-" not in content


class Kept(TrainerCallback):
    """One that somebody else registers."""

    seen: ClassVar[list[Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append((state.global_step, logs["loss"], args.to_dict()["training.max_steps"]))

    def on_sample(self, step: int, text: str) -> None:
        self.seen.append((step, text))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the network is gone")


def test_another_tracker_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kept.seen.clear()
    monkeypatch.setitem(metrics_writer.TRACKERS._things, "kept", Kept)
    metrics_writer.check_trackers(["kept"])
    said: list[str] = []
    recorder = Recorder(tmp_path, True, ["kept"], {"training": {"max_steps": 3}}, 3, say=said.append)
    recorder.write("train", 1, loss=2.5)
    recorder.write("sample", 1, prompt="a", text="a b")
    recorder.close()
    assert Kept.seen == [(1, 2.5, 3), (1, "a b")] and said == ["warning: a tracker was not closed: the network is gone"]
