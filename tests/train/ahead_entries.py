"""What is looked at ahead in tests; a module of its own, without PyTorch, because another process imports it."""

from __future__ import annotations

import os
import time

from carpool.train.config import Config


def refuse(config: Config, *, rank: int) -> None:
    print("what libraries print")
    raise ValueError(f"rank {rank}: no\nsecond line")


def open_nothing(config: Config, *, rank: int) -> None:
    os.stat("/no/such/file")


def fail(config: Config, *, rank: int) -> None:
    raise KeyError(rank)


def sleep_long(config: Config, *, rank: int) -> None:
    time.sleep(600)
