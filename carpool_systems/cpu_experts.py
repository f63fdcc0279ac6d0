"""Experts with few tokens stay in host memory, and the CPU computes them: how many tokens, and the layers of a model.

The CPU computes an expert if t_cpu(tokens) < t_load + t_gpu(tokens), of which all three are measured on all ranks at
the same time, because they share the CPU and its memory (APTMoE, SC 2024). Both sides grow with the tokens, the CPU's
faster, so that one number says it all; and a number, not the time of a step, makes a repeated step the same.

    cpu_experts.max_tokens     a run that starts     a run that is resumed
        auto                   timed                 as recorded in run.json
        a number               that one              that one

`carpool_systems.few_on_host` computes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.activations.host_memory import host_zeros
from carpool.experts import Experts, ExpertWeights
from carpool.experts.host_experts import HostExperts
from carpool.experts.reference import expert_rows
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.experts_module import weight_names
from carpool.memory.next_experts import Counts
from carpool.metrics.host import device_name, synchronize
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind
from carpool_systems.few_on_host import FewOnHost
from carpool_systems.predictors import Popularity


class FewTokens:
    """Says which experts stay in host memory, and remembers it for those who compute them: `HostExperts.stays`.

    Attributes:
        most: tokens of an expert that stays, in forwards that train.
        of: by layer, the experts that stay in the forward that goes on.
    """

    def __init__(self, most: int) -> None:
        self.most, self.of = most, dict[int, list[int]]()

    def __call__(self, number: int, counts: Counts) -> list[int]:
        few = [expert for expert, count in counts.items() if count <= self.most] if torch.is_grad_enabled() else []
        self.of[number] = few
        return few


def compute_few_on_cpu(model: nn.Module, away: HostExperts, few: int) -> FewTokens | None:
    """From now on the CPU computes experts with at most so many tokens. `away`: has all experts in host memory, with a
    predictor.

    Raises:
        ValueError: experts that are not grouped, or tokens that arrive in parts."""
    if not few:
        return None
    layers, stays = required_rides(model), FewTokens(few)
    for name, own in layers.items():
        if getattr(own.compute, "name", None) not in FewOnHost.beside:
            raise ValueError(
                f"{name}: the CPU computes experts beside {' or '.join(FewOnHost.beside)} ones (moe.experts), so "
                "cpu_experts.max_tokens cannot be used"
            )
        in_parts = own.transport is not None and own.transport.rides_in_parts
        if not own.schedule.kind.whole and in_parts:
            raise ValueError(
                f"{name}: the CPU computes experts once all tokens have arrived, and those of moe.schedule = "
                f"{own.schedule.name!r} arrive in parts: choose another schedule, or cpu_experts.max_tokens=0"
            )
    away.stays = stays
    if isinstance(away.predictor, Popularity):
        away.predictor.few = few
    for number, own in enumerate(layers.values()):
        own.wrap_experts(partial(_with_few, away, stays, own, number))
    return stays


def _with_few(away: HostExperts, stays: FewTokens, own: ExpertRides, number: int, experts: Experts) -> FewOnHost:
    assert own.function is not None
    names = [name for name, _ in own.experts.named_parameters()]
    places = [None if name is None else names.index(name) for name in weight_names(own.experts)]

    def host(expert: int) -> ExpertWeights:
        values = away.host_values(number, expert)
        return ExpertWeights.of(None if place is None else values[place] for place in places)

    return FewOnHost(experts, own.function, lambda: stays.of.get(number, []), host)


COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Different experts, so that none is in the CPU's caches.
_EXPERTS, _REPEATS = 8, 3


FEW_KIND: Kind[int] = Kind(
    "cpu_expert_tokens", lambda tokens: {"tokens": tokens}, lambda record: int(record["tokens"]), "microseconds"
)


def choose_few_tokens(
    wanted: int | str, own: ExpertRides, dtype: torch.dtype, device: torch.device, decisions: Decisions
) -> Chosen[int]:
    """Choose for all layers, by the experts of one. All ranks together.

    Args:
        wanted: `cpu_experts.max_tokens`.
        dtype: in which experts compute.
        decisions: of the run."""
    shapes = [tuple(own.experts.get_parameter(one).shape[1:]) for one in weight_names(own.experts) if one is not None]
    shape = {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "experts": [list(one) for one in shapes],
    }

    def decide(kept: Chosen[int] | None, note: str) -> tuple[Chosen[int], bool]:
        if wanted != "auto":
            return Chosen(int(wanted), shape, "given", "asked for"), False
        if kept is not None:
            return kept, False
        if device.type != "cuda":
            return Chosen(0, shape, "default", f"there is no GPU to which experts would come{note}"), False
        return Chosen(0, shape, "default", f"to be measured{note}"), True

    def measure(fallback: Chosen[int]) -> Chosen[int]:
        times = measured_times(own, dtype, device)
        few = most_tokens(times)
        cpu, loaded = (", ".join(f"{one[n]:,.0f}" for n in COUNTS) for one in (times["cpu"], times["loaded"]))
        why = f"measured, in microseconds for {', '.join(map(str, COUNTS))} tokens: CPU {cpu}; loaded {loaded}"
        return Chosen(few, fallback.shape, "measured", why, times)

    return decisions.choose(FEW_KIND, shape, decide, measure)


def most_tokens(times: Mapping[str, Mapping[int, float]]) -> int:
    """The most tokens up to which the CPU is the faster one; 0: it never is."""
    few = 0
    for count in COUNTS:
        if times["cpu"][count] >= times["loaded"][count]:
            break
        few = count
    return few


def measured_times(own: ExpertRides, dtype: torch.dtype, device: torch.device) -> dict[str, dict[int, float]]:
    """Microseconds of an expert by its tokens, on the mean over ranks: "cpu", with rows that go there and come back,
    and "loaded", which is copied to the device first."""
    assert own.function is not None
    names, function = weight_names(own.experts), own.function
    hidden = own.experts.get_parameter(names[1]).shape[1 if not function.transposed else 2]
    shapes = [None if name is None else own.experts.get_parameter(name).shape[1:] for name in names]
    hosts = [[None if one is None else host_zeros(one, dtype, device) for one in shapes] for _ in range(_EXPERTS)]
    heres = [None if one is None else torch.empty(one, dtype=dtype, device=device) for one in shapes]
    seconds = torch.zeros(2, len(COUNTS), dtype=torch.float64, device=device)
    for place, count in enumerate(COUNTS):
        rows = torch.zeros(count, hidden, dtype=dtype, device=device)

        def on_cpu(number: int, rows: torch.Tensor = rows) -> None:
            expert_rows(rows.cpu(), ExpertWeights.of(hosts[number]), function).to(device)

        def loaded(number: int, rows: torch.Tensor = rows) -> None:
            for host, here in zip(hosts[number], heres, strict=True):
                if host is not None and here is not None:
                    here.copy_(host, non_blocking=True)
            expert_rows(rows, ExpertWeights.of(heres), function)

        for which, compute in enumerate((on_cpu, loaded)):
            seconds[which, place] = _seconds(compute, device)
    if dist.is_initialized():
        dist.all_reduce(seconds)
        seconds /= dist.get_world_size()
    cpu, load = (1e6 * seconds).tolist()
    return {"cpu": dict(zip(COUNTS, cpu, strict=True)), "loaded": dict(zip(COUNTS, load, strict=True))}


@torch.no_grad()
def _seconds(compute: Callable[[int], Any], device: torch.device) -> float:
    """Of one expert; the best of some rounds over all of them."""
    best = float("inf")
    for _ in range(_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        for number in range(_EXPERTS):
            compute(number)
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / _EXPERTS)
    return best
