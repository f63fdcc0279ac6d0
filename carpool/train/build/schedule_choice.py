"""Which schedule the layers of a run follow (see `carpool.planner.decisions.chosen` for when it is chosen).

    moe.schedule        a run that starts                              a run that is resumed
    auto                GPUs: timed, before the first step;            as recorded in run.json
                        CPU: none, because gloo hides nothing
    any other           that one                                       that one

What is timed is one layer's ride, forward and backward, of tokens that choose their experts uniformly. What counts is
the slowest rank, and the median of a few repetitions. A ride in more chunks must be 2 % faster than one in fewer: what
chunks cost the host is only partly seen here.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from carpool.experts import ExpertWeights
from carpool.hf.seam.experts_module import weight_names
from carpool.hf.seam.expert_rides import ExpertRides, rides, rooms_of_rides
from carpool.layout import assign
from carpool.metrics.host import timed
from carpool.metrics.counters import LayerStats
from carpool.planner.decisions.chosen import Chosen, Kind, fastest
from carpool.ride.function import ride
from carpool.routing import Routing
from carpool.ride.schedule import MAX_CHUNKS, SCHEDULES, Schedule, ScheduleKind
from carpool.ride.priority import RidesFirst
from carpool.train.config.schema_moe import MoeSection
from carpool.train.launch.machine import device_name
from carpool.train.plan.resolve import Plan
from carpool.train.steps.capacity import grow_if_short
from carpool.transport import TransportOptions

HIDES_NOTHING = ("cpu",)
WARM_UP, REPETITIONS = 3, 7
log = logging.getLogger("carpool")


SCHEDULE_KIND: Kind[Schedule] = Kind(
    "schedule",
    lambda schedule: {key: value for key, value in asdict(schedule).items() if key != "options" or value},
    lambda record: Schedule(record["name"], record["chunks"], record.get("backward_chunks"), record.get("options", {})),
)


def choose_schedule(plan: Plan, layers: Sequence[ExpertRides]) -> Chosen[Schedule]:
    """Choose, and let the layers follow it. All ranks together.

    Raises:
        ValueError: experts that cannot follow the schedule that is asked for.
    """
    wanted, device, dtype, tokens = plan.config.moe.asked_schedule(), plan.machine.device, plan.dtype, plan.tokens
    top_k, hidden = plan.blueprint.top_k, plan.blueprint.row_size
    # What the CPU computes it computes of whole rides (`keep_experts_in_host_memory`).
    on_cpu = bool(plan.config.memory.cpu_expert_tokens)
    assert device is not None
    own = next((own for own in layers if own.compute is not None), None)
    name = device_name(device)
    ranks = layers[0].num_ranks
    options, transport = layers[0].options, layers[0].transport
    shape = {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "hidden": hidden,
        "top_k": top_k,
        "ranks": ranks,
        "transport": None if transport is None else transport.name,
        "experts": None if own is None or own.compute is None else own.compute.name,
        "lossy": options is not None and bool(options.lossy_reasons),
    }

    def measure(fallback: Chosen[Schedule]) -> Chosen[Schedule]:
        assert own is not None
        times: dict[Schedule, float] = {}
        for candidates in (candidates_of(own, dtype, device, on_cpu), None):
            # Forward and backward may differ: once their best common number is known, its neighbours.
            for way in candidates or neighbours(fastest(times)):
                times[way] = _milliseconds(own, way, tokens, top_k, hidden, dtype, device)
        shown = {str(way): round(ms, 4) for way, ms in times.items()}
        why = f"measured, in milliseconds of a layer's ride: {', '.join(f'{n} {ms:.3g}' for n, ms in shown.items())}"
        return Chosen(fastest(times), fallback.shape, "measured", why, shown)

    chosen = plan.decisions.choose(
        SCHEDULE_KIND, shape, lambda kept, note: decide(wanted, shape, kept, note, own is None), measure
    )
    if device.type == "cuda" and own is not None and own.compute is not None:
        # Before anything is written.
        if reason := why_not_follow(own, chosen.answer.kind, dtype, device):
            name = chosen.answer.name
            raise ValueError(f"moe.schedule = {name!r} cannot be used here: {reason}; use 'chunks' or 'auto'")
    for one in layers:
        one.set_schedule(chosen.answer)
    return chosen


def decide(
    wanted: Schedule | None,
    shape: Mapping[str, Any],
    kept: Chosen[Schedule] | None,
    note: str,
    own_forward: bool,
) -> tuple[Chosen[Schedule], bool]:
    """(What is used, whether it is still to be measured). `kept`, `note`: as of `Kind.recall`."""
    if wanted is not None:
        return Chosen(wanted, shape, "given", "asked for"), False
    if kept is not None:
        return kept, False
    reason = ""
    if own_forward:
        reason = "the experts run their own forward, in one piece"
    elif shape["ranks"] == 1:
        reason = "one rank has no rides to hide"
    elif shape["device"] in HIDES_NOTHING:
        reason = "on a CPU nothing runs beside a ride"
    return Chosen(Schedule(), shape, "default", reason + note), not reason


def candidates_of(own: ExpertRides, dtype: torch.dtype, device: torch.device, on_cpu: bool) -> list[Schedule]:
    """What "auto" times: what every schedule proposes for this layer that the layer can follow. `on_cpu`: the CPU
    computes some of the experts."""
    found: list[Schedule] = []
    for kind in SCHEDULES.values():
        proposed = kind.candidates(own.transport)
        if not proposed or (on_cpu and not kind.whole) or why_not_follow(own, kind, dtype, device):
            continue
        try:
            (own.options or TransportOptions()).under(proposed[0])
        except ValueError:
            continue
        found += proposed
    return found


def why_not_follow(own: ExpertRides, kind: type[ScheduleKind], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a layer on a GPU cannot follow such a schedule, or None."""
    assert own.compute is not None
    if not kind.whole and own.adapters is not None:
        return "experts have adapters"
    none = (_like(own, name, dtype, device, slots=0) for name in weight_names(own.experts))
    return kind.why_not(own.compute, ExpertWeights.of(none))


