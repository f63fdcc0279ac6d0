"""Work that succeeds on all ranks or fails on all of them, with the same error.

A rank that raises alone leaves the others waiting in the next collective, until a timeout ends them with a message
about the timeout. So each rank does its work, then all tell all how it went, and then all raise or none does.
"""

from __future__ import annotations

import errno
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
# Seconds between two looks at how many ranks are done.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
FREE_SPACE = "free some space"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of the group, in their order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank_0(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank: for what may change while ranks look at it. Collective.

    Raises:
        ValueError: what it raised, on every rank alike.
    """
    made: Any = None
    error: Exception | None = None
    if rank() == 0:
        try:
            made = make()
        except Exception as failed:
            error = failed
    found, problem = gather((made, None if error is None else describe(error)))[0]
    if problem is not None:
        raise ValueError(problem) from error
    return found  # type: ignore[no-any-return]


@contextmanager
def together(error_class: Callable[[str], Exception], doing: str, disk_full: str = FREE_SPACE) -> Iterator[None]:
    """A piece of work that either succeeds on all ranks, or raises the same error on all of them.

    Every rank must enter it. What it does before the end may differ between ranks, as long as a rank that fails leaves
    no other waiting for it in a collective. `disk_full` as of `describe`.
    """
    local: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # DCP's is not an Exception
        local = error
    reports = gather(None if local is None else describe(local, disk_full))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed:
        # The same words from everybody are one problem of the run, not of a rank.
        same = len(failed) == len(reports) and len(set(failed.values())) == 1
        texts = [reports[0]] if same else [f"rank {rank}: {report}" for rank, report in failed.items()]
        raise error_class(f"{doing}{'; '.join(map(str, texts))}") from local
    if local is not None:
        raise error_class(f"{doing}{local}") from local


@contextmanager
def patiently() -> Iterator[None]:
    """What ranks do inside may take longer than a collective, whose timeout ends those that wait: all leave together,
    whenever the last one is done. Who dies meanwhile is missed by the roll call. Collective."""
    if world() == 1:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"carpool/done/{gather(secrets.token_hex(8))[0]}"
    try:
        yield
    finally:
        done, pause = store.add(key, 1), _SHORTEST_PAUSE
        while done < world():
            time.sleep(pause)
            done, pause = store.add(key, 0), min(2 * pause, _LONGEST_PAUSE)


def describe(error: BaseException, disk_full: str = FREE_SPACE) -> str | None:
    """What happened on this rank, and how to free a full disk; None if it only heard of another's trouble."""
    if isinstance(error, CheckpointException):
        # DCP raises on every rank, and says on which it happened.
        failure = error.failures.get(rank())
        return None if failure is None else describe(failure[0], disk_full)
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename else ""
        hint = f"; {disk_full}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{text}{where}{hint}"
    return str(error) or type(error).__name__


@contextmanager
def one_process_is_fine() -> Iterator[None]:
    """Keeps DCP from warning that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
