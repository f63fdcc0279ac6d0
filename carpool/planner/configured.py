"""A configuration of `carpool train`, as the planner has it, on any number of GPUs.

settings    sections and keys of a configuration, with their defaults (`carpool.train.config`)
candidate   the same in the planner's words; what a run decides for itself is decided here by the model of costs
scaled      its degrees on another number of GPUs: every axis as it is, but for the data-parallel one that grows

fsdp 8, ep 8 on 64 GPUs    ->  fsdp 2,048, ep 8 on 16,384: parameters are sharded over all of them
fsdp 8, 8 copies on 64     ->  fsdp 8, 2,048 copies
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate
from carpool.planner.captured import by_settings
from carpool.planner.events import Group
from carpool.planner.hardware import Hardware
from carpool.planner.kept import POLICIES
from carpool.planner.lengths import Lengths
from carpool.planner.model_shape import ModelShape
from carpool.planner.peak import memory_of
from carpool.planner.sampling import Spread
from carpool.planner.simulate import Step
from carpool.planner.step_graph import step_graph
from carpool.planner.whole import dense_by_rule

DEFAULT_CHUNKS = 2  # as of `carpool train`
_CODECS = ("dispatch", "combine", "dispatch_backward", "combine_backward", "hop")
Settings = Mapping[str, Mapping[str, Any]]


def model_of(settings: Settings, keys: Mapping[str, Any]) -> ModelShape:
    """Sizes of the configuration's model.

    Args:
        keys: of its config.json.

    Raises:
        ValueError: a size is missing, or there are no experts."""
    model = settings["model"]
    keys = {**keys, "model_type": keys.get("model_type") or model["model_type"]}
    attention = model["attn_implementation"]
    unfused = settings["parallelism"]["cp_size"] > 1 or settings["training"]["full_determinism"]
    shape = ModelShape.read(keys, attention)
    if attention is None and shape.sinks and unfused:
        # As `carpool.train.run.model.attention_of`.
        shape = ModelShape.read(keys, "eager")
    top_k = model["num_experts_per_tok"]
    return shape if top_k is None else replace(shape, top_k=top_k)


def candidate_of(
    settings: Settings, degrees: Degrees, shape: ModelShape, hardware: Hardware, per_node: int
) -> tuple[Candidate, dict[str, str]]:
    """(the configuration as the planner has it, what it has in place of what a run decides for itself: key -> why).

    Args:
        per_node: GPUs of a node."""
    training, moe, memory = (settings[name] for name in ("training", "moe", "memory"))
    notes: dict[str, str] = {}

    def decided(key: str, value: Any, instead: str, why: str) -> str:
        notes[f"{key} = {value}"] = f"simulated as {instead}: {why}"
        return instead

    schedule = moe["schedule"]
    if schedule not in ("none", "chunks", "two-batch"):
        schedule = decided("moe.schedule", schedule, "none", "what runs beside rides is measured by a run")
    stored = 4 if (settings["model"]["dtype"] or "float32") == "float32" else 2
    bf16 = hardware.name != "cpu" if training["bf16"] is None else training["bf16"]
    found = Candidate(
        degrees=degrees,
        sequence_length=settings["data"]["sequence_length"],
        micro_batch=training["per_device_train_batch_size"],
        accumulation=training["gradient_accumulation_steps"],
        transport=moe["transport"],
        schedule=schedule,
        chunks=(moe["chunks"] or DEFAULT_CHUNKS) if schedule == "chunks" else 1,
        backward_chunks=moe["backward_chunks"] if schedule == "chunks" else None,
        dense=settings["parallelism"]["dense"],
        policies={item: memory[item] or "keep" for item in POLICIES},
        moments=training["optimizer_moments"],
        optimizer="one-pass" if _one_pass(settings) else "torch",
        optimizer_state=training["optimizer_state"],
        gradients=training["gradients"],
        max_grad_norm=training["max_grad_norm"],
        compiled=training["torch_compile"],
        eager=by_settings(settings),
        experts="fp8" if moe["experts"] == "fp8" else "grouped",
        pipeline=settings["parallelism"]["pp_schedule"],
        stored=stored,
        computed=2 if bf16 else stored,
        codecs={key: value for key in _CODECS if (value := settings["codec"][key]) not in ("none", "all")},
    )
    if memory["budget"] is not None:
        notes["memory.budget"] = "not simulated: policies that it leaves open are 'keep'"
    if found.transport == "auto":
        transport, why = _transport(found, shape, hardware, per_node)
        found = replace(found, transport=decided("moe.transport", "auto", transport, why))
    if found.dense == "auto":
        whole = replace(found, dense="replicate")
        dense, why = dense_by_rule(degrees, moe["priority"], lambda: memory_of(shape, whole).total, hardware.capacity)
        found = replace(found, dense=decided("parallelism.dense", "auto", dense, why))
    return found, notes


def _one_pass(settings: Settings) -> bool:
    """Whether parameters are updated by the one-pass optimizer: as `carpool train` decides "auto"."""
    training = settings["training"]
    if training["optimizer"] != "auto":
        return bool(training["optimizer"] == "one-pass")
    plain = {"optimizer_moments": "float32", "optimizer_state": "device", "gradients": "kept"}
    return settings["model"]["dtype"] == "bfloat16" or any(training[key] != value for key, value in plain.items())


def _transport(candidate: Candidate, shape: ModelShape, hardware: Hardware, per_node: int) -> tuple[str, str]:
    degrees = candidate.degrees
    if degrees.ep * degrees.etp == 1:
        return "local", "experts are on one rank"
    ways = ["dedup", "hierarchical"]
    group, inside = Lengths(shape, hardware, replace(candidate, transport="dedup"), per_node).members_per_node("ep")
    if inside == group.size:
        ways = ["nvlink" if hardware.nvlink is not None else "dedup"]
    seconds = {}
    for way in ways:
        lengths = Lengths(shape, hardware, replace(candidate, transport=way), per_node)
        piece = lengths.ride("dispatch", "dispatch", "dispatch")
        seconds[way] = 0.0 if piece is None else piece.seconds
    best = min(seconds, key=seconds.__getitem__)
    return best, f"a ride takes {1e3 * seconds[best]:.3g} ms, as modelled"


def scaled(degrees: Degrees, gpus: int) -> Degrees:
    """The degrees on so many GPUs: copies of the model grow if there are several, otherwise the ranks that shard it.

    Raises:
        ValueError: the other degrees do not divide them; names the nearest numbers that they do."""
    if degrees.dp_replicate > 1:
        unit = degrees.world_size // degrees.dp_replicate
        axis = "dp_replicate"
    else:
        inner, experts = degrees.cp * degrees.tp, degrees.ep * degrees.etp
        unit = degrees.pp * math.lcm(inner, experts)
        axis = "fsdp"
    if gpus < unit or gpus % unit:
        below, above = gpus // unit * unit, -(-gpus // unit) * unit
        nearest = f"{above:,}" if below == 0 else f"{below:,} and {above:,}"
        raise ValueError(
            f"{gpus:,} GPUs cannot be divided by {degrees}: take a multiple of {unit:,}; nearest: {nearest}"
        )
    return replace(degrees, **{axis: gpus * degrees.size(axis) // degrees.world_size})


def step_on(shape: ModelShape, hardware: Hardware, candidate: Candidate, per_node: int, gpus: int) -> Step:
    """A configuration on so many GPUs, with balanced ranks.

    Raises:
        ValueError: as `scaled`; nodes that are not whole."""
    degrees = scaled(candidate.degrees, gpus)
    per_node = min(per_node, gpus)
    if gpus % per_node:
        raise ValueError(
            f"{gpus:,} GPUs are not whole nodes of {per_node}: take a multiple of {per_node}, or change --gpus-per-node"
        )
    candidate = replace(candidate, degrees=degrees)
    lengths = Lengths(shape, hardware, candidate, per_node)
    group = lengths.members_per_node("ep")[0] if degrees.ep > 1 else Group(1)
    halves = candidate.schedule == "two-batch" and candidate.accumulation == 1
    rows = {"alltoall": "expert", "hierarchical": "node"}
    spread = Spread(
        ranks=degrees.stage_size,
        group=group,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        tokens=candidate.rank_tokens // (2 if halves else 1),
        ranks_per_node=per_node,
        one_row_for=rows.get(candidate.transport, "rank"),  # type: ignore[arg-type]
    )
    memory = memory_of(shape, candidate).total
    label = candidate.label.partition(",")[0]
    return Step(gpus, step_graph(lengths), spread, candidate.tokens, label, memory)
