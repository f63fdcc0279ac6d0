"""Disks that fill up and folders that vanish while a run goes on: said, tried again, and an error at the end."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import unittest.mock
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from carpool.parallel.ranks import describe
from carpool.train.config import load_config
from carpool.train.records import metrics_writer
from carpool.train.records.metrics_writer import Recorder
from carpool.train.run import loop
from carpool.train.run import run as runs
from carpool.train.run.finish import UnwrittenError
from carpool.train.run.loop import record_step
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, records


def recorder(folder: Path, said: list[str]) -> Recorder:
    return Recorder(folder, True, [], {}, 9, say=said.append, restore=lambda: (folder / "run.json").touch())


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Full(FileIO):
    """A file on a disk that takes `room` more bytes."""

    room = 0

    def write(self, data: Any) -> int:
        if not Full.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: Full.room]
        Full.room -= len(part)
        return super().write(part)


def test_a_full_disk_names_settings_only_where_checkpoints_are_saved() -> None:
    full = OSError(errno.ENOSPC, "No space left", "/x")
    assert describe(full) == "No space left (/x); free some space"
    assert describe(full, "buy a disk") == "No space left (/x); buy a disk"


def test_records_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it filled up in the middle of a line."""
    monkeypatch.setattr(metrics_writer, "FileIO", Full)
    said: list[str] = []
    one = recorder(tmp_path, said)
    for step, Full.room in ((1, 10_000), (2, 20), (3, 0)):
        one.write("train", step, loss=1.0)
    assert len(said) == 1 and "cannot be written (No space left on device); the run goes on" in said[0]
    assert one.lost() == [f"2 records could not be written to {tmp_path}/metrics.jsonl (No space left on device)"]
    Full.room = 10_000
    one.write("train", 4, loss=1.0)
    assert one.lost() == [] and "can be written again; nothing is missing" in said[1]
    one.close()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_no_more_waits_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_writer, "FileIO", Full)
    monkeypatch.setattr(metrics_writer, "_MOST_WAITING", 200)
    one = recorder(tmp_path, [])
    Full.room = 0
    for step in range(20):
        one.write("train", step)
    assert "20 records could not be written" in one.lost()[0]
    Full.room = 10_000
    one.close()
    assert "records could not be written" in one.lost()[0], "what was dropped stays lost"


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    one = recorder(tmp_path / "run", said) if (tmp_path / "run").mkdir() is None else None
    assert one is not None
    one.write("train", 1)
    shutil.rmtree(tmp_path / "run")
    one.write("train", 2)
    one.write("train", 3)
    assert steps(tmp_path / "run") == [2, 3] and (tmp_path / "run" / "run.json").exists()
    assert len(said) == 1 and "was deleted while the run goes on: the records up to step 1 are lost" in said[0]
    assert "metrics.jsonl was deleted while the run went on, and with it the records up to step 1" in one.lost()[0]


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    one = recorder(tmp_path, said)
    one._trackers = unittest.mock.Mock()
    one._trackers.log.side_effect = ConnectionError("no network")
    one.write("train", 1)
    one.write("train", 2)
    one.close()
    assert said == ["warning: trackers get no more numbers after step 1: no network"] and steps(tmp_path) == [1, 2]


def _train(output: str, settings: list[str], what: str) -> str:
    """On a rank: train, while rank 0 does something to the folder; the error's text if it ends in one."""
    folder = Path(output)

    def after(run: Any, numbers: Any) -> None:
        record_step(run, numbers)
        if run.main and numbers.step == 2:
            if what == "delete":
                shutil.rmtree(folder)
            else:
                (folder / "checkpoints").write_text("in the way")
        if run.main and numbers.step == 4 and what == "for a while":
            (folder / "checkpoints").unlink()
        dist.barrier()

    try:
        with unittest.mock.patch.object(loop, "record_step", after):
            runs.train(load_config(None, [*MODEL, *settings, f"training.output_dir={folder}"]))
    except UnwrittenError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("what", "lost"), [("delete", True), ("for a while", False), ("for good", True)])
def test_what_could_not_be_written_is_an_error_at_the_end(
    two_ranks: Ranks, text: list[str], tmp_path: Path, what: str, lost: bool
) -> None:
    output = tmp_path / "run"
    settings = [*text, "training.eval_steps=none", "training.eval_on_start=false", "training.max_steps=5"]
    errors = two_ranks(_train, str(output), [*settings, "training.save_steps=3"], what)
    assert len(set(errors)) == 1 and bool(errors[0]) == lost, errors
    assert (output / "summary.json").exists() and (output / "config.toml").exists() and (output / "run.json").exists()
    if what == "delete":
        assert "metrics.jsonl was deleted while the run went on, and with it the records up to step 2" in errors[0]
        assert list(records(output)) == [3, 4, 5]
    else:
        assert list(records(output)) == [1, 2, 3, 4, 5]
    if what == "for good":
        assert "the run came to step 5, but not all of it was written" in errors[0]
        assert "step-00000005 was not written" in errors[0] and "step-00000003" not in errors[0]
    else:
        assert (output / "checkpoints" / "step-00000005").is_dir()


def test_why_a_run_ended_is_written_though_its_numbers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error of the device, which every further call repeats."""
    written: list[dict[str, Any]] = []

    def lost(run: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    def lost_again(run: Any, wait: bool = True) -> None:
        raise RuntimeError("CUDA error: again")

    records = SimpleNamespace(write=lambda kind, step, **fields: written.append({kind: step, **fields}))
    run = SimpleNamespace(stop=contextlib.nullcontext(), step=7, records=records, close=lambda: None)
    monkeypatch.setattr(runs, "start_run", lambda *_: run)
    monkeypatch.setattr(runs, "loop", lost)
    monkeypatch.setattr(runs, "record", lost_again)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runs.train(load_config(None, []))
    assert written == [{"stopped": 7, "why": "CUDA error: an illegal memory access", "signal": None, "finite": None}]
