"""Sparse snapshots: what is in them, and recovery that is bit by bit the run that nothing stopped."""

from __future__ import annotations

import json
import shutil
import threading
import unittest.mock
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from carpool.train.checkpoints import memory_files
from carpool.train.checkpoints.checkpoint_files import read_state
from carpool.train.checkpoints.host_copy import copy_files
from carpool.train.checkpoints.shard_files import Piece, ShardFile
from carpool.train.config import load_config
from carpool.train.run import loop
from carpool.train.run.run import train
from carpool_systems import sparse_snapshots
from carpool_systems.sparse_snapshots import SnapshotFiles, choose_window, operators
from tests.ranks import Ranks
from tests.train.test_kill import LONG
from tests.train.test_loop import MODEL, losses, start

STEPS = 9
LAYOUTS = {
    "ep": (),
    "fsdp, replicated experts": ("parallelism.ep_size=1", "parallelism.data_parallel=fsdp"),
    "masters, moments of 8 bits, consumed": (
        "model.dtype=bfloat16", "training.optimizer=one-pass", "training.optimizer_state_dtype=int8",
        "training.optimizer_in_backward=true", "training.max_grad_norm=0",
    ),
    "muon": ("training.optimizer=muon",),
}  # fmt: skip


def fail(output: str, settings: list[str], memory: str, fails: int | None) -> str:
    """On a rank: train, and fail when the numbers of a step are recorded; what was raised. {} in `memory`: the rank."""
    record_step, said, memory = loop.record_step, "", memory.format(dist.get_rank())
    Path(memory).mkdir(exist_ok=True)

    def recorded(run: Any, numbers: Any) -> None:
        record_step(run, numbers)
        if numbers.step == fails:
            raise RuntimeError("a fault")

    with (
        unittest.mock.patch.object(memory_files, "MEMORY", Path(memory)),
        unittest.mock.patch.object(loop, "record_step", recorded),
    ):
        try:
            train(load_config(None, [*MODEL, *settings, f"training.output_dir={output}"]))
        except RuntimeError as error:
            said = str(error)
    # A rank that fails ends, and this one does not: what its thread still sends and receives is not for later tests.
    for thread in threading.enumerate():
        if thread.name == "carpool-snapshot":
            thread.join()
    return said


def first_again(folder: Path) -> int:
    """The first step that was recorded more than once. None is missing."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = Counter(line["step"] for line in lines if line["kind"] == "train")
    assert sorted(steps) == list(range(1, max(steps) + 1))
    return min(step for step, times in steps.items() if times > 1)


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        ("ep", 3),
        ("masters, moments of 8 bits, consumed", 2),
        ("ep", 1),
        pytest.param("muon", 3, marks=pytest.mark.slow),
        pytest.param("fsdp, replicated experts", 4, marks=pytest.mark.slow),
    ],
)
def test_recovery_is_the_run_that_nothing_stopped(
    two_ranks: Ranks, text: list[str], tmp_path: Path, layout: str, window: int
) -> None:
    """Checkpoints of the last step are the same files. The fault comes while step 9 computes, and there is no
    checkpoint: all comes from snapshots. A second fault comes in the middle of the steps that are repeated."""
    settings = [*text, *LONG, *LAYOUTS[layout], f"training.stop_at_step={STEPS}", "training.save_steps=none"]
    assert start(two_ranks, tmp_path / "whole", settings) == [""] * 2
    run, memory = str(tmp_path / "run"), str(tmp_path / "memory")
    mine = [*settings, f"snapshots.window={window}", "training.resume_from_checkpoint=auto"]
    assert two_ranks(fail, run, mine, memory, 8) == ["a fault"] * 2
    first = {3: 4, 2: 5, 1: 7, 4: 1}[window]  # the newest window that is whole after step 7
    left = sorted(int(path.stem[5:]) for path in Path(memory).glob("*/*/rank-00001/step-*"))
    assert left == list(range(max(1, 7 - 2 * window), 8))
    if window > 2:
        assert two_ranks(fail, run, mine, memory, first + 1) == ["a fault"] * 2
    assert two_ranks(fail, run, mine, memory, None) == [""] * 2
    assert first_again(tmp_path / "run") == first + 1 and losses(tmp_path / "run") == losses(tmp_path / "whole")
    states = [read_state(tmp_path / one / f"checkpoints/step-{STEPS:08d}") for one in ("whole", "run")]
    assert states[0]["files"] == states[1]["files"] and states[0]["ranks"] == states[1]["ranks"]
    assert states[0]["state"] == states[1]["state"]
    assert not list(Path(memory).glob("*/*"))  # the run came to its end


def test_steps_that_are_repeated_write_no_checkpoint(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Step 5 is the best so far, and saved; then steps 5 and 6 are repeated. Its checkpoint stays that of a whole
    state."""
    run, memory = tmp_path / "run", str(tmp_path / "memory")
    best = ["training.eval_steps=5", "training.load_best_model_at_end=true", "training.save_steps=none"]
    settings = [*text, *LONG, *best, "snapshots.window=3", "training.resume_from_checkpoint=auto"]
    assert two_ranks(fail, str(run), settings, memory, 8) == ["a fault"] * 2
    saved = run / "checkpoints/step-00000005/state.json"
    before = saved.read_text()
    assert two_ranks(fail, str(run), settings, memory, 6) == ["a fault"] * 2
    assert saved.read_text() == before


