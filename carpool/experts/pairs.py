"""Operations of experts on (token, slot) pairs: sorting, gathering, activations, sums, and products of the library.

A pair is an entry of slot_RJ that is not -1: an arrived token and one of the slots that it chose. Sorted by slot,

    slot_RJ        [[1, 0], [1, -1]]        token 0 chose slots 1 and 0, token 1 chose slot 1
    order_P        [1, 0, 2]                entries of slot_RJ by slot, then by token; entry // J is the pair's token
    offsets_S      [1, 3]                   end of each slot's pairs; the last is the number of pairs
    position_RJ    [[1, 0], [2, -1]]        the inverse: position of each entry in this order

the pairs of a slot are contiguous, as grouped products need them, and sums over a token's pairs use `position_RJ`, in
the order of columns.

Only the device may know the number of pairs. Then P is a bound, values past offsets_S[-1] are undefined and must not be
read, and the work must not be proportional to P. So functions here have two implementations: on CUDA a kernel that
reads the count from device memory; elsewhere plain PyTorch, which defines the result, and needs an exact P, because on
a CPU the host can count (`count_pairs`). `grouped_mm` and `grouped_outer` are PyTorch's products; those that are fused
with other operations are in `gemm/grouped_products.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from carpool.activations import Arena, HiddenStates
from carpool.experts.base import Activation, ActivationFunction
from carpool.kernels.device import ordered_sum


class Pairs(NamedTuple):
    """See the module's docstring; all int32 and contiguous.

    Attributes:
        slot_RJ: (R, J), the sorted entries.
        order_P: (P,) indices into the flattened slot_RJ; 0 past the count.
        offsets_S: (S,).
        position_RJ: (R, J), -1 where there is no pair.
    """

    slot_RJ: torch.Tensor
    order_P: torch.Tensor
    offsets_S: torch.Tensor
    position_RJ: torch.Tensor

    @property
    def row_P(self) -> torch.Tensor:
        return self.order_P // max(1, self.slot_RJ.shape[1])

    @property
    def slot_P(self) -> torch.Tensor:
        return self.slot_RJ.reshape(-1)[self.order_P]

    @property
    def count_1(self) -> torch.Tensor:
        """(1,) the number of pairs, on the device."""
        return self.offsets_S[-1:] if self.offsets_S.shape[0] else self.offsets_S.new_zeros(1)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the kernels are used."""
    return tensor.is_cuda


def count_pairs(slot_RJ: torch.Tensor, bound: int) -> int:
    """P: on CUDA the bound, because counting would wait for the device; elsewhere the number of pairs."""
    return bound if on_gpu(slot_RJ) else int((slot_RJ >= 0).sum())


def sort_pairs(slot_RJ: torch.Tensor, num_slots: int, num_pairs: int) -> Pairs:
    """Sort the (token, column) entries by slot, then by token.

    Args:
        slot_RJ: (R, J) int32, -1: none.
        num_pairs: P, an upper bound of the number of pairs. Limited to the number of entries.

    Example: slot_RJ = [[1, 0], [1, -1]], 2 slots, 4 pairs  ->  order [1, 0, 2, 0], offsets [1, 3], position
    [[1, 0], [2, -1]]
    """
    slot_RJ = slot_RJ.contiguous()
    entries = slot_RJ.numel()
    num_pairs = min(num_pairs, entries)
    if on_gpu(slot_RJ) and entries and num_slots:
        from carpool.experts import sort_kernel

        return Pairs(slot_RJ, *sort_kernel.sort_pairs(slot_RJ, num_slots, num_pairs))
    flat = slot_RJ.reshape(-1).long()
    key = torch.where(flat < 0, num_slots, flat)
    order = torch.argsort(key, stable=True)
    counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    place = torch.arange(entries, dtype=torch.int32, device=flat.device)
    position = torch.empty_like(place).scatter_(0, order, place)
    order_P = torch.where(flat[order] < 0, 0, order)[:num_pairs].int()
    position_RJ = torch.where(flat < 0, -1, position).view_as(slot_RJ)
    return Pairs(slot_RJ, order_P, counts[:num_slots].cumsum(0).int(), position_RJ)


def gather_rows(rows: HiddenStates, pairs: Pairs, dtype: torch.dtype) -> torch.Tensor:
    """(P, width): the hidden state of each pair's token, in `dtype`."""
    if on_gpu(rows.data):
        from carpool.experts import pair_kernels

        return pair_kernels.gather_rows(rows, pairs.order_P, pairs.offsets_S, pairs.slot_RJ.shape[1], dtype)
    return rows.contiguous(pairs.slot_RJ.shape[0])[pairs.row_P].to(dtype)


def activate(
    activation: ActivationFunction,
    h_PF1: torch.Tensor,
    bias_SF: torch.Tensor | None,
    pairs: Pairs,
    arena: Arena | None,
) -> tuple[torch.Tensor, HiddenStates]:
    """(a_PF = activation(h + bias), the saved h + bias): in the arena if there is one, else in h_PF1's memory."""
    width = h_PF1.shape[1]
    kept = HiddenStates(h_PF1, width) if arena is None else arena.reserve(width, h_PF1.dtype, pairs.count_1)
    if on_gpu(h_PF1):
        from carpool.experts import activation_kernels

        if isinstance(activation, Activation):
            return activation_kernels.activate(activation, h_PF1, bias_SF, *pairs[:3], kept), kept
        if bias_SF is not None:
            activation_kernels.activate(None, h_PF1, bias_SF, *pairs[:3], HiddenStates(h_PF1, width))
        if arena is not None:
            activation_kernels.activate(None, h_PF1, None, *pairs[:3], kept)
        return activation(h_PF1), kept
    if bias_SF is not None:
        h_PF1 += bias_SF[pairs.slot_P]
    if kept.start is not None and (start := int(kept.start)) >= 0:
        # `.data`: autograd must not see other layers' saved activations in the arena as modified.
        kept.data.data[start : start + h_PF1.numel()].copy_(h_PF1.reshape(-1))
    return activation(h_PF1), kept


