"""What people are told who write what Carpool does not read: one line, that names the file or the key."""

from __future__ import annotations

import dataclasses
import os
import re
import time
import tomllib
from pathlib import Path

import pytest
from transformers import TrainingArguments

from carpool.layout.topology import Topology
from carpool.train.config import load, load_config
from carpool.train.config.schema import keys
from carpool.train.launch.start import said_if_slow
from carpool.transport.nodes import why_not_several
from tests.train.test_cli import error_of

DEEP = "[" * 5000 + "]" * 5000
OURS = {f"{section}.{key}" for section, _, key in keys()}
THEIRS = tomllib.loads(Path(load.__file__).with_name("training_arguments.toml").read_text())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainingArguments)])
def test_names_of_training_arguments_are_answered(name: str) -> None:
    if f"training.{name}" in OURS:
        assert name not in THEIRS
        return
    said = THEIRS[name]
    for given in (f"training.{name}=1", f"{name}=1"):
        with pytest.raises(ValueError) as refused:
            load_config(None, [given])
        assert said in str(refused.value) and "did you mean" not in str(refused.value)


def test_what_stands_for_training_arguments_exists() -> None:
    for name, said in THEIRS.items():
        assert f"training.{name}" not in OURS
        mentioned = re.findall(r"\b(?:model|data|training|parallelism|moe|memory)\.[a-z_0-9]+", said)
        assert set(mentioned) <= OURS and (" " in said or mentioned == [said]), (name, said)
    message = error_of("train", "training.early_stopping_patience=3")
    assert "Carpool has no early_stopping_patience: a run ends after" in message


@pytest.mark.parametrize("kind", ["endless", "pipe", "large", "deep"])
def test_a_configuration_that_cannot_be_read_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    file = Path("/dev/zero") if kind == "endless" else tmp_path / "settings.toml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "large":
        with file.open("wb") as out:
            out.truncate(2 << 30)
    elif kind == "deep":
        file.write_text(f"[training]\nseed = {DEEP}\n")
    said = {
        "endless": "a device",
        "pipe": "is a pipe",
        "large": "more than 1,048,576 bytes",
        "deep": "nested too deeply",
    }
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} .*{said[kind]}"):
        load_config(file)
    assert time.monotonic() - begin < 5


def test_deep_values_and_files_of_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the value of training\.seed is not read: .* nested too deeply"):
        load_config(None, [f"training.seed={DEEP}"])
    file = tmp_path / "config.json"
    file.write_text(f'{{"model_type": {DEEP}}}')
    for setting in (f"model.config={file}", f"model.path={tmp_path}", f"moe.layout={file}"):
        message = error_of("train", "--dry-run", setting)
        assert str(tmp_path) in message and "recursion" in message, message


@pytest.mark.parametrize("key", ["training.output_dir", "training.resume_from_checkpoint", "model.path"])
def test_a_path_is_not_empty(key: str) -> None:
    assert f"{key} = '' (on the command line): expected text that is not empty" in error_of("train", f'{key}=""')


def test_escape_sequences_are_not_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("a = 1 \x1b[31m")
    for given in (["training.\x1b[31mx=3"], ["\x1b[31mx=3"], ["--config", str(file)], ["--config", "\x1b[31mx.toml"]):
        message = error_of("train", *given)
        assert "\x1b" not in message and r"\x1b[31m" in message


def test_a_tracker_that_is_not_installed_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    message = error_of("train", "--dry-run", "training.report_to=mlflow")
    assert "training.report_to names mlflow, which is not installed: pip install mlflow" in message
    assert "Exception ignored" not in capfd.readouterr().err


def test_who_waits_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_slow(10):
        pass
    assert capsys.readouterr().err == ""
    with said_if_slow(0.01):
        time.sleep(0.3)
    assert "layer by layer; thousands of layers take minutes" in capsys.readouterr().err


def test_the_library_names_what_the_library_has() -> None:
    said = why_not_several(Topology.even(4))
    assert said is not None and "carpool.transport.set_topology" in said and "ep_size" not in said