@pytest.mark.parametrize("kept", ["snapshots.window=1", "copies.fewest=1"])
def test_a_run_whose_folder_was_emptied_begins_again(
    two_ranks: Ranks, text: list[str], tmp_path: Path, kept: str
) -> None:
    """The folder itself is there: agents of an elastic run make it, and it may be where a disk is mounted."""
    run, memory = tmp_path / "run", str(tmp_path / "memory")
    settings = [*text, *LONG, "training.save_steps=none", "training.resume_from_checkpoint=auto", kept]
    assert two_ranks(fail, str(run), settings, memory, 5) == ["a fault"] * 2
    shutil.rmtree(run)
    run.mkdir()
    assert two_ranks(fail, str(run), settings, memory, 3) == ["a fault"] * 2
    assert min(losses(run)) == 1


def test_another_mesh_begins_again(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Ranks have other parts of tensors, so that no snapshot fits; none is left beside those of the new mesh."""
    run, memory = tmp_path / "run", str(tmp_path / "memory")
    few = ["training.stop_at_step=8", "training.save_steps=none"]
    settings = [*text, *LONG, *few, "snapshots.window=2", "training.resume_from_checkpoint=auto"]
    assert two_ranks(fail, str(run), settings, memory, 6) == ["a fault"] * 2
    other = [*settings, *LAYOUTS["fsdp, replicated experts"]]
    assert two_ranks(fail, str(run), other, memory, 3) == ["a fault"] * 2
    assert first_again(run) == 1
    assert [path.name[11:13] for path in sorted(Path(memory).glob("*/*/rank-00000/step-*"))] == ["01", "02"]


def _in_little_memory(output: str, settings: list[str], memory: str) -> str:
    little = unittest.mock.Mock(f_bavail=1, f_frsize=4096)
    with (
        unittest.mock.patch.object(memory_files.os, "statvfs", return_value=little),
        pytest.raises(ValueError) as e,
    ):
        fail(output, settings, memory, None)
    return str(e.value)


def test_memory_that_is_too_small(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings, memory = [*text, *LONG, "snapshots.window=3"], str(tmp_path / "memory")
    for said in two_ranks(_in_little_memory, str(tmp_path / "run"), settings, memory):
        assert "steps need 0.0" in said and "GB are free: enlarge it" in said


def test_a_node_that_was_replaced_gets_its_snapshots_from_its_peer(
    two_ranks: Ranks, text: list[str], tmp_path: Path
) -> None:
    """Two nodes of one rank. The memory of one is lost with all that was there but what the other sent."""
    settings = [
        *text,
        *LONG,
        f"training.stop_at_step={STEPS}",
        "training.save_steps=none",
        "parallelism.ranks_per_node=1",
    ]
    assert start(two_ranks, tmp_path / "whole", settings) == [""] * 2
    run, memory = str(tmp_path / "run"), str(tmp_path / "memory")
    mine = [*settings, "snapshots.window=3", "training.resume_from_checkpoint=auto"]
    assert two_ranks(fail, run, mine, memory, 8) == ["a fault"] * 2
    (home,) = Path(memory).glob("*/*")
    shutil.rmtree(home / "rank-00001")  # and what its node kept of rank 0
    shutil.rmtree(home / "of-peers/rank-00000")
    assert two_ranks(fail, run, mine, memory, None) == [""] * 2
    assert first_again(tmp_path / "run") == 5 and losses(tmp_path / "run") == losses(tmp_path / "whole")
    states = [read_state(tmp_path / one / f"checkpoints/step-{STEPS:08d}") for one in ("whole", "run")]
    assert states[0]["files"] == states[1]["files"] and states[0]["ranks"] == states[1]["ranks"]


def test_operators_are_divided_among_the_steps_of_a_window() -> None:
    sizes = {"experts": (800, 4, True), "embedding": (600, 60, False), "norm": (6, 6, False), "head": (594, 60, False)}
    for window in (1, 2, 3, 5):
        found = operators(sizes, window)
        for name, (_, rows, _) in sizes.items():
            covered = [row for one in found if one.name == name for row in range(one.first, one.stop)]
            assert sorted(covered) == list(range(rows))
        assert {one.position for one in found} == set(range(window))
    assert [(one.first, one.stop) for one in operators(sizes, 3) if one.name == "experts"] == [(0, 1), (1, 2), (2, 4)]
    apart = {one.name: one.position for one in operators(sizes, 2) if one.name != "experts"}
    assert apart["embedding"] != apart["head"] == apart["norm"]


def test_the_shortest_window_that_hides_its_copies() -> None:
    """6 bytes of state and 2 of weights a parameter, at 10 bytes a second; half of a step may be taken."""
    assert choose_window(60, 20, 10.0, 12.0) == 1
    assert choose_window(60, 20, 10.0, 8.0) == 2  # (60 + 20) / 2 = 40 = 10 * 8 / 2
    assert choose_window(60, 20, 10.0, 5.4) == 6  # (60 + 80) / 5 = 28 are too much for 27 bytes
    assert choose_window(60, 20, 10.0, 0.1) == sparse_snapshots.MOST_STEPS


def test_files_of_runs_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "MEMORY", tmp_path / "memory")
    runs = [tmp_path / name for name in ("there", "gone", "new")]
    for run in runs:
        run.mkdir()
    files = [SnapshotFiles(run, torch.device("cpu")) for run in runs]
    for one in files[:2]:
        one.folder.mkdir(parents=True)
        (one.folder.parent / "run").write_text(str(runs[files.index(one)]))
    shutil.rmtree(runs[1])
    files[2].clean(everything=False)
    assert files[0].folder.is_dir() and not files[1].folder.parent.exists()
    files[0].clean(everything=True)
    assert not files[0].folder.exists()


def test_a_file_is_of_the_size_that_is_asked_for(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3)
    for size in (4096, 4097, 10_000, 99_999, 100_064):
        file = ShardFile.of([Piece("a", (0, 0), tensor)], {"snapshot": "x"}, size)
        assert file.bytes == size
        (tmp_path / "a").write_bytes(file.header + bytes(file.bytes - len(file.header)))
        assert load_file(tmp_path / "a")["a"].shape == (7, 3)


def test_steps_that_come_again_are_not_mixed_with_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback to step 3, snapshots of steps 5 and 6 are of weights that are no more."""
    monkeypatch.setattr(memory_files, "MEMORY", tmp_path)
    files, about = SnapshotFiles(tmp_path / "run", torch.device("cpu")), '{"window": 2, "layout": "x"}'
    for step in (1, 2, 3, 4, 5, 6, 4):
        values = torch.full((5,), float(step))
        buffer = files.turn(step, 4, 4096)
        copy_files({"": ShardFile.of([Piece("a", (0,), values)], {"snapshot": about}, 4096)}, buffer, None)
        files.name(step, buffer)
    assert files.steps() == {3: (2, "x", 4096), 4: (2, "x", 4096)}
    assert load_file(files.path(3))["a"].eq(3).all() and load_file(files.path(4))["a"].eq(4).all()
