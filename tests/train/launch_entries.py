"""What ranks do in the tests of launching; a module of its own, because ranks import it by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from carpool.train.config import Config
from carpool.train.launch.stopping import Stopped, StopRequest


def report_in(config: Config, folder: str, word: str) -> None:
    """Each rank writes what it finds, after an exchange in which all took part."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    line = [dist.get_rank(), dist.get_world_size(), int(total), word, config.training.max_steps, dist.get_backend()]
    line += [os.environ["LOCAL_RANK"], os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()]
    Path(folder, f"rank{dist.get_rank()}").write_text(repr(line))
    print(f"rank {dist.get_rank()} speaks")


def exchange_forever(config: Config, folder: str) -> None:
    """Collectives without end; each rank leaves its process id."""
    step = 0
    while True:
        dist.all_reduce(torch.ones(1))
        step += 1
        if step == 3:
            leave(folder, "pid", os.getpid())
        time.sleep(0.005)


def leave(folder: str, name: str, number: int) -> None:
    """A file of this rank, which a test may be waiting for: it has its number as soon as it is there."""
    whole = Path(folder, f"{name}{dist.get_rank()}")
    part = whole.with_name(f"part-{whole.name}")
    part.write_text(str(number))
    part.replace(whole)


def until_asked(config: Config, folder: str, word: str = "") -> None:
    """Reports in, then takes steps until all agree that one of them was asked to stop. With a word, none does."""
    report_in(config, folder, word)
    asked = False
    with StopRequest() as stop:
        step = 0
        while True:
            step += 1
            signum = torch.tensor(stop.signum)
            dist.all_reduce(signum, op=dist.ReduceOp.MAX)
            if step == 3:
                leave(folder, "pid", os.getpid())
            if signum and not asked:
                asked = True
                leave(folder, "asked", step)
            if signum and not word:
                dist.barrier()
                raise Stopped(f"stopped by signal {int(signum)}")
            time.sleep(0.005)


def fail(config: Config, folder: str, rank: int, how: str) -> None:
    """One rank fails in its own way, the others are in a collective that it never joins."""
    leave(folder, "pid", os.getpid())
    dist.barrier()
    if dist.get_rank() != rank:
        while True:
            dist.all_reduce(torch.ones(1))
    if how == "bug":
        raise RuntimeError("a bug of our own")
    print("last words", file=sys.stderr, flush=True)
    signal.raise_signal(signal.SIGSEGV)
