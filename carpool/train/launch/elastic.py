"""Elastic runs: agents that come and go, on PyTorch's elastic agent and rendezvous.

    carpool train --elastic 2:4 ...          the same command on each node; the folder of the run is shared

Each command is an agent with the ranks of its node. Between 2 and 4 agents form a group, which trains.

    what happens                      what follows
    a rank dies                       its agent lives: a new group forms with the same agents
    an agent, or its node, dies       the other ranks leave, and a new group forms with the agents that are left
    an agent comes (back)             the group saves, and a new one forms with it; beyond the maximum it waits
    a rank stands still               the others miss it after 15 s (`roll_call`), and leave
    SIGTERM or SIGUSR1 to an agent    all ranks save, and all agents end (`stopping`)
    an error that only a person can   the run ends on all agents
    put right; `RESTARTS` failures

A new group plans its mesh anew (`regroup`) and goes on from the newest state (`find_checkpoint`, in
`carpool.train.plan.start_checks`), with the batches that were to come.

Agents meet in a store that one of them has. Whoever holds the lock of `RUN/.rendezvous` has it; when that agent dies,
the kernel lets go of the lock, and another one takes its place. So no agent is needed more than others.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from carpool.train.launch.failure import first_cause, is_consequence, progress, recorded, what_happened
from carpool.train.launch.regroup import FORMED
from carpool.train.launch.stopping import DONE, Stopped
from carpool.train.records.run_folder import METRICS

if TYPE_CHECKING:
    from carpool.train.config import Config

# Failures in a row, without `progress`, after which a run ends.
RESTARTS = 10
# An agent that is silent for their product has left.
_BEAT_SECONDS, _BEATS = 1, 8
# Enough agents wait so long for more: of a run that begins, and later.
_FIRST_CALL_SECONDS, _LAST_CALL_SECONDS = 30, 3
_STORE_SECONDS, _JOIN_SECONDS = 20, 7 * 24 * 3600
# Ranks that are told to leave have nothing to write, and those that stand still do not hear it.
_LEAVE_SECONDS = 3
_POLL_SECONDS = 0.2
# What a store that is gone looks like.
_STORE_GONE = (RendezvousConnectionError, RendezvousStateError, dist.DistNetworkError, dist.DistStoreError)


def parse_agents(text: str) -> tuple[int, int]:
    """`2:4` -> (2, 4). Raises ValueError for anything else, but for one number, which is both."""
    fewest, _, most = text.partition(":")
    if not (fewest.isdecimal() and (most or fewest).isdecimal() and 0 < int(fewest) <= int(most or fewest)):
        raise ValueError(f"--elastic {text}: give the fewest and the most agents, such as 2:4")
    return int(fewest), int(most or fewest)


class _Agent(LocalElasticAgent):
    """An agent that tells failures that another attempt may get over from those that none will.

    Args:
        listeners: the folder in which ranks say that they listen to signals.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, config: Config, listeners: Path) -> None:
        super().__init__(spec, logs)
        self._config, self._listeners = config, listeners
        self._reached, self._failed = progress(config), 0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Agents that are started by hand come one after the other.
        wait = _LAST_CALL_SECONDS if (self._config.training.folder / METRICS).exists() else _FIRST_CALL_SECONDS
        handler: Any = worker_group.spec.rdzv_handler
        handler.settings.timeout._set_timeouts(last_call=timedelta(seconds=wait))
        while True:
            super()._rendezvous(worker_group)
            # An agent that was silent for too long at that moment is in the group for some, and not for others.
            group = repr(sorted(map(repr, self._agents)))
            store: Any = worker_group.store
            agreed = store.compare_set("carpool/agents", "", group).decode() == group
            if agreed and worker_group.group_world_size >= handler.settings.min_nodes:
                break
            _say("the agents do not agree on who is there, and meet again")
        os.environ[FORMED] = str(time.time())
        ranks = [worker.global_rank for worker in worker_group.workers]
        _say(
            f"a group of {worker_group.group_world_size} agents and {worker_group.workers[0].world_size} ranks has "
            f"formed; here are ranks {ranks[0]} to {ranks[-1]}"
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for path in self._listeners.iterdir():
            path.unlink()
        found: dict[int, Any] = super()._start_workers(worker_group)
        return found

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _LEAVE_SECONDS) -> None:
        super()._shutdown(death_sig, min(timeout, _LEAVE_SECONDS))

    @property
    def _agents(self) -> Collection[object]:
        """Those of the group that have not left it, as this agent knows."""
        handler: Any = self._worker_group.spec.rdzv_handler
        found: Collection[object] = handler._state_holder.state.participants
        return found

    def _lost_agents(self) -> bool:
        """Whether an agent has left the group, or is silent. Its ranks are gone, or others wait for them in vain."""
        self._worker_group.spec.rdzv_handler.num_nodes_waiting()  # which looks
        return len(self._agents) < (self._worker_group.group_world_size or 0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._judge(result.failures)
        elif result.state == WorkerState.HEALTHY and self._lost_agents():
            _say("an agent has left; the ranks here leave for a new group")
            self._remaining_restarts = worker_group.spec.max_restarts
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _exit_barrier(self) -> None:
        """Until the ranks of all agents have ended: rank 0 may still write what is written at the end."""
        store: Any = self._store
        with suppress(*_STORE_GONE):
            store.add("carpool/ended", 1)
            while store.add("carpool/ended", 0) < (self._worker_group.group_world_size or 0):
                if self._lost_agents():
                    return
                time.sleep(_POLL_SECONDS)

    def _judge(self, failures: dict[int, ProcessFailure]) -> None:
        """Whether there is another attempt; says why there is one."""
        rank = first_cause(failures)
        cause, failure, reached = recorded(failures[rank]), failures[rank], progress(self._config)
        self._failed = 1 if reached != self._reached else self._failed + 1
        self._reached = reached
        stopped = cause.get("type") == Stopped.__name__
        # Ranks that were asked to save, so that the agents that wait may join.
        joins = stopped and self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
        # A disk that is full now takes files again later; that a run could not write its end is another error.
        final = bool(cause.get("user_error")) and cause["type"] != OSError.__name__
        ends = (stopped and not joins) or final or self._failed > RESTARTS
        self._remaining_restarts = 0 if ends else self._worker_group.spec.max_restarts
        if not ends and not joins:
            lost = bool(cause) and is_consequence(cause["type"], cause["text"])
            what = "lost the connection to another rank" if lost else what_happened(failure)
            _say(f"rank {rank} (pid {failure.pid}) {what}; the ranks here leave for a new group")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            _say("the group changes; the ranks here save and leave for a new one")
            pids = [int(path.name) for path in self._listeners.iterdir() if path.suffix != DONE]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            # Where another agent has left, there is nobody to save with.
            while pids and super()._monitor_workers(worker_group).state == WorkerState.HEALTHY:
                if self._lost_agents():
                    break
                time.sleep(_POLL_SECONDS)
        super()._restart_workers(worker_group)


def launch(launch_config: LaunchConfig, config: Config, command: list[str], listeners: Path) -> None:
    """Run `command` as the ranks of this agent, in one group after another, until the run has ended.

    Args:
        launch_config: with the fewest and the most agents as `min_nodes` and `max_nodes`.
        config, listeners: as for `_Agent`.

    Raises:
        ChildFailedError: a rank of this agent failed, and no other attempt is made.
        SignalException: a signal ended this agent; the others go on.
        RendezvousClosedError: another agent has ended the run."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # an agent's own store outlives the group that it was for

    while True:
        with _meeting_place(config.training.folder) as endpoint:
            try:
                return _attend(launch_config, endpoint, config, command, listeners)
            except _STORE_GONE as error:
                last = (str(error).strip().splitlines() or [type(error).__name__])[0]
                _say(f"the agent with the store of the rendezvous has gone ({last[:120]}); another one takes its place")


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)


def _attend(about: LaunchConfig, endpoint: str, config: Config, command: list[str], listeners: Path) -> None:
    """`launch`, with one store: as PyTorch's `launch_agent`, with `_Agent`."""
    parameters = RendezvousParameters(
        "c10d", endpoint, about.run_id, about.min_nodes, about.max_nodes, local_addr=about.local_addr,
        is_host="0", read_timeout=_STORE_SECONDS, join_timeout=_JOIN_SECONDS, last_call_timeout=_LAST_CALL_SECONDS,
        keep_alive_interval=_BEAT_SECONDS, keep_alive_max_attempt=_BEATS,
    )  # fmt: skip
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="default", local_world_size=about.nproc_per_node, entrypoint=sys.executable, args=tuple(command),
        rdzv_handler=handler, max_restarts=1, monitor_interval=about.monitor_interval, local_addr=about.local_addr,
    )  # fmt: skip
    assert about.logs_specs is not None
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = about.signals_to_handle
    result = _Agent(spec, about.logs_specs, config, listeners).run()
    # Agents that wait for others would wait in vain. Who was stopped by a signal leaves them alone.
    with suppress(*_STORE_GONE):
        handler.shutdown()
    if result is None:
        raise RendezvousClosedError("the run has ended without this agent")
    if result.is_failed():
        raise ChildFailedError("carpool train", result.failures)


@contextmanager
def _meeting_place(folder: Path) -> Iterator[str]:
    """HOST:PORT of the store where agents meet: of this process, if no other agent has one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".rendezvous"
    with path.open("a+") as file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                raise ValueError(
                    f"{path} cannot be locked ({error.strerror}), and agents of --elastic meet there: put "
                    "training.output_dir on a file system with locks, or start `carpool train --elastic` under "
                    "torchrun with --rdzv-endpoint"
                ) from error
            endpoint = path.read_text().strip()
            if _answers(endpoint):
                yield endpoint
                return
            if not waited:
                _say("waiting for the agent that has the store of the rendezvous")
            waited = True
            time.sleep(_POLL_SECONDS)
        store = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_SECONDS)
        )
        while True:
            file.truncate(0)
            try:
                os.write(file.fileno(), f"{own_address()}:{store.port}\n".encode())
                break
            except OSError as full:
                _say(f"{path} cannot be written ({full.strerror}); trying again")
                time.sleep(1.0)
        yield f"127.0.0.1:{store.port}"


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False


def own_address() -> str:
    """By which other nodes reach this one; this machine's own where its name means nothing."""
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
