"""What copies of experts take on a rank, predicted: a part of the estimate of memory (`carpool.train.estimate.memory`).

A layer whose slots are not its homes fills them anew: weights of all its slots, homes among them, are kept until its
backward. What came from other ranks is kept for the whole step, in all layers, and serves every micro-batch
(`carpool.parallel.slot_steps`). On several nodes a rank also gets what others of its node want
(`carpool.parallel.node_slots`). Gradients that are late are there from a layer's backward to its next one: those that
were sent, those that came, and those of own slots.
"""

from __future__ import annotations

from typing import NamedTuple

from carpool.layout.layouts import Layouts
from carpool.parallel.degrees import Degrees
from carpool.train.config.schema import Config


class Copies(NamedTuple):
    """Bytes: of a layer's slots; of what came for slots, in all layers; and of gradients on their way, in all."""

    slots: float = 0.0
    arrived: float = 0.0
    late: float = 0.0


def most_copies(config: Config) -> int:
    """Of experts, on a rank that has room for them."""
    copies = config.placement.replicas if config.placement.every is not None else 0
    if config.moe.layout != "contiguous":
        file = Layouts.load(config.moe.layout)
        for layout in [file.same] if file.same is not None else file.values():
            pairs = zip(layout.slots, layout.homes, strict=True)
            copies = max(copies, *(len(slots) - len(homes) for slots, homes in pairs))
    return copies


def copies_of(config: Config, degrees: Degrees, row: float, rows: int, layers: int, nodes: int) -> Copies:
    """With as many copies on each rank as there is room for.

    Args:
        row: bytes of an expert's weights in a layer, or of a slice of it, as it computes.
        rows: experts of a layer, or slices.
        layers: with experts.
        nodes: on which the ranks of an expert-parallel group are."""
    copies = most_copies(config)
    homes = -(-rows // degrees.expert_ranks)
    away = rows - homes
    copies = min(copies, away)
    if copies <= 0:
        return Copies()
    # For others of the node; where every rank wants all, it wants these itself.
    held = min(copies, (nodes - 1) * homes) * (1 - copies / away)
    # FSDP that divides a rank's experts, and tiers, wait for gradients.
    waits = not config.placement.prefetch or degrees.efsdp > 1 or config.memory.experts != "device"
    late = 0.0 if waits else layers * (2 * copies + min(homes, copies)) * row
    return Copies((homes + copies) * row, layers * (copies + held) * row, late)
