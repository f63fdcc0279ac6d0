"""Which way computes each stage of the experts in a run (see `carpool.planner.decisions.chosen` for when it is chosen).

    moe.expert_kernels   a run that starts                           a run that is resumed
    default             by the shape (`default_choices`)            as recorded in run.json
    measure             timed on all ranks, before the first step   as recorded in run.json
    a table             what it names; the rest by the shape        what it names; the rest as recorded

What is timed is one rank's share of a batch whose tokens choose their experts uniformly. Every rank does it, and what
counts is the mean over ranks. A way that any rank cannot use is left out. For example, with 8192 tokens on each of 4
ranks, 64 experts and 8 experts per token, 4 * 8192 * 8 / 4 = 65,536 pairs of a row and an expert come to a rank. A
token visits 3.66 ranks, so it wants 2.2 experts on each: measured are 32,768 rows with 2 experts each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from carpool.experts import Activation, Choices, GroupedExperts, measure_choices
from carpool.experts.gemm.choices import LIBRARY, STAGES, WAYS, default_choices
from carpool.experts.gemm.measure_choices import Measured, pick
from carpool.hf.seam.experts_module import weight_names
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.transport.volume import uniform_copies
from carpool.planner.decisions.chosen import Chosen, Kind
from carpool.train.launch.machine import device_name
from carpool.train.plan.resolve import Plan

BY_SHAPE = "by the shape"
log = logging.getLogger("carpool")


@dataclass(frozen=True)
class Shape:
    """What a choice depends on, of one rank.

    Attributes:
        device, dtype: a name; in what experts compute.
        rows, slots_per_row: rows that come, and how many of the `slots` each wants.
        hidden, inner: H, F.
        adapter_rank: of the experts' adapters; 0: there are none.
    """

    device: str
    dtype: str
    rows: int
    slots_per_row: int
    slots: int
    hidden: int
    inner: int
    adapter_rank: int = 0


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
        measured = mean_over_ranks(_measure(own, shape, device), device, shape.adapter_rank > 0)
        if measured is None:
            return replace(fallback, why=f"{BY_SHAPE}; measuring needs more memory than some rank has")
        return Chosen(measured.choices, fallback.shape, "measured", explain(measured), measured.microseconds)

    return plan.decisions.choose(
        KERNELS_KIND,
        asdict(shape),
        lambda kept, note: decide(wanted, shape, device, activation, kept, note),
        measure,
    )


def decide(
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
        default = default_choices(device, pairs_per_slot, shape.adapter_rank > 0)
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
    if own.compute.function.transposed:
        hidden, inner = inner, hidden
    # Replicas come and go while a run goes on, and what was chosen must not depend on when it was resumed.
    slots, per_row = own.num_local_experts, 1
    if own.transport.choices_per_row(top_k) > 1:
        groups = own.num_ranks // own.layout.slices
        per_row = min(slots, max(1, round(top_k / uniform_copies(own.num_experts, top_k, groups))))
    rows = -(-tokens * top_k * own.layout.slices // per_row)
    ranks = [a.shape[1] for a in (() if own.adapters is None else own.adapters.factors()[::2]) if a is not None]
    name = str(dtype).removeprefix("torch.")
    return Shape(device_name(device), name, rows, per_row, slots, hidden, inner, max(ranks, default=0))


def why_no_kernels(shape: Shape, device: torch.device) -> str:
    """Why the library computes all stages here, whatever is chosen; "" if it does not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return f"the kernels need a GPU of the Hopper generation or later, and this is {shape.device}"
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


def explain(measured: Measured) -> str:
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
    """Stages by their way: "library: dact, dup, ddown; flat: up, down, dx"."""
    ways = choices.to_dict()
    by_way = {way: ", ".join(stage for stage in STAGES if ways[stage] == way) for way in WAYS}
    return "; ".join(f"{way}: {stages}" for way, stages in by_way.items() if stages)


def _measure(own: ExpertRides, shape: Shape, device: torch.device) -> Measured | None:
    """None if there is no memory for it."""
    assert isinstance(own.compute, GroupedExperts)
    try:
        return measure_choices(
            shape.rows,
            shape.hidden,
            shape.inner,
            shape.slots,
            shape.slots_per_row,
            own.compute.function,
            device,
            bias=weight_names(own.experts)[2] is not None,
            use_arena=own.transport is not None and own.transport.arena is not None,
            adapter_rank=shape.adapter_rank,
        )
    except torch.OutOfMemoryError as error:
        log.warning("experts were not measured: %s", error)
        return None
    finally:
        # What was taken for it is of no size that a step will ask for.
        torch.cuda.empty_cache()
