"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from itertools import pairwise

from carpool.parallel.degrees import Degrees
from carpool.planner.model.shape import LayerShape, ModelShape


def layer_ranges(layers: int, parts: int) -> list[range]:
    """Which layers each part has: equally many, the first parts one more if they do not divide."""
    each, more = divmod(layers, parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def stage_layers(shape: ModelShape, degrees: Degrees, of_rank: int = 1) -> list[tuple[LayerShape, ...]]:
    """The layers of each stage of a pipeline.

    Args:
        of_rank: stages that each rank has."""
    parts = layer_ranges(len(shape.layers), degrees.pp * of_rank)
    return [shape.layers[one.start : one.stop] for one in parts]
