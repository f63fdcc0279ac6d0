"""What a run measures before its first step, on all ranks with their model: the kernels of experts and the schedule of
layers.

    setting                    a run that starts                              a run that is resumed
    moe.expert_kernels
        default                by the shape (`default_choices`)               as recorded in run.json
        measure                timed                                          as recorded in run.json
        a table                what it names; the rest by the shape           what it names; the rest as recorded
    moe.schedule
        auto                   GPUs: timed; CPU: none, as gloo hides nothing  as recorded in run.json
        any other              that one                                       that one

Kernels are timed on one rank's share of a batch whose tokens choose their experts uniformly; the mean over ranks
counts, and a way that any rank cannot use is left out. For example, with 8192 tokens on each of 4 ranks, 64 experts and
8 experts per token, 4 * 8192 * 8 / 4 = 65,536 pairs of a token and an expert come to a rank. A token visits 3.66 ranks,
so it wants 2.2 experts on each: measured are 32,768 tokens with 2 experts each.

Schedules are timed as one layer's ride, forward and backward, of tokens that choose uniformly; the slowest rank's
median counts. A ride in more chunks must be 2 % faster than one in fewer: what chunks cost the host is only partly seen
here.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from carpool.experts import Activation, Choices, ExpertWeights, GroupedExperts, measure_choices
from carpool.experts.gemm.choices import LIBRARY, STAGES, WAYS, default_choices
from carpool.experts.gemm.measure_choices import Measured, pick
from carpool.hf.seam.expert_rides import ExpertRides, capacities_of_rides
from carpool.hf.seam.experts_module import base_of, weight_names
from carpool.layout import assign
from carpool.metrics.counters import LayerStats
from carpool.metrics.host import device_name, timed
from carpool.planner.decisions.chosen import Chosen, Kind, fastest
from carpool.ride.function import ride
from carpool.ride.schedule import MAX_CHUNKS, SCHEDULES, Schedule, ScheduleKind
from carpool.routing import Routing
from carpool.train.plan.resolve import Plan
from carpool.train.steps.capacity import grow_if_short
from carpool.transport import TransportOptions
from carpool.transport.volume import uniform_ranks_per_token

log = logging.getLogger("carpool")
BY_SHAPE = "by the shape"


@dataclass(frozen=True)
class Shape:
    """What a choice depends on, of one rank.

    Attributes:
        device, dtype: a name; in what experts compute.
        rows, slots_per_row: rows that come, and how many of the `slots` each wants.
        hidden, inner: H, F.
        adapter_rank: of the experts' adapters; 0: there are none.
        quantised: whether their weights are, and are dequantised for each product.
    """

    device: str
    dtype: str
    rows: int
    slots_per_row: int
    slots: int
    hidden: int
    inner: int
    adapter_rank: int = 0
    quantised: bool = False

    @property
    def fused(self) -> bool:
        """Whether adapters or a quantised base make the library's products dearer (`default_choices`)."""
        return self.adapter_rank > 0 or self.quantised


KERNELS_KIND: Kind[Choices] = Kind(
    "experts", lambda one: {"stages": one.to_dict()}, lambda record: Choices.from_dict(record["stages"]), "microseconds"
)


def choose_kernels(plan: Plan, layers: Iterable[ExpertRides]) -> Chosen[Choices] | None:
    """Choose for the first layer that has stages; the others have the same shape. All ranks together. None if no layer
    has stages."""
    own = next((own for own in layers if isinstance(own.compute, GroupedExperts)), None)
    if own is None:
        return None
    wanted, device = plan.config.moe.expert_kernels, plan.machine.device
    assert isinstance(own.compute, GroupedExperts) and device is not None
    shape = shape_of(own, plan.tokens, plan.blueprint.top_k, plan.dtype, device)
    activation = own.compute.function.activation

    def measure(fallback: Chosen[Choices]) -> Chosen[Choices]:
        measured = mean_over_ranks(_measure_kernels(own, shape, device), device, shape.fused)
        if measured is None:
            return replace(fallback, why=f"{BY_SHAPE}; measuring needs more memory than some rank has")
        return Chosen(measured.choices, fallback.shape, "measured", explain_kernels(measured), measured.microseconds)

    def choose(kept: Chosen[Choices] | None, note: str) -> tuple[Chosen[Choices], bool]:
        return decide_kernels(wanted, shape, device, activation, kept, note)

    return plan.decisions.choose(KERNELS_KIND, asdict(shape), choose, measure)