def activate_backward(
    activation: ActivationFunction,
    h: HiddenStates,
    dA_PF: torch.Tensor,
    dy_PH: torch.Tensor,
    bias_SH: torch.Tensor | None,
    weight_RJ: torch.Tensor,
    pairs: Pairs,
    wants_scaled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From dA = dy @ down, not yet weighted, and a computed again from h:

    Returns:
        dh_PF1: weight * dA * activation'(h).
        scaled_PF: weight * a, for the down projection's gradient; empty without `wants_scaled`.
        dweight_RJ: of each pair <dA, a> + <dy, down bias>, zero where there is no pair.
    """
    if on_gpu(dA_PF) and isinstance(activation, Activation):
        from carpool.experts import activation_kernels

        return activation_kernels.activate_backward(
            activation, h, dA_PF, dy_PH, bias_SH, weight_RJ, *pairs[:3], wants_scaled
        )
    weight_P1 = weight_RJ.reshape(-1)[pairs.order_P].unsqueeze(1)
    with torch.enable_grad():
        h_PF1 = h.contiguous(dA_PF.shape[0]).detach().requires_grad_()
        a_PF = activation(h_PF1)
    (dh_PF1,) = torch.autograd.grad(a_PF, h_PF1, (dA_PF * weight_P1).to(a_PF.dtype))
    a_PF = a_PF.detach()
    scaled_PF = (a_PF * weight_P1).to(a_PF.dtype) if wants_scaled else a_PF[:0]
    dweight_P = (dA_PF * a_PF).sum(1, dtype=weight_RJ.dtype)
    if bias_SH is not None and bias_SH.shape[0]:
        dweight_P += (dy_PH * bias_SH[pairs.slot_P]).sum(1, dtype=weight_RJ.dtype)
    return dh_PF1, scaled_PF, _to_entries(dweight_P, pairs)


def _to_entries(value_P: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """(R, J): each pair's value at its entry, zero elsewhere."""
    if value_P.shape[0] == 0:
        return value_P.new_zeros(pairs.slot_RJ.shape)
    return torch.where(pairs.position_RJ < 0, 0, value_P[pairs.position_RJ.clamp(min=0)])


def sum_pairs(
    values_PH: torch.Tensor,
    pairs: Pairs,
    out_RH: torch.Tensor,
    all_rows: bool,
    weight_RJ: torch.Tensor | None = None,
    bias_SH: torch.Tensor | None = None,
) -> None:
    """out[token] = sum over the token's pairs of weight * (value + bias[slot]), in float32 and in a fixed order.

    Args:
        out_RH: any floating dtype; written in place, rounded once.
        all_rows: whether tokens without pairs get zero. If not, their outputs are undefined.
    """
    if on_gpu(values_PH):
        from carpool.experts import pair_kernels

        into_RH = out_RH.contiguous()
        pair_kernels.sum_pairs(values_PH, pairs.position_RJ, into_RH, weight_RJ, bias_SH, pairs.slot_RJ, all_rows)
        if into_RH is not out_RH:
            out_RH.copy_(into_RH)
        return
    if bias_SH is not None:
        values_PH = values_PH + bias_SH[pairs.slot_P]
    weight_P = None if weight_RJ is None else weight_RJ.reshape(-1)[pairs.order_P]
    out_RH.copy_(ordered_sum(values_PH, pairs.row_P, out_RH.shape[0], weight_P))


def slot_sums(values_PF: torch.Tensor, pairs: Pairs, weight_RJ: torch.Tensor | None = None) -> torch.Tensor:
    """(S, F), in values' dtype: for each slot the sum of weight * value over its pairs, in a fixed order."""
    if on_gpu(values_PF):
        from carpool.experts import pair_kernels

        return pair_kernels.slot_sums(values_PF, pairs.order_P, pairs.offsets_S, weight_RJ)
    weight_P = None if weight_RJ is None else weight_RJ.reshape(-1)[pairs.order_P]
    return ordered_sum(values_PF, pairs.slot_P, pairs.offsets_S.shape[0], weight_P).to(values_PF.dtype)


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
    size = rows.element_size()
    aligned = rows.shape[1] * size % 16 == 0 and width * size % 16 == 0
    return rows.dtype in dtypes and aligned and rows.shape[0] > 0 and offsets_S.shape[0] > 0


def _ranges(offsets_S: torch.Tensor) -> list[tuple[int, int]]:
    ends = offsets_S.tolist() if offsets_S.shape[0] else []  # the host waits here, on CUDA
    return list(zip([0, *ends], ends, strict=False))


def why_host_waits(experts: object, weights: torch.Tensor) -> str | None:
    """Why the host waits for the device on CUDA while these experts compute, so that no CUDA graph can hold them; None:
    it does not.

    Args:
        weights: one of their stacked matrices."""
    if getattr(experts, "counts_on_host", False):
        return f"experts {getattr(experts, 'name', None)!r} ask the host how many rows each of them has"
    if weights.dtype != torch.bfloat16 or any(size % 8 for size in weights.shape[-2:]):
        kind = str(weights.dtype).removeprefix("torch.")
        sizes = " x ".join(map(str, weights.shape[-2:]))
        return f"PyTorch's grouped product takes bfloat16 and multiples of 8, and experts are {sizes} in {kind}"
    return None
