"""Elastic runs: agents of one rank each that die, stand still and come back; the steps are those of a whole run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from carpool.train.config import Config, load_config
from carpool.train.data.loader import TrainLoader
from carpool.train.data.sequences import Stream
from carpool.train.launch import regroup
from carpool.train.launch.elastic import _Agent, parse_agents
from carpool.train.launch.failure import record_error
from carpool.train.launch.regroup import check_groups, regrouped
from carpool.train.launch.stopping import EXIT_STOPPED
from carpool.train.records import run_folder
from carpool.train.records.run_folder import METRICS
from carpool.train.run.finish import UnwrittenError
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, start

ROOT = Path(__file__).parents[2]
PATIENCE = 600
# A step of 8 sequences: 3 ranks share 2 micro-batches of 4.
RUN = [
    *MODEL, "parallelism.device=cpu", "parallelism.num_ranks=4", "training.max_steps=100000", "training.save_steps=10",
    "training.eval_steps=none", "model.config.router_aux_loss_coef=0.0",
]  # fmt: skip


class Agents:
    """The agents of one run, by number."""

    def __init__(self, settings: list[str], folder: Path) -> None:
        self.command = [sys.executable, "-m", "carpool", "train", "--elastic", "2:4", *RUN, *settings]
        self.command.append(f"training.output_dir={folder / 'run'}")
        self.folder, self.run, self.agents = folder, folder / "run", dict[int, subprocess.Popen[bytes]]()

    def start(self, number: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / f"agent{number}.log").open("ab") as log:
            self.agents[number] = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=ROOT, env=env)

    def kill(self, number: int) -> None:
        """As a node that is gone: the agent, and with it its rank."""
        self.agents.pop(number).kill()

    def rank_of(self, number: int) -> psutil.Process:
        """The rank of an agent."""
        children = psutil.Process(self.agents[number].pid).children()
        return next(one for one in children if "carpool.train.launch.worker" in one.cmdline())

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("agent*.log")))

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in found if one["kind"] == kind]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            ended = {number: one.returncode for number, one in self.agents.items() if one.poll() not in (None, 0)}
            assert time.monotonic() < end and not ended, f"{what}: {ended}\n{self.said()}"
            time.sleep(0.5)

    def ranks_of_groups(self) -> list[int]:
        """Of those that have gone on from another."""
        return [one["ranks"] for one in self.records("recovery")]

    def step(self) -> int:
        return max((one["step"] for one in self.records("train")), default=0)


@contextmanager
def agents(settings: list[str], folder: Path) -> Iterator[Agents]:
    made = Agents(settings, folder)
    for number in range(4):
        made.start(number)
    try:
        yield made
    finally:
        for one in made.agents.values():
            one.kill()


def settings_of(ranks: int, *settings: str) -> Config:
    return load_config(None, ["parallelism.device=cpu", f"parallelism.num_ranks={ranks}", *settings])


@pytest.mark.parametrize(
    ("full", "ranks", "settings", "found"),
    [
        # used, micro-batches, sequences of a rank and of all, dp_replicate, ep
        (4, 3, ["training.per_device_train_batch_size=4"], (3, 2, 3, 8, 1, None)),
        (4, 3, ["training.per_device_train_batch_size=3"], (3, 2, 2, None, 1, None)),
        # A rank would need more memory than before; two do not.
        (4, 3, ["training.per_device_train_batch_size=1"], (2, 2, 1, None, 1, None)),
        # The backward updates: there cannot be two micro-batches.
        (4, 3, ["training.per_device_train_batch_size=3", "training.optimizer=one-pass", "training.max_grad_norm=0",
                "training.optimizer_in_backward=true"], (3, 1, 4, None, 1, None)),
        (8, 7, ["parallelism.tp_size=2", "parallelism.ep_size=2"], (6, 2, 8, None, 1, 2)),
        (8, 6, ["parallelism.dp_replicate_size=2", "parallelism.ep_size=4"], (6, 2, 8, None, 2, None)),
        (8, 3, ["parallelism.dp_replicate_size=2", "parallelism.ep_size=4"], (3, 3, 11, 32, 1, None)),
        # The planner divides a step equally.
        (4, 3, ["training.per_device_train_batch_size=2", "parallelism.plan=auto"], (2, 2, 2, None, 1, None)),
    ],
)  # fmt: skip
def test_the_mesh_of_a_smaller_group(full: int, ranks: int, settings: list[str], found: tuple[Any, ...]) -> None:
    config, used = regrouped(settings_of(full, *settings), full, ranks)
    training, section = config.training, config.parallelism
    assert found == (
        used, training.gradient_accumulation_steps, training.per_device_train_batch_size,
        training.micro_batch_sequences, section.dp_replicate_size, section.ep_size,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_smaller_group_takes_the_same_steps(ranks: int) -> None:
    """The sequences of each step, over all ranks, and where the run goes on from another number of ranks."""
    full = settings_of(4, *MODEL)
    sequences = Stream(np.arange(2000, dtype=np.uint16), 8, "f")

    def steps(config: Config, used: int, count: int, state: dict[str, Any] | None = None) -> tuple[list[Any], Any]:
        training = config.training
        sizes = config.batch_sizes(config.parallelism.resolve(used, 8))
        loaders = [
            TrainLoader(
                sequences, batch_size=training.per_device_train_batch_size, dp_rank=rank, dp_size=used, shares=sizes,
                accumulation=training.gradient_accumulation_steps, seed=5,
            )
            for rank in range(used)
        ]  # fmt: skip
        found = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(count):
            batches = [batch for loader in loaders for batch in next(loader)]
            found.append(sorted(tuple(row) for batch in batches for row in batch["input_ids"].tolist()))
        return found, loaders[0].state_dict()

    expected, _ = steps(full, 4, 60)
    first, state = steps(full, 4, 25)
    smaller, used = regrouped(full, 4, ranks)
    second, state = steps(smaller, used, 20, state)
    third, _ = steps(full, 4, 15, state)
    assert used == ranks and [*first, *second, *third] == expected


def test_settings_that_no_smaller_group_has() -> None:
    assert parse_agents("2:4") == (2, 4) and parse_agents("3") == (3, 3)
    for wrong in ("4:2", "0:2", "a:b", "2:"):
        with pytest.raises(ValueError, match="fewest and the most"):
            parse_agents(wrong) if wrong != "2:" else parse_agents("2:x")
    with pytest.raises(ValueError, match="let --elastic begin with more agents"):
        check_groups(settings_of(4, "parallelism.tp_size=4", "parallelism.ep_size=4"), 4, 2, 1)
    with pytest.raises(ValueError, match=r"parallelism\.rank_speeds is of one number of ranks"):
        check_groups(settings_of(2, "parallelism.rank_speeds=[1, 2]"), 2, 1, 1)
    check_groups(settings_of(4), 4, 1, 1)


def test_a_new_group_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So long, and then for the next group; where nothing was trained yet, a person has to look."""
    looks = iter(["no space", "no space", None, "no space"])
    monkeypatch.setattr(run_folder, "why_not_writable", lambda folder: next(looks))
    monkeypatch.setattr(regroup, "_IDLE_SECONDS", 0.01)
    regroup._wait_for_folder(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    regroup._wait_for_folder(tmp_path)
    monkeypatch.setattr(regroup, "_FOLDER_SECONDS", 0.0)
    with pytest.raises(regroup.RegroupError, match="no space"):
        regroup._wait_for_folder(tmp_path)


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (OSError("no space"), True),
        (ConnectionResetError("gone"), True),
        (UnwrittenError("the end"), False),
        (ValueError("num_experts"), False),
    ],
)
def test_which_errors_end_an_elastic_run(tmp_path: Path, error: Exception, goes_on: bool) -> None:
    path = tmp_path / "error.json"
    with mock.patch.dict(os.environ, TORCHELASTIC_ERROR_FILE=str(path)):
        record_error(error)
    agent = _Agent.__new__(_Agent)
    agent._config, agent._reached, agent._failed = settings_of(4, f"training.output_dir={tmp_path}"), (None, 0), 0
    agent._worker_group = SimpleNamespace(spec=SimpleNamespace(max_restarts=1))  # type: ignore[assignment]
    agent._judge({0: ProcessFailure(0, os.getpid(), 1, str(path))})
    assert agent._remaining_restarts == int(goes_on)
    # The eleventh failure in a row ends it, unless a group went on from a later step: there is no checkpoint.
    for failed, (from_step, restarts) in enumerate(
        [(0, 1)] * 9 + [(5, 1)] + [(5, 1)] * 9 + [(5, 0)] if goes_on else []
    ):
        line = {"kind": "recovery", "step": from_step + 1, "from_step": from_step}
        (tmp_path / METRICS).write_text(json.dumps(line) + "\n" + '{"kind": "recovery", "st')
        agent._judge({0: ProcessFailure(0, os.getpid(), 1, str(path))})
        assert agent._remaining_restarts == restarts, failed


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_four_agents_lose_one_and_go_on(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """An agent is killed, and its rank with it; then a rank whose agent lives; then the first agent comes back."""
    # On two ranks a step has as many tokens.
    two = ["parallelism.num_ranks=2", "training.per_device_train_batch_size=4", "training.stop_at_step=40"]
    assert start(two_ranks, tmp_path / "whole", [*RUN, *text, *two]) == [""] * 2
    with agents(text, tmp_path) as run:
        run.wait(lambda: run.step() > 12, "four agents train")
        run.kill(0)
        # On a busy machine the third may come after the others have formed a group.
        run.wait(lambda: run.ranks_of_groups()[-1:] == [3], "three agents go on")
        first = run.records("recovery")[0]
        assert first["ranks"] in (2, 3) and first["from_step"] >= 10, first
        # 10 s on two idle cores.
        assert first["regroup"] + first["load"] + first["first_step"] <= 40, first
        before = len(run.ranks_of_groups())
        run.rank_of(1).kill()
        run.wait(lambda: len(run.ranks_of_groups()) > before, "a rank starts again")
        run.start(0)
        run.wait(lambda: run.ranks_of_groups()[-1] == 4, "an agent comes back")
        # Nothing is done again where an agent comes.
        back = run.records("recovery")[-1]
        assert run.records("checkpoint")[-1]["step"] >= back["from_step"] > 10
        run.wait(lambda: run.step() > 40, "four agents train")
        run.agents[1].send_signal(signal.SIGTERM)
        for one in run.agents.values():
            assert one.wait(PATIENCE) == EXIT_STOPPED, run.said()
        found, whole = losses(run.run), losses(tmp_path / "whole")
        # Of all tokens of each step, in another order of sums.
        assert all(found[step] == pytest.approx(whole[step], rel=2e-3) for step in whole), (found, whole)
        assert max(found) == run.records("checkpoint")[-1]["step"]
