"""How fast each rank is: as the configuration says, or measured once and taken again on resume."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from carpool.observe.clock import synchronize
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, Record
from carpool.train.config.schema import Config

Speeds = tuple[float, ...]
# Of the fastest: ranks that differ by less are equally fast, and the difference is that of two measurements.
NOISE = 0.05
SIZE = {"cuda": 8192, "cpu": 768}
REPEATS = 15


def _read(record: Record) -> Speeds:
    return tuple(float(speed) for speed in record["speeds"])


SPEEDS_KIND: Kind[Speeds] = Kind("rank_speeds", lambda speeds: {"speeds": list(speeds)}, _read)


def with_speeds(config: Config, device: torch.device, devices: list[str], decisions: Decisions) -> Config:
    """The configuration with `parallelism.rank_speeds` as numbers, or none if the ranks are equally fast. All ranks
    together.

    Args:
        devices: what each rank computes on; other devices are measured anew."""
    if config.parallelism.rank_speeds is None:
        return config
    shape: Mapping[str, Any] = {"requested": config.parallelism.model_dump(mode="json")["rank_speeds"], "on": devices}

    def decide(kept: Chosen[Speeds] | None, note: str) -> tuple[Chosen[Speeds], bool]:
        given = config.parallelism.rank_speeds
        if isinstance(given, tuple):
            return Chosen(given, shape, "given", "asked for"), False
        return kept or Chosen((), shape, "measured", f"products on all ranks at once{note}"), kept is None

    def measure(chosen: Chosen[Speeds]) -> Chosen[Speeds]:
        return Chosen(_measured(device), shape, chosen.how, chosen.why)

    speeds = decisions.choose(SPEEDS_KIND, shape, decide, measure).answer
    equal = min(speeds) >= (1 - NOISE) * max(speeds)
    section = config.parallelism.model_copy(update={"rank_speeds": None if equal else speeds})
    return config.model_copy(update={"parallelism": section})


def _measured(device: torch.device) -> Speeds:
    """The speed of each rank against the fastest, in hundredths: of a matrix product, while all compute."""
    a_NN = torch.randn(SIZE[device.type], SIZE[device.type], device=device)
    if device.type == "cuda":
        a_NN = a_NN.bfloat16()
    times = []
    dist.barrier()
    for _ in range(REPEATS):
        began = time.perf_counter()
        a_NN @ a_NN
        synchronize(device)
        times.append(time.perf_counter() - began)
    rate = torch.tensor([1 / statistics.median(times[REPEATS // 3 :])], dtype=torch.float64, device=device)
    rates = [torch.empty_like(rate) for _ in range(dist.get_world_size())]
    dist.all_gather(rates, rate)
    found = [float(one) for one in rates]
    return tuple(max(0.01, round(one / max(found), 2)) for one in found)