def decide_kernels(
    wanted: str | Mapping[str, str],
    shape: Shape,
    device: torch.device,
    activation: Activation | Callable[[torch.Tensor], torch.Tensor],
    kept: Chosen[Choices] | None,
    note: str,
) -> tuple[Chosen[Choices], bool]:
    """(What is used, whether it is still to be measured). `kept`, `note`: as of `Kind.recall`."""
    no_kernels = why_no_kernels(shape, device)
    pairs_per_slot = shape.rows * shape.slots_per_row // max(1, shape.slots)
    default = Choices()
    if not no_kernels:
        default = default_choices(device, pairs_per_slot, shape.fused)
    base = kept or Chosen(default, asdict(shape), "default", BY_SHAPE + note)
    if not isinstance(wanted, str):
        why = f"{', '.join(wanted)} as moe.expert_kernels says; the rest {base.why}"
        if no_kernels:
            why += f"; but the library computes all of them: {no_kernels}"
        return Chosen(replace(base.answer, **wanted), base.shape, "given", why), False
    if wanted == "default" or kept is not None:
        return base, False
    unknown = "" if isinstance(activation, Activation) else "only the model itself knows its activation"
    if reason := no_kernels or unknown:
        return replace(base, why=f"{base.why}; nothing was measured: {reason}"), False
    return base, True


