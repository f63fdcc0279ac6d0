"""Checkpoints that are written while training goes on: their bits, when state may change, and what goes wrong."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from carpool.optim import AdamW
from carpool.parallel.ranks import rank
from carpool.train.checkpoints import host_copy, pending_save
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError, read_state
from carpool.train.checkpoints.host_copy import HostBuffer, copy_files
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.shard_files import Piece, ShardFile, total_bytes
from carpool.train.config import TrainingSection, load_config
from carpool.train.run.run import train
from tests.ranks import Ranks
from tests.train.test_checkpoint import EP2, EP4, HSDP, TWO, Layout, _build, _train
from tests.train.test_kill import LONG, pid_of_rank, started, wait_for_step
from tests.train.test_loop import MODEL, losses, start


@contextmanager
def slow_copies(seconds: float) -> Iterator[None]:
    """Each copy of a rank's state begins so late."""
    copy = pending_save.copy_files

    def late(*args: Any) -> Any:
        time.sleep(seconds)
        return copy(*args)

    with mock.patch.object(pending_save, "copy_files", late):
        yield


def _beside(output: str, layout: Layout | None, moments: str | None) -> list[str]:
    """A checkpoint that training waits for, then the same state beside two further steps; names of files that differ.
    Twice: the second finds plan and memory of the first."""
    model, optimizer = _build(layout)
    if moments is not None:
        optimizer = AdamW(model.parameters(), lr=1e-2, moments=moments)
    manager, differ = CheckpointManager(output), []
    for first in (0, 3):
        _train(model, optimizer, range(first, first + 1))
        waited = manager.save(first + 1, model, optimizer, {}).path
        if rank() == 0:
            os.rename(waited, waited.with_suffix(".waited"))
        with slow_copies(0.2):
            assert manager.save(first + 1, model, optimizer, {}, beside=True) is None
        optimizer.register_step_pre_hook(lambda *_: manager.settle())
        _train(model, optimizer, range(first + 1, first + 3))
        saved = manager.collect()
        assert saved is not None and saved.path == manager.folder / f"step-{first + 1:08d}" == waited
        files = [read_state(path)["files"] for path in (waited, waited.with_suffix(".waited"))]
        ranks = [read_state(path)["ranks"] for path in (waited, waited.with_suffix(".waited"))]
        assert files[0].keys() == files[1].keys() and ranks[0] == ranks[1]
        differ += [name for name in files[0] if files[0][name] != files[1][name]]
        assert sorted(path.name for path in waited.iterdir()) == ["model", "optimizer", "state.json"]
    return differ


