"""Cases of benchmarks: every shape with every routing; what contenders are given, and a row for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from rich.console import Console

from carpool.bench.options import ShapeOptions
from carpool.bench.routings import make_routings
from carpool.layout import ExpertLayout
from carpool.routing import Routing

R = TypeVar("R")


@dataclass(kw_only=True)
class Row:
    """One contender of a case.

    Attributes:
        lossy: what changes the answer beyond rounding.
        unavailable: why it could not run; then all else is empty.
        error: the largest error, as a share of what is allowed.
        sections: times by what was timed.
    """

    label: str
    lossy: tuple[str, ...] = ()
    unavailable: str | None = None
    error: float | None = None
    sections: dict[str, Any] = field(default_factory=dict)


def measure_cases(settings: ShapeOptions, measure: Callable[[Any, str], R]) -> list[R]:
    """Measure every shape with every routing; the results in the order of the settings.

    Buffers of `nvlink` grow and never shrink: small shapes come first, so that each has buffers of its size."""
    results = {
        (shape, kind): measure(shape, kind)
        for shape in sorted(settings.shapes, key=lambda shape: shape.tokens)
        for kind in settings.routings
    }
    return [results[shape, kind] for shape in settings.shapes for kind in settings.routings]


def draw_routings(settings: ShapeOptions, shape: Any, kind: str, num_ranks: int) -> tuple[ExpertLayout, list[Routing]]:
    """Experts in order, and the routing of each rank's tokens. `shape` has tokens, experts and top_k."""
    layout, exponent = ExpertLayout.contiguous(shape.experts, num_ranks), settings.zipf_exponent
    return layout, make_routings(kind, shape.tokens, shape.top_k, layout, seed=settings.seed, zipf_exponent=exponent)


def draw_rows(
    tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, seed: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_TH and dy_TH: normal random numbers, other ones on each rank."""
    generator = torch.Generator(device).manual_seed(7919 * (seed + 1) + rank)
    x_TH, dy_TH = torch.randn(2, tokens, hidden, generator=generator, device=device).to(dtype)
    return x_TH, dy_TH


def print_remarks(console: Console, rows: Sequence[Row]) -> None:
    """Below a table: who could not run and why, and who is lossy."""
    for row in rows:
        if row.unavailable:
            console.print(f"{row.label} is not available: {row.unavailable}\n", highlight=False, markup=False)
        if row.lossy:
            console.print(f"{row.label} is lossy: {', '.join(row.lossy)}\n", highlight=False, markup=False)
