"""The plan of a run: what `parallelism=auto` and `memory=auto` leave to the planner, and how right it was.

    parallelism=auto    the degrees, dense, moe.transport, how a step's tokens are cut into micro-batches, and in which
                        order these go through stages; moe.schedule, where stages have pairs
    memory=auto         what is kept for the backward, and where the optimizer's state is

What the user says stays. So do the tokens of a step, as they would be without a plan. The search
(`carpool.planner.search.plan`) predicts the step of every configuration that is left; the fastest that fits is taken.
Its settings and what is predicted of it are a decision of the run (`carpool.planner.decisions.chosen`): recorded, and
taken again.

After the first steps the run says what it measured beside what was predicted. Three kinds of time are told apart:

    rides      what of dispatch and combine is exposed
    experts    what experts compute
    rest       everything else

Measured over predicted is a factor for each. With these factors the times of the next best plans are corrected, and the
run says if one of them would then be faster. It goes on as it is: a run is the same when it is resumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedModel

from carpool.hf.build_model import check_parallelism
from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import POLICIES, Candidate, Spare, by_settings
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.plan import USABLE, Found, Plan, plan
from carpool.planner.search.space import Space
from carpool.planner.transports import planned_transports
from carpool.train.blueprint import Blueprint, planned_attention
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine
from carpool.train.plan.division import context_cut, cut_into_stages, distributed_config, divides_tokens

AXES = ("dp_replicate", "fsdp", "cp", "tp", "pp", "ep", "etp")
# What each section leaves to the plan.
FREE: Mapping[str, tuple[str, ...]] = {
    "parallelism": (
        *(f"parallelism.{axis}_size" for axis in AXES), "parallelism.pp_schedule", "parallelism.data_parallel",
        "moe.transport", "moe.schedule", "training.per_device_train_batch_size", "training.gradient_accumulation_steps",
    ),
    "memory": (
        *(f"memory.{item}" for item in POLICIES), "training.optimizer_offload", "training.optimizer_in_backward",
    ),
}  # fmt: skip
# Plans that are shown.
SHOWN = 5


@dataclass(frozen=True)
class Predicted:
    """What is predicted of one plan.

    Attributes:
        settings: those that the plan chose, by SECTION.KEY.
        step_ms: (least, likely, most).
        kinds_ms: of the likely step, by "rides", "experts" and "rest".
        memory_bytes: of the fullest rank; tensor_bytes: of these, PyTorch's tensors.
    """

    label: str
    settings: dict[str, Any]
    step_ms: tuple[float, float, float]
    kinds_ms: dict[str, float]
    memory_bytes: float
    tensor_bytes: float

    @property
    def exposed_share(self) -> float:
        """Of rides, in the step."""
        return self.kinds_ms["rides"] / self.step_ms[1]


@dataclass(frozen=True)
class Planned:
    """The plan that is taken, the next best ones, and what the predictions rest on."""

    taken: Predicted
    others: tuple[Predicted, ...]
    inputs: dict[str, str]


def _predicted(one: Any) -> Predicted:
    return Predicted(**{**one, "step_ms": tuple(one["step_ms"])})


PLAN_KIND: Kind[Planned] = Kind(
    "plan",
    asdict,
    lambda record: Planned(
        _predicted(record["taken"]), tuple(_predicted(one) for one in record["others"]), dict(record["inputs"])
    ),
)


def planned_sections(config: Config) -> list[str]:
    """The sections that are left to the plan."""
    return [section for section in FREE if getattr(config, section).plan == "auto"]


def free_keys(config: Config, fixed: Collection[str]) -> set[str]:
    """The settings that the plan may choose. `fixed`: those that the user has said."""
    return {key for section in planned_sections(config) for key in FREE[section]} - set(fixed)


def make_plan(
    config: Config,
    fixed: Collection[str],
    model: PreTrainedModel,
    hardware: Hardware,
    *,
    world: int,
    per_node: int,
    memory: int,
) -> tuple[Planned, str]:
    """(The plan, why it is the best), in one process. Raises ValueError if nothing that is allowed fits.

    Args:
        fixed: SECTION.KEY that the user has said.
        model: may be on the meta device.
        world, per_node: ranks of the run, and of each node.
        memory: bytes that a rank may use."""
    attention = planned_attention(config, Degrees(), model, hardware.name != "cpu")
    shape = ModelShape.read(model.config.to_dict(), attention)
    free = free_keys(config, fixed)
    training, length = config.training, config.data.sequence_length
    now = config.parallelism.resolve(world, shape.num_experts)
    sequences = training.rank_sequences * now.dp

    def size(axis: str) -> int | None:
        """As the user has said; None: it is free."""
        key = f"parallelism.{axis}_size"
        return None if key in free else now.size(axis)

    def is_open(key: str) -> bool:
        """Whether the plan chooses it, or the run does by a rule of its own."""
        return key in free or _get(config.model_dump(), key) == "auto"

    def allowed(degrees: Degrees) -> str | None:
        if (asked := size("fsdp")) is not None and degrees.fsdp != asked:
            return f"parallelism.fsdp_size is {asked}"
        if "training.gradient_accumulation_steps" not in free and degrees.dp != now.dp:
            return f"{training.gradient_accumulation_steps} micro-batches of a step were asked for"
        if (reason := why_not_tensor_parallel(degrees.tp)) is not None:
            return reason
        return _refused(config, {f"parallelism.{axis}_size": degrees.size(axis) for axis in AXES}, degrees, model)

    @cache
    def why_not_tensor_parallel(tp: int) -> str | None:
        sizes = Degrees(tp=tp, ep=tp)
        try:
            check_parallelism(
                model, distributed_config(sizes, False), sequence_parallel=divides_tokens(config, sizes, model).answer
            )
        except ValueError as error:
            return str(error)
        return None

    def sizes(axis: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        asked = size(axis)
        return default if asked is None else (asked,)

    # State in host memory and consumed gradients take it, too.
    optimizer = training.optimizer_class(config.model.stored_dtype)
    if "training.optimizer_offload" in free:
        optimizer = training.ablest_optimizer()
    cut = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}
    batches = None if cut <= free else (training.per_device_train_batch_size,)
    stored = 4 if config.model.stored_dtype == "float32" else 2
    found = plan(
        shape,
        hardware,
        gpus=world,
        tokens=sequences * length,
        sequence_length=length,
        per_node=per_node,
        memory=USABLE * memory if config.memory.budget_bytes is None else config.memory.budget_bytes,
        space=Space(
            pp=sizes("pp"),
            tp=sizes("tp", (1, 2, 4, 8)),
            cp=sizes("cp"),
            etp=sizes("etp", (1, 2)),
            ep=sizes("ep"),
            replicas=sizes("dp_replicate") or None,
            micro_batches=batches,
            transports=planned_transports() if is_open("moe.transport") else (config.moe.transport,),
            schedules=("two-batch",) if config.moe.two_batch else ("none",),
            data_parallel=Space.data_parallel
            if is_open("parallelism.data_parallel")
            else (config.parallelism.data_parallel,),
            policies=_policies(config, free),
            optimizer_offload=Space.optimizer_offload if _moves_state(config, free) else (training.optimizer_offload,),
            optimizer_in_backward=(False, True) if _may_consume(config, free) else (training.optimizer_in_backward,),
            max_grad_norm=training.max_grad_norm,
            # A run that is too short for it, or has other reasons, searches once more (`resolve`).
            compiled=training.torch_compile in ("on", "on" if hardware.name == "cpu" else "auto"),
            eager=by_settings(config.model_dump()),
            moments=training.optimizer_state_dtype,
            optimizer=optimizer.name,
            averaged=training.ema_decay is not None,
            stored=stored,
            computed=2 if training.computes_in_bf16(hardware.name != "cpu") else stored,
            experts="fp8" if config.moe.experts == "fp8" else "grouped",
            spare=Spare.of(config.moe.model_dump()),
            pipelines=Space.pipelines if "parallelism.pp_schedule" in free else (config.parallelism.pp_schedule,),
            pairs="moe.schedule" in free or config.moe.two_batch,
            excluded=config.declared.why_refused,
            allowed=allowed,
            runs=lambda one: _refused(config, _settings(one, free), one.degrees, model, whole=True),
        ),
        best=SHOWN,
    )
    if not found.plans:
        raise ValueError(_why_none(found, memory))
    first, *others = (_of(one, free, hardware) for one in found.plans)
    low, likely, high = first.step_ms
    why = (
        f"{first.label}: the fastest of {sum(found.counts.values()):,} configurations, as modelled on {hardware.name} "
        f"({hardware.source}): a step of {likely:,.1f} ms ({low:,.0f} to {high:,.0f}), {first.exposed_share:.0%} of it "
        f"exposed rides, {first.memory_bytes / 2**30:.1f} GiB of a rank"
    )
    return Planned(first, tuple(others), dict(found.plans[0].inputs)), why


def choose_plan(
    config: Config, fixed: Collection[str], blueprint: Blueprint, machine: Machine, decisions: Decisions
) -> Chosen[Planned] | None:
    """The plan of a run; None if nothing is left to one. All ranks together. Raises ValueError if nothing fits."""
    if not planned_sections(config):
        return None
    free, dumped, training = free_keys(config, fixed), config.model_dump(mode="json"), config.training
    shape = {
        "device": machine.hardware.name,
        "ranks": machine.ranks,
        "model": blueprint.architecture,
        "sequences": training.rank_sequences,
        "sequence_length": config.data.sequence_length,
        "memory_gib": round(machine.memory / 2**30),
        "budget": config.memory.budget,
        "free": sorted(free),
        "given": {key: _get(dumped, key) for section in FREE for key in FREE[section] if key not in free},
    }

    def decide(kept: Chosen[Planned] | None, note: str) -> tuple[Chosen[Planned], bool]:
        if kept is not None:
            return kept, False
        ranks, nodes = machine.ranks, machine.topology.num_nodes
        found, why = make_plan(
            config, fixed, blueprint.model, machine.hardware, world=ranks,
            per_node=ranks // nodes if ranks % nodes == 0 else 1, memory=machine.memory,
        )  # fmt: skip
        return Chosen(found, shape, "modelled", why + note), False

    return decisions.choose(PLAN_KIND, shape, decide)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with some settings, by SECTION.KEY, and nothing left to a plan.

    Raises:
        ValueError: they do not go together."""
    dumped = config.model_dump(mode="json")
    for section in FREE:
        dumped[section]["plan"] = None
    for key, value in settings.items():
        section, name = key.split(".")
        dumped[section][name] = value
    try:
        return type(config).model_validate(dumped)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(str(first.get("ctx", {}).get("error", first["msg"]))) from None


