"""Experts as two grouped matrix products over rows sorted by slot.

    arrivals      row 0 wants slots 1 and 0, row 1 wants slot 1          slot_RJ = [[1, 0], [1, -1]]
    pairs         sorted by slot, then by row: (row 0, slot 0), (row 0, slot 1), (row 1, slot 1)
    offsets       where each slot's pairs end: [1, 3]
    h = x[row] @ up[slot],  y = act(h) @ down[slot],  partial[row] += weight * y in the order of pairs

The forward keeps the rows, the pre-activation h, the weights and the order, and nothing else. The activation and
the output of the down projection are not kept: with dA = gather(dpartial) @ down (not yet weighted), the routing
weight's gradient is the row sum of dA * A, and A is computed again from h (SonicMoE, arXiv 2512.14080, section 3).
Weight gradients are grouped products over the pairs; row gradients are summed in float32, in the order of pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from carpool.experts.base import ExpertFunction, ExpertWeights
from carpool.memory.arena import Arena, Rows
from carpool.ordered_sum import ordered_sum
from carpool.transport.base import Arrivals


class GroupedExperts:
    """See the module's docstring. Uses `torch.nn.functional.grouped_mm` where it can, a loop of products elsewhere."""

    name = "grouped"

    def __init__(self, function: ExpertFunction) -> None:
        self.function = function

    def forward(
        self, arrivals: Arrivals, weights: ExpertWeights, partial_RH: torch.Tensor, arena: Arena | None = None
    ) -> tuple[Any, ...]:
        x_RH, slot_RJ, weight_RJ = arrivals.x_RH, arrivals.slot_RJ, arrivals.weight_RJ
        order_P, offsets_S = sort_pairs(slot_RJ, weights.up_SFH.shape[0], arrivals.num_pairs)
        row_P = order_P // slot_RJ.shape[1]
        slot_P = slot_RJ.reshape(-1)[order_P]
        weight_P1 = weight_RJ.reshape(-1)[order_P].unsqueeze(1)
        up_SHF, down_SFH = self._in_out(weights)

        h_PF = grouped_mm(x_RH[row_P], up_SHF, offsets_S)
        if weights.up_bias_SF is not None:
            h_PF += weights.up_bias_SF[slot_P]
        y_PH = grouped_mm(self.function.activation(h_PF), down_SFH, offsets_S)
        if weights.down_bias_SH is not None:
            y_PH += weights.down_bias_SH[slot_P]
        partial_RH.copy_(ordered_sum(y_PH, row_P, x_RH.shape[0], weight_P1.squeeze(1)))
        return slot_RJ, weight_RJ, h_PF, order_P, offsets_S

    def backward(
        self,
        saved: tuple[Any, ...],
        x: Rows,
        weights: ExpertWeights,
        dpartial_RH: torch.Tensor,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, ExpertWeights | None]:
        slot_RJ, weight_RJ, h_PF, order_P, offsets_S = saved
        x_RH = x.contiguous(slot_RJ.shape[0])
        row_P = order_P // slot_RJ.shape[1]
        slot_P = slot_RJ.reshape(-1)[order_P]
        weight_P1 = weight_RJ.reshape(-1)[order_P].unsqueeze(1)
        up_SHF, down_SFH = self._in_out(weights)

        dy_PH = dpartial_RH[row_P].to(h_PF.dtype)
        dA_PF = grouped_mm(dy_PH, down_SFH.transpose(1, 2), offsets_S)
        with torch.enable_grad():
            h_PF = h_PF.detach().requires_grad_()
            a_PF = self.function.activation(h_PF)
        dweight_P = (dA_PF * a_PF.detach()).sum(1, dtype=weight_P1.dtype)
        if weights.down_bias_SH is not None:
            dweight_P += (dy_PH * weights.down_bias_SH[slot_P]).sum(1, dtype=weight_P1.dtype)
        (dh_PF,) = torch.autograd.grad(a_PF, h_PF, (dA_PF * weight_P1).to(a_PF.dtype))
        dx_RH.copy_(ordered_sum(grouped_mm(dh_PF, up_SHF.transpose(1, 2), offsets_S), row_P, x_RH.shape[0]))
        # Every pair is one entry, so nothing is added here: a scatter is as deterministic as a copy.
        dweight_RJ = torch.zeros_like(weight_RJ).view(-1).scatter_(0, order_P, dweight_P).view_as(weight_RJ)
        if not needs_dweights:
            return dweight_RJ, None

        scaled_dy_PH = (dy_PH * weight_P1).to(h_PF.dtype)
        dup = grouped_outer(dh_PF, x_RH[row_P], offsets_S)
        ddown = grouped_outer(scaled_dy_PH, a_PF.detach(), offsets_S)
        if self.function.transposed:
            dup, ddown = dup.transpose(1, 2), ddown.transpose(1, 2)
        slots = offsets_S.shape[0]
        dup_bias = None if weights.up_bias_SF is None else ordered_sum(dh_PF, slot_P, slots).to(dh_PF.dtype)
        ddown_bias = None if weights.down_bias_SH is None else ordered_sum(scaled_dy_PH, slot_P, slots).to(dh_PF.dtype)
        return dweight_RJ, ExpertWeights(dup, ddown, dup_bias, ddown_bias)

    def _in_out(self, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights as (S, in, out), which is how grouped products read them."""
        if self.function.transposed:
            return weights.up_SFH, weights.down_SHF
        return weights.up_SFH.transpose(1, 2), weights.down_SHF.transpose(1, 2)


def sort_pairs(slot_RJ: torch.Tensor, num_slots: int, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order the (row, column) entries by slot, then by row.

    Returns:
        order_P: (P,) int64 indices into the flattened slot_RJ.
        offsets_S: (S,) int32, where each slot's pairs end.

    Example: slot_RJ = [[1, 0], [1, -1]], 2 slots, 3 pairs  ->  order [1, 0, 2], offsets [1, 3]
    """
    flat = slot_RJ.reshape(-1).long()
    key = torch.where(flat < 0, num_slots, flat)
    order_P = torch.argsort(key, stable=True)[:num_pairs]
    counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    return order_P, counts[:num_slots].cumsum(0).int()


def grouped_mm(x_PI: torch.Tensor, weight_SIO: torch.Tensor, offsets_S: torch.Tensor) -> torch.Tensor:
    """(P, I) rows grouped by slot times (S, I, O): (P, O), every row a product with its slot's matrix."""
    if _takes(x_PI, weight_SIO.shape[2], offsets_S):
        return F.grouped_mm(x_PI.contiguous(), weight_SIO, offs=offsets_S)
    out = x_PI.new_empty(x_PI.shape[0], weight_SIO.shape[2])
    for slot, (start, end) in enumerate(_ranges(offsets_S)):
        torch.mm(x_PI[start:end], weight_SIO[slot], out=out[start:end])
    return out


def grouped_outer(a_PM: torch.Tensor, b_PN: torch.Tensor, offsets_S: torch.Tensor) -> torch.Tensor:
    """For each slot the product a^T b over its rows: (S, M, N); zero for a slot without rows."""
    if _takes(a_PM, b_PN.shape[1], offsets_S):
        return F.grouped_mm(a_PM.contiguous().t(), b_PN.contiguous(), offs=offsets_S)
    out = a_PM.new_zeros(offsets_S.shape[0], a_PM.shape[1], b_PN.shape[1])
    for slot, (start, end) in enumerate(_ranges(offsets_S)):
        torch.mm(a_PM[start:end].t(), b_PN[start:end], out=out[slot])
    return out


def _takes(rows: torch.Tensor, width: int, offsets_S: torch.Tensor) -> bool:
    """Whether `F.grouped_mm` takes these: its dtypes, rows aligned to 16 bytes on both sides, and some work (on CUDA
    it divides by the number of groups and of rows)."""
    dtypes = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(size * rows.element_size() % 16 == 0 for size in (rows.shape[1], width))
    return rows.dtype in dtypes and aligned and rows.shape[0] > 0 and offsets_S.shape[0] > 0


def _ranges(offsets_S: torch.Tensor) -> list[tuple[int, int]]:
    ends = offsets_S.tolist()
    return list(zip([0, *ends], ends, strict=False))
