"""Slices of experts (expert tensor parallelism): cutting experts' parameters into slices, and joining them.

A slice is a part of F, an expert's hidden dimension (`carpool.layout.ExpertLayout`). With it the expert's function is

    down @ act(up @ x + up_bias) + down_bias  =  sum over slices i of  down_i @ act(up_i @ x + up_bias_i), + down_bias

because the activation is elementwise. `up_i` are the rows of up for the slice, of both gate and up for gated experts,
and `down_i` the columns of down. Each slice has a row of the stacked parameters. The bias of down belongs to the first
slice; that of the others is zero, and `weights_of_slices` excludes it from training.

    gate and up of an expert, F = 4    [g0 g1 g2 g3 u0 u1 u2 u3]
    in 2 slices                        [g0 g1 u0 u1] and [g2 g3 u2 u3]         a plain cut would separate gate and up
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from carpool.experts.base import Activation, ExpertFunction, ExpertWeights


def check_slices(function: ExpertFunction | None, inner: int, slices: int, name: str) -> None:
    """Raise ValueError if experts cannot be cut into `slices`.

    Args:
        function: None: only the owner's own forward implements it.
        inner: F.
        name: of the owner, for errors."""
    if slices == 1:
        return
    if function is None or not isinstance(function.activation, Activation):
        raise ValueError(
            f"{name} computes its experts by a function of its own, and which of its columns belong together is not "
            f"known: its experts cannot be cut into {slices} slices; use expert parallelism alone (etp_size = 1)"
        )
    if inner % slices:
        divisors = [n for n in range(1, inner + 1) if inner % n == 0]
        raise ValueError(
            f"the experts of {name} have a hidden dimension of {inner}, which {slices} slices do not divide; the "
            f"number of slices can be one of {', '.join(map(str, divisors))}"
        )


def cut(field: str, rows_E: torch.Tensor, slices: int, function: ExpertFunction) -> torch.Tensor:
    """(E, ...) whole experts -> (E * slices, ...), slice i of expert e in row e * slices + i.

    Args:
        field: of `ExpertWeights`: up_SFH, down_SHF, or their biases. Optimizer state is cut like its parameter."""
    if slices == 1:
        return rows_E
    if field == "down_bias_SH":
        out = rows_E.new_zeros(rows_E.shape[0], slices, *rows_E.shape[1:])
        out[:, 0] = rows_E
        return out.flatten(0, 1)
    dim, halves = _columns(field, function)
    apart = rows_E.unflatten(dim, (halves, slices, rows_E.shape[dim] // (halves * slices)))
    return apart.movedim(dim + 1, 1).flatten(dim + 1, dim + 2).flatten(0, 1)


def join(field: str, rows: torch.Tensor, slices: int, function: ExpertFunction) -> torch.Tensor:
    """The inverse of `cut`: (E * slices, ...) -> (E, ...)."""
    if slices == 1:
        return rows
    apart = rows.unflatten(0, (rows.shape[0] // slices, slices))
    if field == "down_bias_SH":
        return apart[:, 0]
    dim, halves = _columns(field, function)
    apart = apart.unflatten(dim + 1, (halves, apart.shape[dim + 1] // halves))
    return apart.movedim(1, dim + 1).flatten(dim, dim + 2)


def _columns(field: str, function: ExpertFunction) -> tuple[int, int]:
    """(the dimension that is cut, how many halves it has that are cut each): gate and up, unless they alternate."""
    assert isinstance(function.activation, Activation)
    halves = 2 if function.activation.gated and not function.activation.interleaved else 1
    match field:
        case "up_SFH":
            return (2 if function.transposed else 1), halves
        case "up_bias_SF":
            return 1, halves
        case "down_SHF":
            return (1 if function.transposed else 2), 1
    raise ValueError(f"{field} has no columns of slices")


def weights_of_slices(weights: ExpertWeights, first_S1: torch.Tensor) -> ExpertWeights:
    """The weights of a rank's slices, as experts compute by them, differentiable.

    Args:
        first_S1: bool, whether each is the first slice of its expert.

    Raises:
        ValueError: experts with adapters or quantised weights, which cannot be sliced."""
    if weights.adapted or weights.quantised:
        what = "adapters" if weights.adapted else "a quantised base"
        raise ValueError(f"experts with {what} cannot be cut into slices: use expert parallelism alone (etp_size = 1)")
    if weights.down_bias_SH is None:
        return weights
    # The biases of other slices than the first are zero, but would get a gradient each.
    return weights._replace(down_bias_SH=_OfFirstSlices.apply(weights.down_bias_SH, first_S1))


class _OfFirstSlices(torch.autograd.Function):
    """Zeros for other slices than the first. Autograd saves nothing: a product would save its factor, and a deferred
    weight gradient (`carpool.ride.setup`) would cause another recomputation of a checkpointed layer."""

    @staticmethod
    def forward(ctx: Any, rows_SH: torch.Tensor, first_S1: torch.Tensor) -> torch.Tensor:
        ctx.first_S1 = first_S1
        return rows_SH * first_S1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_SH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return drows_SH * ctx.first_S1, None
