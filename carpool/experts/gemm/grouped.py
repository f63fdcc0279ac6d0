"""Experts as two grouped matrix products over rows sorted by slot.

    arrivals      row 0 wants slots 1 and 0, row 1 wants slot 1          slot_RJ = [[1, 0], [1, -1]]
    pairs         sorted by slot, then by row: (row 0, slot 0), (row 0, slot 1), (row 1, slot 1)
    offsets       where each slot's pairs end: [1, 3]
    h = x[row] @ up[slot],  y = act(h) @ down[slot],  partial[row] += weight * y

The forward keeps the pre-activation h, the weights and the order, the caller keeps the rows, and that is all. The
activation and the output of the down projection are not kept: with dA = gather(dpartial) @ down (not yet weighted), the
routing weight's gradient is the row sum of dA * A, and A is computed again from h (SonicMoE, arXiv 2512.14080,
section 3). With `recompute` h is not kept either: the backward computes it again from the rows. Weight gradients are
grouped products over the pairs; sums over a row's pairs are taken in float32 and in a fixed order.

The work is in six stages (`carpool.experts.gemm.products`), each with two implementations that `Choices` picks from:

    forward     sort, up, down, sum
    backward    dact, dx, sum, dup, ddown      (and the sums for biases)

The library's side of a stage is PyTorch's grouped product between kernels that gather, activate and so on; the fused
side is one kernel that does all of it and reads rows where they lie.

Adapters (`carpool.experts.base`) are two thin products over the same sorted rows, beside each of the four that rows go
through: one before it, and one inside it, with which its sums begin (`adapter_kernels.py`). Gradients of adapters are
four thin products; those of frozen weights are not computed.
Matrices of a quantised base are dequantised for each product and let go after it (`carpool.experts.quantised`).

Only the device may know how many pairs there are. `arrivals.num_pairs` is then a bound: temporary tensors have that
many rows, but only those that are there are read or written, h goes into an arena, and the host does not wait. With one
exception on CUDA: products of dtypes or sizes that `torch.nn.functional.grouped_mm` does not take there (anything but
bfloat16 with widths that are multiples of 8) are a loop over slots, for which the host asks where each slot ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from carpool.activations import Arena, Arrivals, Rows
from carpool.experts.base import NUM_BASE, ExpertFunction, ExpertWeights
from carpool.experts.gemm.choices import Choices
from carpool.experts.gemm.products import Stages
from carpool.experts.pairs import Pairs, count_pairs, slot_sums, sort_pairs, sum_pairs


class GroupedExperts:
    """See the module's docstring.

    Args:
        choices: how each stage is computed, where its kernels take the dtype and the sizes; default: by the shape.
        recompute: do not keep the pre-activation, compute it again in the backward.
    """

    name = "grouped"
    computes_adapters = True
    options = ("choices", "recompute")

    def __init__(self, function: ExpertFunction, choices: Choices | None = None, recompute: bool = False) -> None:
        self.function, self.choices, self.recompute = function, choices, recompute

    def forward(
        self,
        arrivals: Arrivals,
        weights: ExpertWeights,
        partial_RH: torch.Tensor,
        arena: Arena | None = None,
        backward: bool = True,
    ) -> tuple[Any, ...]:
        weight_RJ = arrivals.weight_RJ.contiguous()
        num_pairs = count_pairs(arrivals.slot_RJ, arrivals.num_pairs)
        pairs = sort_pairs(arrivals.slot_RJ, weights.up_SFH.shape[0], num_pairs)
        stages = Stages(self.function, weights, pairs, self.choices)

        keep = backward and not self.recompute
        a_PF, h = stages.up(arrivals.rows, arena, keep)
        y_PH = stages.down(a_PF)
        sum_pairs(y_PH, pairs, partial_RH, not arrivals.rows.gaps, weight_RJ, weights.down_bias_SH)
        return weight_RJ, h if keep else None, *(stages.tiles or (None, None)), *pairs

    def backward(
        self,
        saved: tuple[Any, ...],
        x: Rows,
        weights: ExpertWeights,
        dpartial: Rows,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, Callable[[], ExpertWeights] | None]:
        weight_RJ, h, *tiles = saved[:4]
        pairs = Pairs._make(saved[4:])
        stages = Stages(self.function, weights, pairs, self.choices, None if tiles[0] is None else tuple(tiles))

        if h is None:
            _, h = stages.up(x, None, keep=True, wants_a=False)
        needs_any = needs_dweights or weights.adapted
        dh_PF1, scaled_a_PF, dweight_RJ = stages.dact(h, dpartial, weight_RJ, needs_any)
        del h
        sum_pairs(stages.dx(dh_PF1), pairs, dx_RH, not x.gaps)
        if not needs_any:
            return dweight_RJ, None

        of_down = stages.down_adapter_gradients(dpartial, scaled_a_PF)
        ddown = ddown_bias = None
        if needs_dweights:
            ddown = stages.ddown(dpartial, scaled_a_PF)
            ddown_bias = None if weights.down_bias_SH is None else slot_sums(stages.dy(dpartial), pairs, weight_RJ)

        def finish() -> ExpertWeights:
            of_up = stages.up_adapter_gradients(dh_PF1, x)
            if not needs_dweights:
                return ExpertWeights.of((None,) * NUM_BASE + of_up + of_down)
            dup_bias = None if weights.up_bias_SF is None else slot_sums(dh_PF1, pairs)
            return ExpertWeights.of((stages.dup(dh_PF1, x), ddown, dup_bias, ddown_bias, *of_up, *of_down))

        return dweight_RJ, finish
