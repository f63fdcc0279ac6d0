"""Four gloo ranks, or two, in processes that are started once and reused by every test.

A test hands a module-level function to the pool; each rank calls it as `fn(*args)` inside an initialised
process group, and the pool returns the results in rank order:

    def total(x):
        t = torch.tensor(float(dist.get_rank() + x))
        dist.all_reduce(t)
        return t.item()

    def test_total(ranks):
        assert ranks(total, 1) == [10.0] * 4

The fixture `two_ranks` is the same with two, for what four would show no better.

When a rank raises, the others may be stuck in a collective that it will never join: the pool then kills all
of them, starts afresh for the next test, and raises the first traceback here.

Importing PyTorch and transformers takes longer than most tests. So one process imports what the tests import, once,
and the ranks are forked from it: it has computed nothing yet and has no threads.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from typing import Any

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


def _serve(rank: int, world_size: int, port: int, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    gc.freeze()  # what was imported: collections need not look through it, and its memory stays shared
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    if "transformers" in sys.modules:
        from tests.hf.meshes import reuse_meshes

        reuse_meshes()  # each group has threads that wake up a hundred times a second
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(*args, **kwargs)))
        except BaseException:  # the parent shows it; a worker must survive to be told what to do next
            pipe.send((False, traceback.format_exc()))


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

    def _start(self) -> None:
        port = free_port()
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

    def stop(self) -> None:
        for process in self._processes:
            process.kill()  # what it has to tidy up is memory
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(timeout=30)
            pipe.close()
        self._processes, self._pipes = [], []
