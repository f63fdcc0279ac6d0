"""Why forward and backward of a step are not CUDA graphs: asked in many places, answered here.

    a plan                    `Candidate.why_eager`: by its transport, by FSDP, and by all else that plans vary
    an estimate, a dry run    the same of the run's own candidate, whose `eager` is what its settings and its model say
    a run                     by what was built, and otherwise by the same rules (`carpool.train.steps.graphs`)

Time and memory that are predicted follow from it: a graph needs the host no more, and keeps its memory between steps
(`carpool.planner.step.lengths`, `carpool.planner.memory.peak`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FSDP = "FSDP gathers parameters layer by layer from the host (parallelism.data_parallel)"
FSDP_SHARDS = "FSDP gathers experts layer by layer from the host, as several ranks share one's (parallelism.ep_size)"
FSDP_CASTS = "FSDP casts experts layer by layer from the host, as they are stored in float32 (model.dtype=bfloat16)"
FSDP_AVERAGES = "FSDP averages gradients of experts layer by layer over copies (parallelism.dp_replicate_size)"
COPIES = "experts have copies"
LENGTHS = "this attention reads the lengths of documents on the host (model.attn_implementation)"
SHAPES = "batches are as long as their longest sequence (data.pad_to=sequence_length makes all alike)"
RANDOM = "layers are computed again, and what is random in them (drop-out) asks the host for its state"
RANDOM_HALVES = "each of two batches has random numbers of its own (drop-out), and a graph has those of one"
_TIERS = {"host": "host memory", "disk": "disk"}


def of_transport(name: str | None) -> str:
    """Of one that waits for the device in each ride, to learn how many rows travel."""
    return f"transport {name} waits for the host"


def by_settings(settings: Mapping[str, Mapping[str, Any]], gpu: bool = True) -> str | None:
    """Why, by what plans do not vary; None: nothing of that speaks against it.

    Args:
        settings: sections and keys of a configuration, with their defaults.
        gpu: whether ranks have one."""
    if settings["training"]["cuda_graphs"] == "off":
        return "training.cuda_graphs = 'off'"
    if not gpu:
        return "there is no GPU"
    if settings["data"]["pad_to"] == "longest" and settings["data"]["packing"] == "off":
        return SHAPES
    if settings["placement"]["every"] is not None:
        return "experts move"
    if settings["moe"]["move_sequences"] is not None:
        return "the host decides which sequences move"
    if (tier := settings["memory"]["experts"]) != "device":
        return f"experts come from {_TIERS[tier]}"
    return None
