"""The contract of an expert computation, and what an expert computes.

    partial_R = sum over the row's slots s of  weight_Rs * (down_s @ activation(up_s @ x_R + up_bias_s) + down_bias_s)

accumulated in float32 and rounded once to the dtype of `partial_RH`. The routing weight is applied where the
expert is, so that one row per (token, rank) can go back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from carpool.memory.arena import Arena, Rows
from carpool.transport.base import Arrivals


class ExpertWeights(NamedTuple):
    """Weights of this rank's slots. F1 is 2F for gated experts ([gate; up]), else F.

    Attributes:
        up_SFH: (S, F1, H), or (S, H, F1) if the function is `transposed`.
        down_SHF: (S, H, F), or (S, F, H) if `transposed`.
        up_bias_SF: (S, F1) or None.
        down_bias_SH: (S, H) or None.
    """

    up_SFH: torch.Tensor
    down_SHF: torch.Tensor
    up_bias_SF: torch.Tensor | None = None
    down_bias_SH: torch.Tensor | None = None


@dataclass(frozen=True)
class ExpertFunction:
    """What an expert computes apart from its weights.

    Attributes:
        activation: (P, F1) -> (P, F), differentiable, row by row. Gated activations take [gate, up] side by side,
            or however the weights have them.
        transposed: weights are stored (in, out) instead of (out, in).
    """

    activation: Callable[[torch.Tensor], torch.Tensor]
    transposed: bool = False


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda h: F.relu(h).square(),
}


def make_activation(name: str, gated: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """`act(h)`, or for gated experts `act(gate) * up` of h = [gate, up] (SwiGLU: Shazeer, arXiv 2002.05202)."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not known; use one of {', '.join(ACTIVATIONS)}")
    act = ACTIVATIONS[name]
    if not gated:
        return act

    def glu(h_PF1: torch.Tensor) -> torch.Tensor:
        gate_PF, up_PF = h_PF1.chunk(2, dim=-1)
        return act(gate_PF) * up_PF

    return glu


class Experts(Protocol):
    """Computes partial sums of arrived rows, forward and backward, without autograd.

    Whoever calls keeps the arrived rows x for the backward; the experts keep the rest."""

    name: str

    def forward(
        self, arrivals: Arrivals, weights: ExpertWeights, partial_RH: torch.Tensor, arena: Arena | None = None
    ) -> tuple[Any, ...]:
        """Write the partial sum of every row into `partial_RH`; return what backward needs besides x.

        Args:
            arena: where to keep what has one row per pair, if `arrivals.num_pairs` is only a bound.
        """
        ...

    def backward(
        self,
        saved: tuple[Any, ...],
        x: Rows,
        weights: ExpertWeights,
        dpartial_RH: torch.Tensor,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, ExpertWeights | None]:
        """Write the rows' gradients into `dx_RH`; return (dweight_RJ float32, gradients of the weights).

        Args:
            saved: what `forward` returned: tensors, `Rows`, or None.
            x: the rows that arrived in the forward, kept by the caller.

        Gradients of the weights are None if not needed."""
        ...