def shape_of(own: ExpertRides, tokens: int, top_k: int, dtype: torch.dtype, device: torch.device) -> Shape:
    """What comes to a rank if all experts are chosen equally often; see the module's docstring."""
    assert isinstance(own.compute, GroupedExperts) and own.transport is not None
    hidden, inner = own.experts.get_parameter(weight_names(own.experts)[1]).shape[-2:]
    if own.experts.is_transposed:
        hidden, inner = inner, hidden
    slots, per_row = own.num_local_experts, 1
    if own.transport.choices_per_send(top_k) > 1:
        groups = own.num_ranks // own.layout.slices
        per_row = min(slots, max(1, round(top_k / uniform_ranks_per_token(own.num_experts, top_k, groups))))
    rows = -(-tokens * top_k * own.layout.slices // per_row)
    ranks = [a.shape[1] for a in (() if own.adapters is None else own.adapters.factors()[::2]) if a is not None]
    name = str(dtype).removeprefix("torch.")
    stored = bool(base_of(own.experts))
    return Shape(device_name(device), name, rows, per_row, slots, hidden, inner, max(ranks, default=0), stored)


def why_no_kernels(shape: Shape, device: torch.device) -> str:
    """Why the library computes all stages here, whatever is chosen; "" if it does not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return f"the kernels need a GPU of the Ampere generation or later, and this is {shape.device}"
    if shape.dtype != "bfloat16":
        return f"the kernels compute in bfloat16, and this run in {shape.dtype}"
    if shape.hidden % 8 or shape.inner % 8:
        return f"the kernels need sizes that are multiples of 8, and these are {shape.hidden} and {shape.inner}"
    return ""


def mean_over_ranks(measured: Measured | None, device: torch.device, frozen: bool = False) -> Measured | None:
    """The mean of all ranks' times and the choice by it, as `pick`. Ways that failed on any rank are left out. None, if
    that leaves a stage without any, as it does where a rank has measured nothing. Collective."""
    table = [math.inf] * (len(STAGES) * len(WAYS) + 1)
    if measured is not None:
        times = measured.microseconds
        table = [times[stage].get(way, math.inf) for stage in STAGES for way in WAYS] + [measured.gather]
    total = torch.tensor(table, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    *means, gather = (total / dist.get_world_size()).tolist()
    found = iter(means)
    microseconds = {stage: {way: t for way in WAYS if math.isfinite(t := next(found))} for stage in STAGES}
    if not all(microseconds.values()):
        return None
    return Measured(pick(microseconds, gather, frozen), microseconds, gather)


def explain_kernels(measured: Measured) -> str:
    """What won, and over what, such as "measured, in microseconds: up 812 (library 1,204), ..."."""
    parts = []
    for stage, way in measured.choices.to_dict().items():
        times = measured.microseconds[stage]
        # dact and ddown are chosen for their sum: the fastest of each alone need not have won.
        others = {LIBRARY: times[LIBRARY]} if way != LIBRARY and LIBRARY in times else times
        other, least = min(((w, t) for w, t in others.items() if w != way), key=lambda o: o[1], default=("", 0.0))
        parts.append(f"{stage} {times[way]:,.0f}" + (f" ({other} {least:,.0f})" if other else ""))
    return f"measured, in microseconds: {', '.join(parts)}"


def describe_kernels(choices: Choices) -> str:
    """The products by their kernel: "library: dact, dup, ddown; flat: up, down, dx"."""
    ways = choices.to_dict()
    by_way = {way: ", ".join(stage for stage in STAGES if ways[stage] == way) for way in WAYS}
    return "; ".join(f"{way}: {stages}" for way, stages in by_way.items() if stages)


def _measure_kernels(own: ExpertRides, shape: Shape, device: torch.device) -> Measured | None:
    """None if there is no memory for it."""
    assert isinstance(own.compute, GroupedExperts)
    try:
        return measure_choices(
            shape.rows, shape.hidden, shape.inner, shape.slots, shape.slots_per_row, own.compute.function, device,
            bias=weight_names(own.experts)[2] is not None, adapter_rank=shape.adapter_rank,
            use_arena=own.transport is not None and own.transport.arena is not None,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        log.warning("experts were not measured: %s", error)
        return None
    finally:
        # What was taken for it is of no size that a step will ask for.
        torch.cuda.empty_cache()


HIDES_NOTHING = ("cpu",)
WARM_UP, REPETITIONS = 3, 7
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
    assert device is not None
    own = next((own for own in layers if own.compute is not None), None)
    options, transport = layers[0].options, layers[0].transport
    shape = {
        "device": device_name(device), "dtype": str(dtype).removeprefix("torch."), "tokens": tokens, "hidden": hidden,
        "top_k": top_k, "ranks": layers[0].num_ranks, "transport": None if transport is None else transport.name,
        "experts": None if own is None or own.compute is None else own.compute.name,
        "lossy": options is not None and bool(options.lossy_reasons),
    }  # fmt: skip

    def measure(fallback: Chosen[Schedule]) -> Chosen[Schedule]:
        assert own is not None
        times: dict[Schedule, float] = {}
        for candidates in (candidates_of(own, dtype, device), None):
            # Forward and backward may differ: once their best common number is known, its neighbours.
            for way in candidates or neighbours(fastest(times)):
                times[way] = _milliseconds(own, way, tokens, top_k, hidden, dtype, device)
        shown = {str(way): round(ms, 4) for way, ms in times.items()}
        why = f"measured, in milliseconds of a layer's ride: {', '.join(f'{n} {ms:.3g}' for n, ms in shown.items())}"
        return Chosen(fastest(times), fallback.shape, "measured", why, shown)

    chosen = plan.decisions.choose(
        SCHEDULE_KIND, shape, lambda kept, note: decide_schedule(wanted, shape, kept, note, own is None), measure
    )
    # Before anything is written.
    if device.type == "cuda" and own is not None and (reason := why_not_follow(own, chosen.answer.kind, dtype, device)):
        name = chosen.answer.name
        raise ValueError(f"moe.schedule = {name!r} cannot be used here: {reason}; use 'chunks' or 'auto'")
    for one in layers:
        one.set_schedule(chosen.answer)
    return chosen


def decide_schedule(
    wanted: Schedule | None, shape: Mapping[str, Any], kept: Chosen[Schedule] | None, note: str, own_forward: bool
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


def candidates_of(own: ExpertRides, dtype: torch.dtype, device: torch.device) -> list[Schedule]:
    """What "auto" times: what every schedule proposes for this layer that the layer can follow."""
    found: list[Schedule] = []
    for kind in SCHEDULES.values():
        proposed = kind.candidates(own.transport)
        if not proposed or (own.whole_rides and not kind.whole) or why_not_follow(own, kind, dtype, device):
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


def _milliseconds(
    own: ExpertRides, schedule: Schedule, tokens: int, top_k: int, hidden: int, dtype: torch.dtype, device: torch.device
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
    slot_TK = assign(routing.expert_TK, own.layout)
    x_TH = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype).requires_grad_()
    weights = ExpertWeights.of(_like(own, name, dtype, device) for name in weight_names(own.experts))
    times, capacities = [], capacities_of_rides([own])
    for number in range(WARM_UP + REPETITIONS):
        took = timed(lambda: ride(x_TH, routing, slot_TK, weights, setup)[0].backward(x_TH.detach()), device)
        # What has no place is not computed, and would be timed as nothing.
        if capacities and grow_if_short(capacities, device) is not None:
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
