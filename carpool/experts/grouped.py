"""Experts as two grouped matrix products over rows sorted by slot.

    arrivals      row 0 wants slots 1 and 0, row 1 wants slot 1          slot_RJ = [[1, 0], [1, -1]]
    pairs         sorted by slot, then by row: (row 0, slot 0), (row 0, slot 1), (row 1, slot 1)
    offsets       where each slot's pairs end: [1, 3]
    h = x[row] @ up[slot],  y = act(h) @ down[slot],  partial[row] += weight * y

The forward keeps the pre-activation h, the weights and the order, the caller keeps the rows, and that is all. The
activation and the output of the down projection are not kept: with dA = gather(dpartial) @ down (not yet weighted), the
routing weight's gradient is the row sum of dA * A, and A is computed again from h (SonicMoE, arXiv 2512.14080,
section 3). Weight gradients are grouped products over the pairs; sums over a row's pairs are taken in float32 and in a
fixed order.

What surrounds the products is in `carpool.experts.pairs`: on CUDA one kernel each, but for the sort. Forward: sort,
gather x, product, activation, product, sum. Backward: gather dy, product, activation's backward, product, sum, gather
x, two grouped outer products (and the sums for biases).

Only the device may know how many pairs there are. `arrivals.num_pairs` is then a bound: temporary tensors have that
many rows, but only those that are there are read or written, h goes into an arena, and the host does not wait. With one
exception on CUDA: products of dtypes or sizes that `torch.nn.functional.grouped_mm` does not take there (anything but
bfloat16 with widths that are multiples of 8) are a loop over slots, for which the host asks where each slot ends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from carpool.experts.base import ExpertFunction, ExpertWeights
from carpool.experts.pairs import (
    Pairs,
    activate,
    activate_backward,
    count_pairs,
    gather_rows,
    slot_sums,
    sort_pairs,
    sum_pairs,
)
from carpool.memory.arena import Arena, Rows
from carpool.transport.base import Arrivals


class GroupedExperts:
    """See the module's docstring. Uses `torch.nn.functional.grouped_mm` where it can, a loop of products elsewhere."""

    name = "grouped"

    def __init__(self, function: ExpertFunction) -> None:
        self.function = function

    def forward(
        self, arrivals: Arrivals, weights: ExpertWeights, partial_RH: torch.Tensor, arena: Arena | None = None
    ) -> tuple[Any, ...]:
        weight_RJ, dtype = arrivals.weight_RJ.contiguous(), weights.up_SFH.dtype
        num_pairs = count_pairs(arrivals.slot_RJ, arrivals.num_pairs)
        pairs = sort_pairs(arrivals.slot_RJ, weights.up_SFH.shape[0], num_pairs)
        up_SHF, down_SFH = self._in_out(weights)

        h_PF = grouped_mm(gather_rows(arrivals.rows, pairs, dtype), up_SHF, pairs.offsets_S)
        a_PF, h = activate(self.function.activation, h_PF, weights.up_bias_SF, pairs, arena)
        y_PH = grouped_mm(a_PF, down_SFH, pairs.offsets_S)
        sum_pairs(y_PH, pairs, partial_RH, arrivals.sums_unwanted, weight_RJ, weights.down_bias_SH)
        # A flag of the host, in a tensor because that is what autograd saves.
        return weight_RJ, h, torch.tensor(arrivals.sums_unwanted, device="cpu"), *pairs

    def backward(
        self,
        saved: tuple[Any, ...],
        x: Rows,
        weights: ExpertWeights,
        dpartial: Rows,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, ExpertWeights | None]:
        weight_RJ, h, sums_unwanted, pairs = *saved[:3], Pairs._make(saved[3:])
        dtype, offsets_S = weights.up_SFH.dtype, pairs.offsets_S
        up_SHF, down_SFH = self._in_out(weights)

        dy_PH = gather_rows(dpartial, pairs, dtype)
        dA_PF = grouped_mm(dy_PH, down_SFH.transpose(1, 2), offsets_S)
        dh_PF, scaled_a_PF, dweight_RJ = activate_backward(
            self.function.activation, h, dA_PF, dy_PH, weights.down_bias_SH, weight_RJ, pairs, needs_dweights
        )
        del dA_PF
        sum_pairs(grouped_mm(dh_PF, up_SHF.transpose(1, 2), offsets_S), pairs, dx_RH, bool(sums_unwanted))
        if not needs_dweights:
            return dweight_RJ, None

        dup = grouped_outer(dh_PF, gather_rows(x, pairs, dtype), offsets_S)
        ddown = grouped_outer(dy_PH, scaled_a_PF, offsets_S)
        if self.function.transposed:
            dup, ddown = dup.transpose(1, 2), ddown.transpose(1, 2)
        dup_bias = None if weights.up_bias_SF is None else slot_sums(dh_PF, pairs)
        ddown_bias = None if weights.down_bias_SH is None else slot_sums(dy_PH, pairs, weight_RJ)
        return dweight_RJ, ExpertWeights(dup, ddown, dup_bias, ddown_bias)

    def _in_out(self, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights as (S, in, out), which is how grouped products read them."""
        if self.function.transposed:
            return weights.up_SFH, weights.down_SHF
        return weights.up_SFH.transpose(1, 2), weights.down_SHF.transpose(1, 2)


def grouped_mm(x_PI: torch.Tensor, weight_SIO: torch.Tensor, offsets_S: torch.Tensor) -> torch.Tensor:
    """(P, I) rows grouped by slot times (S, I, O): (P, O), every row a product with its slot's matrix. Rows past the
    last offset are garbage, in and out. On CUDA the host waits for the device unless `_takes` these."""
    if _takes(x_PI, weight_SIO.shape[2], offsets_S):
        return F.grouped_mm(x_PI.contiguous(), weight_SIO, offs=offsets_S)
    out = x_PI.new_empty(x_PI.shape[0], weight_SIO.shape[2])
    if out.shape[0] == 0:
        return out
    for slot, (start, end) in enumerate(_ranges(offsets_S)):
        torch.mm(x_PI[start:end], weight_SIO[slot], out=out[start:end])
    return out


def grouped_outer(a_PM: torch.Tensor, b_PN: torch.Tensor, offsets_S: torch.Tensor) -> torch.Tensor:
    """For each slot the product a^T b over its rows: (S, M, N); zero for a slot without rows. As `grouped_mm`."""
    if _takes(a_PM, b_PN.shape[1], offsets_S):
        return F.grouped_mm(a_PM.contiguous().t(), b_PN.contiguous(), offs=offsets_S)
    out = a_PM.new_zeros(offsets_S.shape[0], a_PM.shape[1], b_PN.shape[1])
    if a_PM.shape[0] == 0:
        return out
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
    ends = offsets_S.tolist() if offsets_S.shape[0] else []  # the host waits here, on CUDA
    return list(zip([0, *ends], ends, strict=False))