def _refused(
    config: Config, settings: Mapping[str, Any], degrees: Degrees, model: PreTrainedModel, whole: bool = False
) -> str | None:
    """Why a run cannot have these settings, as far as it would say before its first step; None if it can. `whole`:
    they are all that a plan sets, micro-batches included."""
    try:
        changed = with_settings(config, settings)
        changed.check_supported(degrees.sizes)
        context_cut(changed, degrees, model)
        if whole:
            cut_into_stages(changed, degrees, model, 0)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None


def _settings(one: Candidate, free: Collection[str]) -> dict[str, Any]:
    """What a candidate sets of what is free, by SECTION.KEY."""
    flat = one.flat_settings() | {f"parallelism.{axis}_size": one.degrees.size(axis) for axis in AXES}
    return {key: flat[key] for key in sorted(free) if key in flat}


def _of(one: Plan, free: Collection[str], hardware: Hardware) -> Predicted:
    """What is predicted of a plan, and what it sets of what is free."""
    exposed, step = one.prediction.exposed, one.prediction.seconds
    rides, experts = exposed.get("dispatch", 0.0) + exposed.get("combine", 0.0), exposed.get("experts", 0.0)
    kinds = {"rides": rides, "experts": experts, "rest": step.middle - rides - experts}
    return Predicted(
        one.candidate.label,
        _settings(one.candidate, free),
        (1e3 * step.low, 1e3 * step.middle, 1e3 * step.high),
        {kind: 1e3 * seconds for kind, seconds in kinds.items()},
        # What is in use beside tensors is counted for GPUs.
        one.memory.tensors if hardware.name == "cpu" else one.memory.total,
        one.memory.tensors,
    )


