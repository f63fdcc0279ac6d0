"""Experts in plain PyTorch: a loop over slots, differentiated by autograd. All other computations must equal it.

It is slow, and supports any dtype (float64 included) and any size. The backward repeats the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from carpool.activations import Arena, Arrivals, HiddenStates
from carpool.experts.base import NUM_BASE, NUM_TRAINED, ExpertFunction, ExpertWeights
from carpool.experts.quantised import dequantised


def reference_experts(
    x_RH: torch.Tensor,
    slot_RJ: torch.Tensor,
    weight_RJ: torch.Tensor,
    weights: ExpertWeights,
    function: ExpertFunction,
) -> torch.Tensor:
    """(R, H) partial outputs in float32 (float64 for float64 tokens); differentiable in x, weight and weights."""
    weights = dequantised(weights)
    accumulate = torch.float64 if x_RH.dtype == torch.float64 else torch.float32
    partial_RH = torch.zeros_like(x_RH, dtype=accumulate)
    for slot in range(weights.up_SFH.shape[0]):
        row_p, column_p = (slot_RJ == slot).nonzero(as_tuple=True)
        one = ExpertWeights.of(None if w is None else w[slot] for w in weights[:NUM_TRAINED])
        y_pH = expert_rows(x_RH[row_p], one, function).to(accumulate)
        partial_RH = partial_RH.index_add(0, row_p, y_pH * weight_RJ[row_p, column_p].to(accumulate).unsqueeze(1))
    return partial_RH


def expert_rows(x_pH: torch.Tensor, weights: ExpertWeights, function: ExpertFunction) -> torch.Tensor:
    """(p, H): the outputs of one expert for p tokens. `weights`: its own, without the dimension of slots."""
    up_FH, down_HF, up_bias_F, down_bias_H, up_a_QH, up_b_FQ, down_a_QF, down_b_HQ = weights[:NUM_TRAINED]
    assert up_FH is not None and down_HF is not None
    if function.transposed:
        up_FH, down_HF = up_FH.t(), down_HF.t()
    h_pF = F.linear(x_pH, up_FH, up_bias_F)
    if up_a_QH is not None and up_b_FQ is not None:
        h_pF = h_pF + F.linear(F.linear(x_pH, up_a_QH), up_b_FQ)
    a_pF = function.activation(h_pF)
    y_pH = F.linear(a_pF, down_HF, down_bias_H)
    if down_a_QF is not None and down_b_HQ is not None:
        y_pH = y_pH + F.linear(F.linear(a_pF, down_a_QF), down_b_HQ)
    return y_pH


class ReferenceExperts:
    """`reference_experts` behind the contract of `Experts`."""

    name = "reference"
    counts_on_host = True
    computes_adapters = True

    def __init__(self, function: ExpertFunction) -> None:
        self.function = function

    def forward(
        self,
        arrivals: Arrivals,
        weights: ExpertWeights,
        partial_RH: torch.Tensor,
        arena: Arena | None = None,
        backward: bool = True,
    ) -> tuple[Any, ...]:
        saved = (arrivals.slot_RJ, arrivals.weight_RJ)
        partial_RH.copy_(
            reference_experts(arrivals.tokens.contiguous(saved[0].shape[0]), *saved, weights, self.function)
        )
        return saved

    def backward(
        self,
        saved: tuple[Any, ...],
        x: HiddenStates,
        weights: ExpertWeights,
        dpartial: HiddenStates,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, Callable[[], ExpertWeights] | None]:
        slot_RJ, weight_RJ = saved
        x_RH, dpartial_RH = x.contiguous(slot_RJ.shape[0]), dpartial.contiguous(slot_RJ.shape[0])
        with torch.enable_grad():
            x_RH, weight_RJ = x_RH.detach().requires_grad_(), weight_RJ.detach().requires_grad_()
            leaves = [None if w is None else w.detach() for w in dequantised(weights)]
            wanted = [w is not None and (needs_dweights or i >= NUM_BASE) for i, w in enumerate(leaves)]
            given = [w.requires_grad_() for w, want in zip(leaves, wanted, strict=True) if w is not None and want]
            partial_RH = reference_experts(x_RH, slot_RJ, weight_RJ, ExpertWeights._make(leaves), self.function)
            if not partial_RH.requires_grad:
                # A rank without slots computes nothing, but must participate, because other ranks wait for it.
                dx_RH.zero_()
                zeros = iter([torch.zeros_like(w) for w in given])
                none = ExpertWeights._make(next(zeros) if want else None for want in wanted)
                return torch.zeros_like(weight_RJ), lambda: none
            dx, dweight_RJ, *dgiven = torch.autograd.grad(
                partial_RH, [x_RH, weight_RJ, *given], dpartial_RH.to(partial_RH.dtype), materialize_grads=True
            )
        dx_RH.copy_(dx)
        gradients = iter(dgiven)
        dweights = ExpertWeights._make(next(gradients) if want else None for want in wanted)
        return dweight_RJ, lambda: dweights
