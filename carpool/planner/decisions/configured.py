"""A configuration of `carpool train` (sections and keys, with their defaults), as the planner has it. What a run
decides for itself is decided here by the model of costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from carpool.layout.topology import Topology
from carpool.optim import find_optimizer
from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import SCHEDULES
from carpool.planner.candidate import POLICIES, Candidate, Spare, by_settings
from carpool.planner.decisions.rules import compiled_by_rule, data_parallel_by_rule
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.peak import memory_of
from carpool.planner.transports import automatic_transport, foreseen_unfit

DEFAULT_CHUNKS = 2  # as of `carpool train`
# What is read of a configuration, here and for the mesh; nothing else changes what is predicted.
SIMULATED = frozenset((
    *(f"model.{key}" for key in (
        "path", "config", "model_type", "num_experts_per_tok", "dtype", "attn_implementation",
    )),
    *(f"data.{key}" for key in ("sequence_length", "packing", "pad_to")),
    *(f"training.{key}" for key in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "optimizer", "optimizer_state_dtype",
        "optimizer_offload", "optimizer_in_backward", "max_grad_norm", "torch_compile", "max_steps", "cuda_graphs",
        "full_determinism",
    )),
    *(f"parallelism.{key}" for key in (
        "num_ranks", "fsdp_size", "tp_size", "cp_size", "pp_size", "pp_schedule", "dp_replicate_size", "ep_size",
        "etp_size", "data_parallel", "ranks_per_node", "hardware",
    )),
    *(f"moe.{key}" for key in (
        "transport", "schedule", "chunks", "backward_chunks", "experts", "priority", "spare_slots", "balance_limit",
        "spare_weights",
    )),
    *(f"codec.{key}" for key in ("dispatch", "combine", "dispatch_backward", "combine_backward", "inter_node")),
    *(f"memory.{key}" for key in (*POLICIES, "budget", "experts")),
    "placement.every", "adapter.kind",
))  # fmt: skip
_CODECS = ("dispatch", "combine", "dispatch_backward", "combine_backward", "inter_node")
Settings = Mapping[str, Mapping[str, Any]]


def model_of(settings: Settings, keys: Mapping[str, Any]) -> ModelShape:
    """Sizes of the configuration's model, from the keys of its config.json.

    Raises:
        ValueError: a size is missing, or there are no experts."""
    model = settings["model"]
    keys = {**keys, "model_type": keys.get("model_type") or model["model_type"]}
    attention = model["attn_implementation"]
    unfused = settings["parallelism"]["cp_size"] > 1 or settings["training"]["full_determinism"]
    shape = ModelShape.read(keys, attention)
    if attention is None and shape.sinks and unfused:
        # As `carpool.train.blueprint.attention_of`.
        shape = ModelShape.read(keys, "eager")
    top_k = model["num_experts_per_tok"]
    return shape if top_k is None else replace(shape, top_k=top_k)


def candidate_of(
    settings: Settings, degrees: Degrees, shape: ModelShape, hardware: Hardware, per_node: int
) -> tuple[Candidate, dict[str, str]]:
    """(the configuration as the planner has it, what it has in place of what a run decides for itself: key -> why).

    Args:
        per_node: GPUs of a node.

    Raises:
        ValueError: there are fewer layers than stages."""
    _check_stages(settings["parallelism"]["pp_schedule"], degrees.pp, len(shape.layers))
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
        data_parallel=settings["parallelism"]["data_parallel"],
        policies={item: memory[item] or "save" for item in POLICIES},
        moments=training["optimizer_state_dtype"],
        optimizer=_optimizer(settings),
        optimizer_offload=training["optimizer_offload"],
        optimizer_in_backward=training["optimizer_in_backward"],
        max_grad_norm=training["max_grad_norm"],
        compiled=training["torch_compile"] in ("on", True),
        eager=by_settings(settings, ranks=degrees.world_size // degrees.tp),
        experts="fp8" if moe["experts"] == "fp8" else "grouped",
        pipeline=settings["parallelism"]["pp_schedule"],
        stored=stored,
        computed=2 if bf16 else stored,
        codecs={key: value for key in _CODECS if (value := settings["codec"][key]) not in ("none", "all")},
        spare=Spare.of(moe),
        peers=hardware.nvlink is not None,
    )
    if memory["budget"] is not None:
        notes["memory.budget"] = "not simulated: policies that it leaves open are 'save'"
    if found.transport == "auto":
        transport, why = _transport(found, shape, hardware, per_node)
        found = replace(found, transport=decided("moe.transport", "auto", transport, why))
    if training["torch_compile"] == "auto":
        # How non-expert parameters lie follows from memory, and that from what is compiled.
        known = found if found.data_parallel != "auto" else replace(found, data_parallel="fsdp")
        on, reason = compiled_by_rule(settings, shape, hardware, known, per_node)
        found = replace(
            found, compiled=decided("training.torch_compile", "auto", "on" if on else "off", reason) == "on"
        )
    if found.data_parallel == "auto":
        whole = replace(found, data_parallel="zero1")
        data_parallel, why = data_parallel_by_rule(
            degrees, moe["priority"], lambda: memory_of(shape, whole).total, hardware.capacity
        )
        found = replace(found, data_parallel=decided("parallelism.data_parallel", "auto", data_parallel, why))
    return found, notes


def _check_stages(schedule: str, pp: int, layers: int) -> None:
    stages = pp * SCHEDULES[schedule].stages if pp > 1 else 1
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages: lower parallelism.pp_size, or take a pp_schedule "
            "with one stage on each rank (GPipe, 1F1B)"
        )


def _optimizer(settings: Settings) -> str:
    """The name of what updates parameters: as `carpool train` decides "auto"."""
    training, dtype = settings["training"], settings["model"]["dtype"] or "float32"
    moments, place = training["optimizer_state_dtype"], training["optimizer_offload"]
    return find_optimizer(training["optimizer"], dtype, moments, place, training["optimizer_in_backward"]).name


def _transport(candidate: Candidate, shape: ModelShape, hardware: Hardware, per_node: int) -> tuple[str, str]:
    """What a run would take for "auto" on such GPUs."""
    degrees = candidate.degrees
    node_of = tuple(rank // per_node for rank in range(degrees.world_size))
    group = Topology(node_of, node_of, "the settings").of(degrees.ranks_along(0, "ep", "etp"))
    return automatic_transport(
        degrees.expert_ranks, shape.top_k, foreseen_unfit(group, hardware, shape.hidden), group, hidden=shape.hidden,
        element_size=candidate.computed, tokens=candidate.rank_tokens, hardware=hardware, limited=False,
    )  # fmt: skip