def _policies(config: Config, free: Collection[str]) -> list[Mapping[str, str]]:
    """Those that a run can have, of what is not kept."""
    open_items = {key.split(".")[1] for key in free if key.startswith("memory.")}
    fixed = {item: way for item, way in config.memory.policies.items() if item not in open_items and way != "save"}
    return [{**one, **fixed} for one in (Space.policies if open_items else ({},)) if set(one) <= open_items]


def _moves_state(config: Config, free: Collection[str]) -> bool:
    moves = "host" in config.training.ablest_optimizer().places
    return "training.optimizer_offload" in free and moves and config.placement.every is None


def _may_consume(config: Config, free: Collection[str]) -> bool:
    """Whether updates are the same if each gradient is used in the backward."""
    training = config.training
    moves = config.placement.every is not None or not config.moe.in_order
    able = training.ablest_optimizer().in_backward
    return "training.optimizer_in_backward" in free and able and not (training.max_grad_norm or moves)


def _why_none(found: Found, memory: int) -> str:
    most = sorted(found.refused.items(), key=lambda one: -one[1])[:3]
    refused = "; ".join(f"{why} ({number})" for why, number in most)
    if found.counts.get("predicted"):
        return f"no plan that fits can be run: {refused}"
    least = ""
    if found.least_memory != float("inf"):
        least = f" The configuration that needs least takes {found.least_memory / 2**30:.1f} GiB of a rank."
    return (
        f"no plan fits into {memory / 2**30:.1f} GiB of a rank.{least} Leave more to the plan (memory=auto), or use "
        f"more ranks{f'. Not allowed: {refused}' if refused else ''}"
    )


