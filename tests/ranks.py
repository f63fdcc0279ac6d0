"""Four gloo ranks, or two, in processes that are started once and reused by every test.

A test hands a module-level function to the pool; each rank calls it as `fn(*args)` inside an initialised
process group, and the pool returns the results in rank order:

    def total(x):
        t = torch.tensor(float(dist.get_rank() + x))
        dist.all_reduce(t)
        return t.item()

    def test_total(ranks):
        assert ranks(total, 1) == [10.0] * 4

The fixture `two_ranks` is the same with two, for what four would show no better. A test that has nothing to compare
between ranks runs on each of them as it is:

    @on_ranks("two_ranks")
    def test_total(path):  # a folder that the ranks share, if it takes one
        ...

When a rank raises, the others may be stuck in a collective that it will never join: the pool then kills all
of them, starts afresh for the next test, and raises the first traceback here.

Importing PyTorch and transformers takes longer than most tests. So the ranks are forked from a process that has
imported what the tests import, has computed nothing yet, and has no threads. Where there is no GPU it is itself a fork
of pytest, made when the tests are collected (`fork_server`); CUDA does not survive a fork.

Each device of gloo has a thread that wakes up a hundred times a second, and each process group has a device. So all
groups of a rank share one (`share_device`), and a pool that is not used is stopped until it is called again (`pause`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import inspect
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from carpool.layout.topology import Topology
from carpool.transport import set_topology

WORLD_SIZE = 4


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A device mesh over the ranks; each rank builds a given mesh once, because its groups are costly.

    For transports that need nodes, the ranks of a dimension "ep" lie on two of them, which NVLink joins: GPUs of one
    machine do reach each other."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    made = _mesh(device, shape, names)
    if "ep" in names and made["ep"].size() % 2 == 0:
        ranks = made["ep"].size()
        set_topology(made["ep"].get_group(), Topology(Topology.even(ranks, 2).node_of, (0,) * ranks))
    return made


@functools.cache
def _mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def fork_server(imported: Iterable[str]) -> None:
    """Fork the process that all ranks are forked from. It has what is imported by now, and imports the modules named.

    To be called before anything is computed, in a process without a GPU.
    """

    resource_tracker.ensure_running()
    before = _open_files()

    def fork(_: str, command: Sequence[str], handles: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        # Of the pipes to the server, its own ends alone: it ends when the other ends are closed.
        _become(command[-1], _open_files() - before - {int(one) for one in handles})

    # Where multiprocessing would start a new Python that knows nothing, a fork of this one does the same.
    with mock.patch.object(util, "spawnv_passfds", fork):
        mp.get_context("forkserver").set_forkserver_preload(sorted(imported))
        forkserver.ensure_running()


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _become(program: str, foreign: set[int]) -> NoReturn:
    """Run a program in this process, which was forked, as if it were new. foreign: open files that are not its own."""
    try:
        for handle in foreign:
            with contextlib.suppress(OSError):  # that of the listing itself is closed
                os.close(handle)
        # What pytest captures, without what it has buffered.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        with contextlib.suppress(SystemExit):
            exec(program, {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def share_device() -> None:
    """From now on, all process groups of gloo that this process makes have the same device."""
    device = dist.ProcessGroupGloo.create_default_device()
    make = dist.ProcessGroupGloo.__init__

    def init(group: Any, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        make(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


def _serve(rank: int, world_size: int, port: int, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    gc.freeze()  # what was imported: collections need not look through it, and its memory stays shared
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    share_device()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if "transformers" in sys.modules:
        from tests.hf.meshes import reuse_meshes

        reuse_meshes()
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(*args, **kwargs)))
        except BaseException:  # the parent shows it; a worker must survive to be told what to do next
            pipe.send((False, traceback.format_exc()))


def on_ranks(pool: str = "ranks") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test runs on each rank of this pool, with its parameters and `path`, a folder that they share."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(test).parameters)

        def start(**given: Any) -> None:
            arguments = {name: str(given["tmp_path"]) if name == "path" else given[name] for name in names}
            given[pool](_on_rank, test.__module__, test.__name__, arguments)

        functools.update_wrapper(start, test)
        fixtures = [pool, *("tmp_path" if name == "path" else name for name in names)]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures]
        start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what pytest looks at
        return start

    return decorate


def _on_rank(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


class Ranks:
    """The pool. Call it with a function and its arguments; see the module's docstring.

    imported: names of modules that every rank has imported when it starts. The first pool of a process says it for
    all, because one process imports them.
    """

    def __init__(self, imported: Iterable[str] = (), world_size: int = WORLD_SIZE) -> None:
        self.world_size = world_size
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(sorted(imported))
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._paused = False

    def _start(self) -> None:
        # A port that is free may be taken before a rank listens there; this store listens already.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.world_size, port, theirs, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __call__(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        if not self._processes:
            self._start()
        self._signal(paused=False)
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        results: list[Any] = [None] * self.world_size
        missing = set(range(self.world_size))
        deadline = time.monotonic() + timeout
        while missing:
            ready = wait([self._pipes[r] for r in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(missing)} did not answer within {timeout:.0f} s")
            for rank in [r for r in missing if self._pipes[r] in ready]:
                try:
                    ok, value = self._pipes[rank].recv()
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    self.stop()
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
                missing.discard(rank)
        return results

    def pause(self) -> None:
        """Take no time until the next call."""
        self._signal(paused=True)

    def _signal(self, paused: bool) -> None:
        if self._paused != paused:
            for process in self._processes:
                os.kill(process.pid, signal.SIGSTOP if paused else signal.SIGCONT)
            self._paused = paused

    def stop(self) -> None:
        self._paused = False
        for process in self._processes:
            process.kill()  # what it has to tidy up is memory
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(timeout=30)
            pipe.close()
        self._processes, self._pipes = [], []
