"""Errors name the rank and the node that are lost: of ranks that fall silent, and in a cluster whose cable is cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from carpool.train.launch import roll_call
from carpool.train.launch.roll_call import RanksLostError, RollCall
from tests.train.test_kill import LONG
from tests.train.test_loop import MODEL
from tools.cluster import Cluster, why_not

ROOT = Path(__file__).parents[2]
TIMED_OUT = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 10000ms")


class Ranks:
    """The roll calls of three ranks on two nodes, which share a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
        store, self.ended = dist.HashStore(), dict[int, RanksLostError]()
        self.calls = []
        for rank in range(3):
            monkeypatch.setenv("GROUP_RANK", str(rank // 2))
            monkeypatch.setattr(roll_call.socket, "gethostname", lambda rank=rank: f"gpu{rank // 2}")
            end: Callable[[RanksLostError], Any] = lambda error, rank=rank: self.ended.setdefault(rank, error)  # noqa: E731
            self.calls.append(RollCall(store, rank, 3, timeout, end))
            self.calls[-1].start()

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def ranks_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Ranks]]:
    made: list[Ranks] = []
    monkeypatch.setattr(roll_call, "BEAT_SECONDS", 0.03)
    monkeypatch.setattr(roll_call, "PATIENCE_SECONDS", 0.8)
    monkeypatch.setattr(roll_call, "GRACE_SECONDS", 0.2)

    def make(timeout: float) -> Ranks:
        made.append(Ranks(monkeypatch, timeout))
        made[-1].wait(lambda: all(made[-1].calls[0]._latest) and all(0 in call._where for call in made[-1].calls))
        return made[-1]

    yield make
    for one in made:
        for call in one.calls:
            call.stop()


def test_a_failing_rank_says_who_is_silent(ranks_with: Callable[[float], Ranks]) -> None:
    ranks = ranks_with(60.0)
    said = str(ranks.calls[0].explain(TIMED_OUT))
    assert "all 3 ranks answer (RuntimeError: [/gloo" in said and "the store took" in said
    ranks.calls[2].stop()
    said = str(ranks.calls[0].explain(TIMED_OUT))
    assert said.startswith("rank 2 on node 1 (gpu1) does not answer any more") and "Timed out waiting" in said
    said = str(ranks.calls[1].explain(TIMED_OUT))
    assert said.startswith("rank 2 on node 1 (gpu1) does not answer any more"), "not only rank 0 looks"
    ranks.calls[1].stop()
    assert "rank 1 on node 0 (gpu0) and rank 2 on node 1 (gpu1)" in str(ranks.calls[0].explain(TIMED_OUT))
    assert not ranks.ended


def test_of_many_ranks_the_first_alone_looks(
    ranks_with: Callable[[float], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "MOST_WATCHERS", 2)
    ranks = ranks_with(60.0)
    assert "rank 0 says who does not answer" in str(ranks.calls[1].explain(TIMED_OUT))
    assert not any(ranks.calls[1]._latest), "it reads no other rank's number"
    assert "all 3 ranks answer" in str(ranks.calls[0].explain(TIMED_OUT))


def test_ranks_are_told_who_is_lost_while_they_wait(ranks_with: Callable[[float], Ranks]) -> None:
    """As in a collective of NCCL: no main thread raises anything."""
    ranks = ranks_with(1.0)
    time.sleep(1.5)
    assert not ranks.ended  # longer than the timeout, and all answer
    ranks.calls[2].stop()
    ranks.wait(lambda: {0, 1} <= set(ranks.ended))
    assert all("rank 2 on node 1 (gpu1) does not answer" in str(ranks.ended[rank]) for rank in (0, 1))


def test_a_rank_that_does_not_reach_the_store_ends(ranks_with: Callable[[float], Ranks]) -> None:
    ranks = ranks_with(0.3)

    class Gone:
        def set(self, key: str, value: str) -> None:
            time.sleep(30)

    ranks.calls[2]._store = Gone()  # type: ignore[assignment]
    ranks.wait(lambda: 2 in ranks.ended)
    assert "rank 2 on node 1 (gpu1) has not reached rank 0 on node 0 (gpu0) for" in str(ranks.ended[2])
    assert "that node is gone" in str(ranks.calls[2].explain(TIMED_OUT))


MISSING = why_not()


def process_of(rank: int, folder: Path) -> int:
    """The process of a rank of a run whose settings name a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told, command = (process / "environ").read_bytes().split(b"\0"), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in told and str(folder).encode() in command:
            return int(process.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(MISSING is not None, reason=f"no network namespaces here: {MISSING}")
@pytest.mark.parametrize(
    ("event", "lost", "there"),
    [
        ("cable cut", "rank 2, rank 3 on node 1 (node1) does not answer", "has not reached rank 0 on node 0 (node0)"),
        # The agent ends rank 2, too.
        (signal.SIGKILL, "rank 3 on node 1 (node1) does not answer", "SIGKILL"),
        (signal.SIGSTOP, "rank 3 on node 1 (node1) does not answer", "rank 3 on node 1 (node1) does not answer"),
    ],
    ids=str,
)
def test_lost_in_the_middle_of_a_run(
    text: list[str], tmp_path: Path, event: str | signal.Signals, lost: str, there: str
) -> None:
    output, timeout = tmp_path / "run", 10
    settings = [*MODEL, *text, *LONG, "training.save_steps=none", f"training.output_dir={output}"]
    settings += [f"parallelism.timeout_seconds={timeout}", "moe.transport=hierarchical"]
    train = ["--no-python", sys.executable, "-m", "carpool", "train", *settings]
    with Cluster(2) as cluster:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agents = cluster.torchrun(train, 4, env={"PYTHONPATH": str(ROOT)}, **options)
        deadline = time.monotonic() + 240
        metrics = output / "metrics.jsonl"
        while not (metrics.exists() and '"step": 3,' in metrics.read_text()):
            assert all(agent.poll() is None for agent in agents), agents[0].communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if isinstance(event, str):
            cluster.cut(1)
        else:
            os.kill(process_of(3, output), event)
        began = time.monotonic()
        said = [agent.communicate(timeout=240)[0] for agent in agents]
        took = time.monotonic() - began
    assert [agent.returncode != 0 for agent in agents] == [True, True]
    assert lost in said[0], said[0]
    assert there in said[1], said[1]
    assert took < timeout + 60  # torchrun's agents take their time, too