def _get(dumped: Mapping[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return dumped[section][name]


# Steps that are not measured, because they compile, capture and find their room; and those that are.
SKIPPED, MEASURED = 3, 7
# A plan must be so much faster, after correction, to be named.
WORTH = 0.03


def measured_beside(plan: Planned, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the first steps of this process (their records) say of a plan, as plain values: None until there are
    enough."""
    taken, counted = plan.taken, steps[SKIPPED : SKIPPED + MEASURED]
    if len(counted) < MEASURED:
        return None
    step = statistics.median(one["step_ms"] for one in counted)
    peak = max(one["memory_peak_bytes"] for one in counted)
    found: dict[str, Any] = {"step_ms": step, "memory_bytes": peak, "exposed_share": None, "factors": {}}
    parts = [one.get("ms") or {} for one in counted]
    if all({"dispatch", "experts", "combine"} <= set(one) for one in parts):
        rides = statistics.median(one["dispatch"]["total"] + one["combine"]["total"] for one in parts)
        experts = statistics.median(one["experts"]["total"] for one in parts)
        measured = {"rides": rides, "experts": experts, "rest": step - rides - experts}
        found["exposed_share"] = rides / step
        found["factors"] = {
            kind: measured[kind] / own for kind, own in taken.kinds_ms.items() if own > 0 and measured[kind] > 0
        }
    else:
        found["factors"] = dict.fromkeys(taken.kinds_ms, step / taken.step_ms[1])
    factors = found["factors"]
    found["others_ms"] = {
        one.label: sum(factors.get(kind, 1.0) * ms for kind, ms in one.kinds_ms.items()) for one in plan.others
    }
    return found


def describe(plan: Planned, measured: Mapping[str, Any]) -> list[str]:
    """Predicted beside measured, for the log."""
    taken, step = plan.taken, measured["step_ms"]
    low, likely, high = taken.step_ms
    share = measured["exposed_share"]
    lines = [
        f"plan: a step takes {step:,.1f} ms, and {likely:,.1f} ({low:,.0f} to {high:,.0f}) were predicted; memory "
        f"{measured['memory_bytes'] / 2**30:.2f} GiB, predicted {taken.tensor_bytes / 2**30:.2f}"
        + ("" if share is None else f"; exposed rides {share:.0%}, predicted {taken.exposed_share:.0%}")
    ]
    others = measured["others_ms"]
    if others and (best := min(others, key=others.__getitem__)) and others[best] < (1 - WORTH) * step:
        settings = next(one.settings for one in plan.others if one.label == best)
        changed = [f"{key}={value}" for key, value in settings.items() if value != taken.settings.get(key)]
        lines.append(
            f"plan: corrected by what was measured, {best} would take {others[best]:,.1f} ms: a new run with "
            f"{' '.join(changed)} would show it"
        )
    return lines
