"""Experts with few tokens, computed by the CPU from parameters in host memory, while the device computes the others.

An expert of Qwen3-30B-A3B has 9.4 MB, which take 0.17 ms from host memory over 55 GB/s. For two tokens the CPU is
faster, because it only has to read the parameters:

    expert 0    410 tokens    its parameters are copied to the device, which computes it
    expert 1      2 tokens    its 2 tokens are copied to the CPU, and their outputs back

    tokens to the CPU | the device computes the other experts
                      | the CPU computes its experts            | its outputs are added to the device's

The experts of the CPU are chosen before the computation, by their number of tokens alone
(`carpool_systems.cpu_experts`), so that a repeated step has the same choice. A partial output is the device's share,
rounded, plus the CPU's in float32: equal to a computation on the device up to rounding, and deterministic.

The CPU also computes the backward of frozen experts. Trained experts are on the device for their update; the device
then computes the backward of the CPU's tokens, expert by expert, from saved tokens.

APTMoE (SC 2024) chooses between CPU and GPU by the time of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from carpool.activations import Arena, Arrivals, HiddenStates
from carpool.experts.base import NUM_BASE, NUM_TRAINED, ExpertFunction, Experts, ExpertWeights
from carpool.experts.pairs import Pairs, gather_rows
from carpool.experts.reference import expert_rows

CPU = torch.device("cpu")


class FewOnHost:
    """See the module's docstring.

    Args:
        inner: computes all other experts; one of `beside`.
        few: returns the slots that the CPU computes in the current forward.
        host: returns the matrices and biases of a slot in host memory.
    """

    beside = ("grouped", "reference")
    computes_adapters = True
    counts_on_host = True

    def __init__(
        self,
        inner: Experts,
        function: ExpertFunction,
        few: Callable[[], Sequence[int]],
        host: Callable[[int], ExpertWeights],
    ) -> None:
        self.name, self.inner, self.function, self._few, self._host = inner.name, inner, function, few, host

    def forward(
        self,
        arrivals: Arrivals,
        weights: ExpertWeights,
        partial_RH: torch.Tensor,
        arena: Arena | None = None,
        backward: bool = True,
    ) -> tuple[Any, ...]:
        slot_RJ, slots = arrivals.slot_RJ, list(self._few())
        slots_s = torch.tensor(slots, dtype=slot_RJ.dtype)
        if not slots:
            none = slot_RJ.new_empty(0, dtype=torch.int64), slot_RJ[:0], arrivals.weight_RJ[:0], slots_s, slot_RJ
            return *none, *self.inner.forward(arrivals, weights, partial_RH, arena, backward)
        few_RJ = torch.isin(slot_RJ, slots_s.to(slot_RJ.device))
        others = replace(arrivals, slot_RJ=torch.where(few_RJ, -1, slot_RJ))
        row_r = few_RJ.any(1).nonzero().squeeze(1)
        slot_rJ, weight_rJ = torch.where(few_RJ[row_r], slot_RJ[row_r], -1), arrivals.weight_RJ[row_r]
        # Copied to the CPU before the device gets more work.
        given = _take(arrivals.tokens, slot_RJ, row_r).to(CPU), slot_rJ.to(CPU), weight_rJ.to(CPU)
        experts = self._experts(slots, weights, CPU, here=False)
        saved = self.inner.forward(others, weights, partial_RH, arena, backward)
        with torch.no_grad():
            _add(partial_RH, row_r, _sums(*given, experts, self.function), others.slot_RJ)
        return row_r, slot_rJ, weight_rJ, slots_s, others.slot_RJ, *saved

    def backward(
        self,
        saved: tuple[Any, ...],
        x: HiddenStates,
        weights: ExpertWeights,
        dpartial: HiddenStates,
        dx_RH: torch.Tensor,
        needs_dweights: bool,
    ) -> tuple[torch.Tensor, Callable[[], ExpertWeights] | None]:
        row_r, slot_rJ, weight_rJ, slots_s, others_RJ, *of_inner = saved
        if not len(row_r):
            return self.inner.backward(tuple(of_inner), x, weights, dpartial, dx_RH, needs_dweights)
        where, slots = dx_RH.device if needs_dweights else CPU, slots_s.tolist()
        given = _take(x, others_RJ, row_r).to(where), weight_rJ.to(where)
        dpartial_rH = _take(dpartial, others_RJ, row_r).to(where)
        experts = self._experts(slots, weights, where, here=needs_dweights)
        dweight_RJ, last = self.inner.backward(tuple(of_inner), x, weights, dpartial, dx_RH, needs_dweights)
        leaves = {
            (slot, field): tensor.requires_grad_()
            for slot, one in experts.items()
            for field, tensor in enumerate(one[:NUM_TRAINED])
            if tensor is not None and (needs_dweights or field >= NUM_BASE)
        }
        with torch.enable_grad():
            x_rH, weight_rJ = (tensor.detach().requires_grad_() for tensor in given)
            sum_rH = _sums(x_rH, slot_rJ.to(where), weight_rJ, experts, self.function)
            wanted = [x_rH, weight_rJ, *leaves.values()]
            dx_rH, dweight_rJ, *found = torch.autograd.grad(sum_rH, wanted, dpartial_rH.to(sum_rH.dtype))
        _add(dx_RH, row_r, dx_rH, others_RJ)
        dweight_RJ[row_r] += dweight_rJ.to(dweight_RJ)
        if last is None:
            return dweight_RJ, None

        def finish() -> ExpertWeights:
            dweights = last()
            # Gradients of slots without tokens on the device are zero.
            for (slot, field), gradient in zip(leaves, found, strict=True):
                whole = dweights[field]
                assert whole is not None
                whole[slot] = gradient.to(whole)
            return dweights

        return dweight_RJ, finish

    def _experts(
        self, slots: Sequence[int], weights: ExpertWeights, where: torch.device, here: bool
    ) -> dict[int, ExpertWeights]:
        """The weights of these slots, with their adapters. `here`: matrices are on the device; else in host memory."""
        found = {}
        for slot in slots:
            own = ExpertWeights.of(None if w is None else w[slot].detach() for w in weights[:NUM_TRAINED])
            bases = own[:NUM_BASE] if here else self._host(slot)[:NUM_BASE]
            factors = (None if w is None else w.to(where) for w in own[NUM_BASE:NUM_TRAINED])
            found[slot] = ExpertWeights.of((*bases, *factors))
        return found


def _take(rows: HiddenStates, slot_RJ: torch.Tensor, row_r: torch.Tensor) -> torch.Tensor:
    """The tokens of these rows. (A buffer may have many more rows than tokens.)"""
    entry_r = (row_r * slot_RJ.shape[1]).int()
    count_1 = entry_r.new_full((1,), len(entry_r))
    return gather_rows(rows, Pairs(slot_RJ, entry_r, count_1, slot_RJ), rows.data.dtype)


def _sums(
    x_rH: torch.Tensor,
    slot_rJ: torch.Tensor,
    weight_rJ: torch.Tensor,
    experts: Mapping[int, ExpertWeights],
    function: ExpertFunction,
) -> torch.Tensor:
    """As `reference_experts`, for these experts."""
    accumulate = torch.float64 if x_rH.dtype == torch.float64 else torch.float32
    sum_rH = torch.zeros_like(x_rH, dtype=accumulate)
    for slot, one in experts.items():
        row_p, column_p = (slot_rJ == slot).nonzero(as_tuple=True)
        y_pH = expert_rows(x_rH[row_p], one, function).to(accumulate)
        sum_rH = sum_rH.index_add(0, row_p, y_pH * weight_rJ[row_p, column_p].to(accumulate).unsqueeze(1))
    return sum_rH


def _add(out_RH: torch.Tensor, row_r: torch.Tensor, sum_rH: torch.Tensor, others_RJ: torch.Tensor) -> None:
    """Add to some rows, of which those without another slot may be uninitialised."""
    there_r1 = (others_RJ[row_r] >= 0).any(1, keepdim=True)
    before_rH = torch.where(there_r1, out_RH[row_r], 0)
    out_RH[row_r] = (before_rH + sum_rH.to(out_RH.device)).to(out_RH.dtype)