def neighbours(best: Schedule) -> tuple[Schedule, ...]:
    """Twice as many chunks in the forward or in the backward as is best for both."""
    if best.name != "chunks" or 2 * best.chunks > MAX_CHUNKS:
        return ()
    return Schedule("chunks", best.chunks, 2 * best.chunks), Schedule("chunks", 2 * best.chunks, best.chunks)


def rides_first(model: nn.Module, moe: MoeSection, fsdp_size: int) -> RidesFirst | None:
    """What waits for rides in the backward, as `moe.priority` asks; None: nothing.

    Raises:
        ValueError: it cannot: there are no reductions to wait, or rides that would not say where they are."""
    if not moe.priority:
        return None
    layers = rides(model)
    if all(own.compute is None for own in layers.values()):
        raise ValueError("moe.priority: the experts run their own forward, whose rides nothing waits for: leave it out")
    if fsdp_size == 1:
        raise ValueError(
            "moe.priority: with parallelism.fsdp_size = 1 no gradients are reduced during the backward, so nothing can "
            "keep off the links: leave it out"
        )
    return RidesFirst(model, layers)


def _milliseconds(
    own: ExpertRides,
    schedule: Schedule,
    tokens: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Of a ride of this layer, forward and backward, on the slowest rank."""
    assert own.compute is not None
    own.set_schedule(schedule)
    stats = LayerStats(own.num_experts, own.num_ranks, own.rank)
    setup = replace(own.ride_setup(own.prepare(top_k, hidden), device), stats=stats)
    generator = torch.Generator(device).manual_seed(own.rank)
    score_TE = torch.rand(tokens, own.num_experts, generator=generator, device=device)
    weight_TK = torch.full((tokens, top_k), 1 / top_k, device=device)
    routing = Routing(score_TE.topk(top_k).indices.int(), weight_TK.requires_grad_())
    slot_TK = assign(routing, own.layout, own.rank)
    x_TH = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype).requires_grad_()
    weights = ExpertWeights.of(_like(own, name, dtype, device) for name in weight_names(own.experts))
    times, rooms = [], rooms_of_rides([own])
    for number in range(WARM_UP + REPETITIONS):
        took = timed(lambda: ride(x_TH, routing, slot_TK, weights, setup)[0].backward(x_TH.detach()), device)
        # What has no place is not computed, and would be timed as nothing.
        if rooms and grow_if_short(rooms, device) is not None:
            assert number < WARM_UP, "the same rows had a place before"
        if number >= WARM_UP:
            times.append(took.ms)
    return statistics.median(times)


def _like(
    own: ExpertRides, name: str | None, dtype: torch.dtype, device: torch.device, slots: int | None = None
) -> torch.Tensor | None:
    """A leaf of the shape of one of the layer's weights, of all its slots, or so many."""
    if name is None:
        return None
    shape: Iterable[int] = own.experts.get_parameter(name).shape[1:]
    weight = torch.randn(own.layout.slots_per_rank if slots is None else slots, *shape, dtype=dtype, device=device)
    return weight.mul_(0.02).requires_grad_()