@pytest.mark.parametrize(
    ("layout", "moments"),
    [
        (EP4, "int8"),
        (EP2, None),
        pytest.param(HSDP | {"ep_size": 2}, None, marks=pytest.mark.slow),
        pytest.param(EP2, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_same_files_as_of_a_save_that_training_waits_for(
    ranks: Ranks, tmp_path: Path, layout: Layout, moments: str | None
) -> None:
    assert ranks(_beside, str(tmp_path), layout, moments) == [[]] * 4


def test_one_process(tmp_path: Path) -> None:
    assert _beside(str(tmp_path), None, None) == []


def test_the_copy_is_of_the_steps_end(tmp_path: Path) -> None:
    """Who does not wait for the copy has the values of another step in it: `settle` is what keeps them apart."""
    kept = {}
    for waits in (True, False):
        model = torch.nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        manager = CheckpointManager(tmp_path / str(waits))
        with torch.no_grad():
            model.weight.fill_(1.0)
        with slow_copies(0.3):
            manager.save(1, model, optimizer, {}, beside=True)
            if waits:
                manager.settle()
            with torch.no_grad():
                model.weight.fill_(2.0)
            saved = manager.collect()
        assert saved is not None and saved.copied is not None and saved.copied >= 0.3
        if waits:
            assert saved.seconds >= 0.3
        weights = load_file(next((saved.path / "model").glob("*.safetensors")))
        kept[waits] = weights["weight"].unique().tolist()
    assert kept == {True: [1.0], False: [2.0]}


def test_buffers_and_state_are_copied_at_once(tmp_path: Path) -> None:
    """Forwards and records change them, and no update tells."""
    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    manager, state = CheckpointManager(tmp_path), {"totals": {"tokens": 1}}
    with slow_copies(0.2):
        manager.save(1, model, optimizer, state, beside=True)
        model(torch.randn(7, 4) + 3)
        state["totals"]["tokens"] = 2
        saved = manager.collect()
    assert saved is not None and read_state(saved.path)["state"] == {"totals": {"tokens": 1}}
    assert model.running_mean is not None and model.running_mean.ne(0).all()
    assert load_file(next((saved.path / "model").glob("*.safetensors")))["running_mean"].eq(0).all()


def _one_tensor(output: str) -> list[str]:
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    if rank() == 1:
        model.requires_grad_(False)
    manager = CheckpointManager(output)
    manager.save(1, model, optimizer, {}, beside=True)
    saved = manager.collect()
    manager.close()
    assert saved is not None
    return sorted(read_state(saved.path)["files"])


def test_more_ranks_than_tensors(two_ranks: Ranks, tmp_path: Path) -> None:
    """One of them writes nothing."""
    assert [len(files) for files in two_ranks(_one_tensor, str(tmp_path))] == [2, 2]


def test_slices_of_any_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Odd and empty tensors, those that are not contiguous, all dtypes; copies in slices of 24 bytes."""
    monkeypatch.setattr(host_copy, "SLICE_BYTES", 24)
    tensors = {
        "odd": torch.randn(7, 3), "empty": torch.zeros(0, 5), "one": torch.tensor(3, dtype=torch.int64),
        "codes": torch.randint(0, 255, (37,), dtype=torch.uint8), "half": torch.randn(5, 3).bfloat16(),
        "turned": torch.randn(3, 5).t(), "low": torch.randint(-9, 9, (11,), dtype=torch.int16),
    }  # fmt: skip
    file = ShardFile.of([Piece(name, (0,) * one.dim(), one) for name, one in tensors.items()])
    buffer = HostBuffer(torch.device("cpu"))
    assert copy_files({"a": file, "b": file}, buffer, None) == {"a": 0, "b": total_bytes({"a": file})}
    for name, begin in (("a", 0), ("b", total_bytes({"a": file}))):
        (tmp_path / name).write_bytes(buffer.memory[begin : begin + file.bytes].numpy().tobytes())
        found = load_file(tmp_path / name)
        assert found.keys() == tensors.keys() and all(found[one].equal(tensors[one]) for one in tensors)
    file.write(tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_memory_is_reserved_before_the_first_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In parts, beside the first steps; what could not be reserved is asked for again, and an error is raised then."""
    monkeypatch.setattr(host_copy, "PART_BYTES", 4096)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    manager = CheckpointManager(tmp_path)
    manager.prepare(model, optimizer)
    assert not list(tmp_path.iterdir())
    buffer = manager._buffer
    assert buffer is not None
    buffer.reserve(1)
    descriptor = buffer.fd
    assert buffer.bytes > 4 * 64 * 64 and os.fstat(descriptor).st_blocks * 512 >= buffer.bytes
    manager.save(1, model, optimizer, {}, beside=True)
    assert manager.collect() is not None and buffer.fd == descriptor
    manager.close()
    assert buffer.bytes == 0

    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "no memory")):
        buffer.prepare(4096)
        with pytest.raises(OSError, match="no memory"):
            buffer.reserve(4096)
    assert buffer.bytes == 0 and buffer.fd == -1
    buffer.reserve(4096)
    buffer.close()


@contextmanager
def full_disk(part: str) -> Iterator[None]:
    """What the writer's process puts under `part` goes to /dev/full, where each write fails as on a full disk."""
    write = pending_save.write_beside

    def redirected(files: dict[str, Any], *rest: Any) -> dict[str, Any]:
        return write({"/dev/full" if f"/{part}/" in path else path: one for path, one in files.items()}, *rest)

    with mock.patch.object(pending_save, "write_beside", redirected):
        yield


def _on_a_full_disk(output: str) -> tuple[str, str, list[str]]:
    model, optimizer = _build(TWO)
    manager = CheckpointManager(output)
    manager.save(1, model, optimizer, {})
    with full_disk("optimizer" if dist.get_rank() == 1 else "nothing"):
        manager.save(2, model, optimizer, {}, beside=True)
        pending = manager.pending
        assert pending is not None
        pending.join()
    with pytest.raises(ValueError, match="is still being written"):
        manager.save(3, model, optimizer, {})
    with pytest.raises(CheckpointWriteError) as caught:
        manager.collect()
    left = sorted(path.name for path in manager.folder.iterdir())
    dist.barrier()
    manager.save(3, model, optimizer, {}, beside=True)
    assert manager.collect() is not None
    return str(caught.value), pending.error, left


def test_a_full_disk_on_one_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    """All ranks raise the same; rank 0 knew before."""
    (message, known, left), (other, _, _) = two_ranks(_on_a_full_disk, str(tmp_path))
    assert message == other and left == ["step-00000001"]
    assert f"checkpoint {tmp_path}/checkpoints/step-00000002 was not written" in message
    why = f"rank 1: {os.strerror(errno.ENOSPC)} (/dev/full); free some space or lower training.save_total_limit"
    assert why in message and known.startswith(why)


@contextmanager
def writer(folder: Path, first: str) -> Iterator[None]:
    """The process that writes does something in a shell first."""
    script = folder / "writer.sh"
    script.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    with mock.patch.object(pending_save.sys, "executable", str(script)):
        yield


@pytest.mark.parametrize(
    ("signal", "why"),
    [
        ("KILL", "the process that writes it ended with code -9"),
        ("STOP", "the process that writes it wrote nothing for"),
    ],
)
def test_a_writer_that_is_killed_or_stands_still(tmp_path: Path, signal: str, why: str) -> None:
    """Nothing of its checkpoint is left, and the next one is written."""
    model, optimizer = _build(None)
    children = set(psutil.Process().children())  # ranks of other tests
    manager = CheckpointManager(tmp_path / "run", stall_seconds=1.0)
    with writer(tmp_path, f"kill -{signal} $$"):
        manager.save(1, model, optimizer, {}, beside=True)
        with pytest.raises(CheckpointWriteError, match=why):
            manager.collect()
    assert list(manager.folder.iterdir()) == [] and set(psutil.Process().children()) <= children
    manager.save(2, model, optimizer, {}, beside=True)
    assert manager.collect() is not None


def test_a_slow_writer_is_waited_for(tmp_path: Path) -> None:
    """As long as its file grows."""
    memory, path = HostBuffer(torch.device("cpu")), tmp_path / "file"
    memory.reserve(4096)
    memory.memory.fill_(7)
    with writer(tmp_path, f"for i in 1 2 3 4 5 6; do printf x >> {path}; sleep 0.5; done"):
        records = pending_save.write_beside({str(path): (0, 3)}, memory.fd, 1.0)
    assert records[str(path)]["bytes"] == 3 and path.read_bytes() == bytes([7] * 3)


def test_without_host_memory_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.train.checkpoints.manager.free_host_memory", lambda: 1000)
    model, optimizer = _build(None)
    manager = CheckpointManager(tmp_path)
    saved = manager.save(1, model, optimizer, {}, beside=True)
    assert saved is not None and saved.copied is None and manager.pending is None and manager.latest() == saved.path


# ----------------------------------------------------------------------------------------------------------- whole runs

ASYNC = "training.async_save=on"


def test_which_runs_wait() -> None:
    auto, on, disk = (TrainingSection(**one) for one in ({}, {"async_save": "on"}, {"optimizer_offload": "disk"}))
    assert auto.saves_async(True, "host") and on.saves_async(False, "disk")
    assert not any((auto.saves_async(False, "device"), auto.saves_async(True, "disk"), disk.saves_async(True, "host")))


CONSUMED = (
    "training.optimizer=one-pass", "training.optimizer_state_dtype=int8", "training.optimizer_offload=host",
    "training.optimizer_in_backward=true", "training.max_grad_norm=0",
)  # fmt: skip


def _train_slowly(output: str, settings: list[str]) -> None:
    with slow_copies(0.1):
        train(load_config(None, [*MODEL, *settings, f"training.output_dir={output}"]))


@pytest.mark.parametrize("more", [(), CONSUMED])
def test_a_run_goes_on_from_what_was_written_beside_it(
    two_ranks: Ranks, text: list[str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Checkpoints of a run are the same files whether it waits for them or not. Also where gradients are consumed in
    the backward, and where the optimizer's state is in host memory."""
    settings = [
        *text,
        *LONG,
        *more,
        "training.stop_at_step=6",
        "training.save_steps=2",
        "training.save_total_limit=none",
    ]
    assert start(two_ranks, tmp_path / "waits", settings) == [""] * 2
    two_ranks(_train_slowly, str(tmp_path / "beside"), [*settings, ASYNC])
    whole = losses(tmp_path / "waits")
    assert losses(tmp_path / "beside") == whole
    lines = [json.loads(line) for line in (tmp_path / "beside/metrics.jsonl").read_text().splitlines()]
    said = {one["step"]: one for one in lines if one["kind"] == "checkpoint"}
    assert said.keys() == {2, 4, 6} and "copied_seconds" not in said[6]
    assert all(said[step]["written_seconds"] >= said[step]["copied_seconds"] > 0.1 for step in (2, 4))
    for step in (2, 4, 6):
        states = [read_state(tmp_path / run / f"checkpoints/step-{step:08d}") for run in ("waits", "beside")]
        assert all(states[0][key] == states[1][key] for key in ("files", "ranks", "state"))
    again = f"training.resume_from_checkpoint={tmp_path / 'beside/checkpoints/step-00000004'}"
    assert start(two_ranks, tmp_path / "again", [*settings, again]) == [""] * 2
    assert losses(tmp_path / "again") == {step: whole[step] for step in (5, 6)}


def _reserve_nothing(output: str, settings: list[str]) -> None:
    """A disk for temporary folders that is full, on one of two ranks."""
    full = mock.patch.object(tempfile, "TemporaryDirectory", side_effect=OSError(errno.ENOSPC, "No space left"))
    with full if rank() == 1 else nullcontext():
        train(load_config(None, [*MODEL, *settings, f"training.output_dir={output}"]))


def test_a_run_goes_on_where_memory_is_not_reserved(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    two_ranks(
        _reserve_nothing, str(tmp_path), [*text, *LONG, ASYNC, "training.stop_at_step=3", "training.save_steps=2"]
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in lines if one["kind"] == "checkpoint"] == [2, 3]


def _lose_the_best(output: str, settings: list[str]) -> None:
    """The checkpoint of step 5 is published as late as it can be; that of step 6, the best so far, fails."""
    publish, save = CheckpointManager._publish, CheckpointManager.save

    def late(manager: CheckpointManager, opened: Any, of_ranks: Any) -> int:
        until = time.monotonic() + 2
        while opened.step == 5 and manager.best != 6 and time.monotonic() < until:
            time.sleep(0.01)
        return publish(manager, opened, of_ranks)

    def failing(manager: CheckpointManager, step: int, *args: Any, **more: Any) -> Any:
        if step == 6:
            raise CheckpointWriteError("the disk is full")
        return save(manager, step, *args, **more)

    with mock.patch.multiple(CheckpointManager, _publish=late, save=failing):
        train(load_config(None, [*MODEL, *settings, f"training.output_dir={output}"]))


def test_the_best_checkpoint_stays_until_there_is_a_better_one(
    two_ranks: Ranks, text: list[str], tmp_path: Path
) -> None:
    """Also if another one is put in place, and old ones removed, while the better one is evaluated."""
    settings = [*text, *LONG, "training.stop_at_step=7", "training.save_steps=5", "training.eval_steps=3", ASYNC]
    two_ranks(
        _lose_the_best,
        str(tmp_path),
        [*settings, "training.load_best_model_at_end=true", "training.save_total_limit=1"],
    )
    assert sorted(path.name[-1] for path in CheckpointManager(tmp_path).list()) == ["3", "7"]


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """The writer of rank 1 is stopped first, so that the second checkpoint is half; the first one is gone on from."""
    settings, output = [*text, *LONG, "training.save_steps=4", ASYNC], tmp_path / "killed"
    process = started(output, settings)
    try:
        wait_for_step(output, 7, lambda: None)
        rank_1 = psutil.Process(pid_of_rank(process.pid, 1))
        while not (writers := rank_1.children()):
            pass
        writers[0].suspend()
        rank_1.kill()
        writers[0].resume()
        shown, _ = process.communicate(timeout=300)
        writers[0].wait(60)
    finally:
        process.kill()
    assert process.returncode != 0, shown
    manager = CheckpointManager(output)
    done = manager.latest()
    assert done is not None and len(list(manager.folder.glob(".tmp-*"))) == 1
    step = read_state(done)["step"]
    more = [*settings, f"training.stop_at_step={step + 2}"]
    assert start(two_ranks, output, [*more, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert manager.latest() == manager.folder / f"step-{step + 2:08d}" and not list(manager.folder.glob(".tmp-*"))
