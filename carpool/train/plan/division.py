"""How a model is divided over the ranks of a run: its parameters, its layers, its sequences, the tokens between
its layers, and each micro-batch among ranks of different speeds.

What data-parallel ranks share (see `carpool.planner.decisions.chosen` for when it is chosen):

    parallelism.data_parallel   a run that starts                                        a run that is resumed
    auto                zero1, if it fits into memory; otherwise fsdp            as recorded in run.json
    any other           that one                                                 that one

Checkpoints are the same files under both, so a run may change this when it is resumed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from carpool.hf.context_parallel import choose_way
from carpool.hf.pipeline_stages import Part, check_tied, cut_model, layer_number
from carpool.hf.routing.router_balance import find_routers
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.tensor_parallel import why_not_sequence_parallel
from carpool.metrics.host import synchronize
from carpool.parallel.context import Cut
from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import stages_of
from carpool.planner.decisions.chosen import Chosen, Decisions, Kind, Record
from carpool.planner.decisions.rules import data_parallel_by_rule, why_not_zero1
from carpool.train.config.schema import Config
from carpool.train.data.formats import are_packed


def teacher_ep(counts: Iterable[int], ranks: int) -> int:
    """Over how many of the ranks the experts of a teacher are spread, of so many in each layer."""
    return math.gcd(ranks, *counts)


def context_cut(config: Config, degrees: Degrees, model: PreTrainedModel, rank: int = 0) -> Cut | None:
    """Which part of every sequence a rank has; None: whole ones. The model may be on the meta device.

    Raises:
        ValueError: a model, sequences or heads that cannot be divided so."""
    if degrees.cp == 1:
        return None
    way = choose_way(
        model, degrees.cp, config.data.sequence_length, config.parallelism.cp_attention, heads_divided=degrees.tp,
        packed=are_packed(config.data), implementation=config.model.attn_implementation,
    )  # fmt: skip
    return Cut(degrees.cp, degrees.coordinate(rank, "cp"), way)


class CutModel(NamedTuple):
    """How a run cuts its model into stages.

    Attributes:
        schedule: one of `carpool.parallel.schedules.SCHEDULES`.
        parts: all stages.
        own: those of this rank.
        routers: the layers that have a router with a balance loss, with the number of its experts.
        moe_layers: the names of all experts modules, in order.
    """

    schedule: str
    parts: list[Part]
    own: list[Part]
    routers: dict[int, int]
    moe_layers: list[str]


def cut_into_stages(config: Config, degrees: Degrees, blueprint: PreTrainedModel, rank: int) -> CutModel | None:
    """The stages of a run's model; None: it has one.

    Raises:
        ValueError: the model cannot be cut so, or a rank would have no layer with experts."""
    if degrees.pp == 1:
        return None
    schedule = config.parallelism.pp_schedule
    placed = stages_of(schedule, degrees.pp)
    parts = cut_model(blueprint, sum(map(len, placed)))
    experts = experts_modules(blueprint)
    numbers = {layer_number(name) for name in experts}
    for stages in placed:
        check_tied(blueprint, [parts[stage] for stage in stages])
        if not any(numbers & set(parts[stage].layers) for stage in stages):
            layers = " and ".join(f"{parts[stage].layers.start}..{parts[stage].layers.stop - 1}" for stage in stages)
            raise ValueError(
                f"a rank of the pipeline would have the layers {layers} alone, none of which has experts: lower "
                'parallelism.pp_size, or set parallelism.pp_schedule="ZBVZeroBubble" or "DualPipeV", where ranks have '
                "layers from both ends"
            )
    own = [parts[stage] for stage in placed[degrees.coordinate(rank, "pp")]]
    routers = dict.fromkeys(map(layer_number, find_routers(blueprint)), max(experts.values()))
    return CutModel(schedule, parts, own, routers, list(experts))


def distributed_config(degrees: Degrees, bf16: bool) -> DistributedConfig:
    """The mesh for transformers: FSDP2 x TP for non-expert parameters, FSDP2 x EP for experts."""
    return DistributedConfig(
        tp_size=degrees.tp,
        # Ranks that share sequences shard non-expert parameters, too.
        fsdp_size=degrees.fsdp * degrees.cp,
        dp_replicate_size=degrees.dp_replicate,
        # For transformers a slice of an expert is an expert.
        ep_size=degrees.expert_ranks,
        ep_implementation="carpool",
        fsdp_mixed_precision=bf16,
    )


SEQUENCE_KIND: Kind[bool] = Kind("sequence_parallel", lambda on: {"on": on}, lambda record: bool(record["on"]))


def divides_tokens(config: Config, degrees: Degrees, blueprint: PreTrainedModel) -> Chosen[bool]:
    """Whether tensor-parallel ranks divide their tokens among themselves (`carpool.hf.tensor_parallel`), and
    why.

    Raises:
        ValueError: that was asked for, and cannot be."""
    asked, reason = config.parallelism.sequence_parallel, None
    if degrees.tp == 1:
        reason = "there is one tensor-parallel rank"
    elif config.training.compiled:
        reason = "training.torch_compile compiles whole layers"
    elif config.training.optimizer_in_backward:
        reason = "training.optimizer_in_backward = true uses gradients before they are summed over ranks"
    else:
        reason = why_not_sequence_parallel(blueprint, degrees.ep)
    if asked == "on" and reason is not None:
        raise ValueError(f"parallelism.sequence_parallel = 'on' cannot be: {reason}; use 'auto' or 'off'")
    how = "default" if asked == "auto" else "given"
    if asked == "off" or reason is not None:
        return Chosen(False, {}, how, reason or "asked for")
    return Chosen(True, {}, how, "fewer bytes between ranks, and norms and routers are computed once")


def _read_data_parallel(record: Record) -> str:
    # A run of version 0.1 has recorded "replicate".
    name = {"replicate": "zero1"}.get(record["name"], record["name"])
    if name not in ("fsdp", "zero1"):
        raise ValueError(f"data_parallel = {name!r} is not known")
    return str(name)


DATA_PARALLEL_KIND: Kind[str] = Kind("data_parallel", lambda name: {"name": name}, _read_data_parallel)


def choose_data_parallel(
    config: Config, degrees: Degrees, predict: Callable[[str], int], memory: int, decisions: Decisions
) -> Chosen[str]:
    """Choose "fsdp" or "zero1". All ranks together.

    Args:
        predict: the bytes that a rank will need with one or the other;  memory: those that it has.

    Raises:
        ValueError: what was asked for cannot be."""
    shape: Mapping[str, Any] = {
        "requested": config.parallelism.data_parallel,
        **degrees.record(),
        "memory": memory,
        "priority": config.moe.priority,
    }

    def decide(kept: Chosen[str] | None, note: str) -> tuple[Chosen[str], bool]:
        answer, why = decide_data_parallel(config, degrees, predict, memory)
        if config.parallelism.data_parallel != "auto":
            return Chosen(answer, shape, "given", why), False
        return kept or Chosen(answer, shape, "default", why + note), False

    return decisions.choose(DATA_PARALLEL_KIND, shape, decide)


def decide_data_parallel(
    config: Config, degrees: Degrees, predict: Callable[[str], int], memory: int
) -> tuple[str, str]:
    """("fsdp" or "zero1", why), as `choose_data_parallel`, in one process and without a record."""
    wanted, reason = config.parallelism.data_parallel, why_not_zero1(degrees, config.moe.priority)
    if degrees.dp_cp > 1:
        if wanted == "zero1" and reason is not None:
            raise ValueError(f"parallelism.data_parallel = 'zero1' cannot be used here: {reason}; use 'fsdp' or 'auto'")
        if wanted != "auto":
            return wanted, "asked for"
        if reason is None and config.adapter.base_dtype is not None:
            return "zero1", "experts that are quantised are beside whole non-expert parameters"
    return data_parallel_by_rule(degrees, config.moe.priority, lambda: predict("zero1"), memory)


Speeds = tuple[float, ...]
# Of the fastest: ranks that differ by less are equally fast, and the difference is that of two measurements.
NOISE = 0.05
SIZE = {"cuda": 8192, "cpu": 768}
REPEATS = 15


SPEEDS_KIND: Kind[Speeds] = Kind(
    "rank_speeds", lambda speeds: {"speeds": list(speeds)}, lambda record: tuple(map(float, record["speeds"]))
)


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
    return config.changed("parallelism", rank_speeds=None if equal else speeds)


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
