"""The stages of `carpool.experts.fp8`, each with two sides: a kernel on CUDA, and the definition in plain PyTorch here.

As in `carpool.experts.pairs`, the definition wants P to be exact, and on CUDA it may be a bound: what lies past the
count on the device is neither read nor written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from carpool.activations import Arena, HiddenStates
from carpool.experts.base import Activation
from carpool.experts.pairs import Pairs, gather_rows, on_gpu
from carpool.kernels import FP8_MAX, GROUP
from carpool.kernels.packets import FP8, SMALLEST, quantise, unpack


class Quantised(NamedTuple):
    """A matrix of codes and its scales; columns are filled up with zeros to a multiple of 128.

    Attributes:
        code: (P, K) of pairs, or (S, N, K) of slots' weights; float8_e4m3fn.
        scale: (P, K / 128), or (S, N / 128, K / 128); float32.
    """

    code: torch.Tensor
    scale: torch.Tensor


class Columns(NamedTuple):
    """How the F1 outputs of an up projection lie in h: `parts` (gate and up, or one) of F columns each."""

    parts: int
    inner: int
    interleaved: bool

    @property
    def padded(self) -> int:
        """Columns of one part of h."""
        return padded(self.inner)

    def spread(self, values_SF1: torch.Tensor) -> torch.Tensor:
        """(S, F1, ...) as the parameter has it -> (S, columns of h, ...), zeros between."""
        slots, _, *rest = values_SF1.shape
        if self.interleaved:
            parts = values_SF1.reshape(slots, self.inner, self.parts, *rest).transpose(1, 2)
        else:
            parts = values_SF1.reshape(slots, self.parts, self.inner, *rest)
        out = values_SF1.new_zeros(slots, self.parts, self.padded, *rest)
        out[:, :, : self.inner] = parts
        return out.flatten(1, 2)

    def gather(self, values_SW: torch.Tensor) -> torch.Tensor:
        """The inverse of `spread`; a view where nothing has to move."""
        parts = values_SW.unflatten(1, (self.parts, self.padded))[:, :, : self.inner]
        return (parts.transpose(1, 2) if self.interleaved else parts).flatten(1, 2)


def padded(size: int) -> int:
    """Rounded up to whole groups."""
    return -(-size // GROUP) * GROUP


class Weight(NamedTuple):
    """Codes of blocks of 128 x 128 of a projection, O spread as the columns of h, both sides filled up with zeros.

    Attributes:
        straight: (S, O, I), for the forward.
        turned: (S, I, O), for the backward: the same codes and scales. Either is None if it was not asked for.
    """

    straight: Quantised | None
    turned: Quantised | None


def quantise_weight(weight_SOI: torch.Tensor, columns: Columns, straight: bool, turned: bool) -> Weight:
    """The codes of a weight, read once and written as stored, transposed, or both."""
    if on_gpu(weight_SOI):
        from carpool.experts.fp8 import quantise_kernels as fp8_kernels

        codes = fp8_kernels.quantise_weight(weight_SOI, *columns, straight, turned)
        return Weight(*(None if one is None else Quantised(*one) for one in codes))
    inner = weight_SOI.shape[2]
    spread_SNK = F.pad(columns.spread(weight_SOI.float()), (0, padded(inner) - inner))
    blocks = spread_SNK.unflatten(2, (-1, GROUP)).unflatten(1, (-1, GROUP)).transpose(2, 3)  # (S, N/128, K/128, n, k)
    scale = blocks.abs().amax((3, 4)).clamp(min=SMALLEST) / FP8_MAX
    code = (blocks * (1.0 / scale)[..., None, None]).to(FP8).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return Weight(
        Quantised(code, scale) if straight else None,
        Quantised(code.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()) if turned else None,
    )


def up_and_activate(
    activation: Activation,
    rows: HiddenStates,
    hidden: int,
    up: Quantised,
    bias_SW: torch.Tensor | None,
    pairs: Pairs,
    dtype: torch.dtype,
    arena: Arena | None,
) -> tuple[Quantised, HiddenStates]:
    """(a, h): h = rows @ up + bias in `dtype`, as it is kept, in the arena if there is one; a = act(h) quantised.

    Args:
        rows: packets of `hidden` columns.
    """
    num_pairs, width = pairs.order_P.shape[0], up.code.shape[1]
    if on_gpu(rows.data):
        from carpool.experts.fp8 import gemm_kernels as fp8_gemm_kernels

        h_PW = torch.empty(num_pairs if arena is None else 0, width, dtype=dtype, device=rows.data.device)
        h = HiddenStates(h_PW, width) if arena is None else arena.reserve(width, dtype, pairs.count_1)
        a = fp8_gemm_kernels.up_and_activate(activation, rows, hidden, *up, bias_SW, pairs.slot_RJ, *pairs[1:3], h)
        return Quantised(*a), h
    h_PW = _product(_widened(rows, hidden, pairs), up, pairs)
    if bias_SW is not None:
        h_PW += bias_SW[pairs.slot_P].float()
    h_PW = h_PW.to(dtype)
    h = HiddenStates(h_PW, width)
    if arena is not None:
        h = arena.reserve(width, dtype, pairs.count_1)
        assert h.start is not None
        if (start := int(h.start)) >= 0:
            # `.data`: what other layers keep in the arena must not look modified to autograd.
            h.data.data[start : start + h_PW.numel()].copy_(h_PW.reshape(-1))
    return Quantised(*quantise(_in_halves(activation)(h_PW.float()))), h


def product(x: Quantised, weight: Quantised, pairs: Pairs, out_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """(P, out_columns) in `dtype`: each pair's row times its slot's matrix (N, K), the first columns of N."""
    if on_gpu(x.code):
        from carpool.experts.fp8 import gemm_kernels as fp8_gemm_kernels

        return fp8_gemm_kernels.product(*x, *weight, pairs.offsets_S, out_columns, dtype)
    return _product(x.code.float() * x.scale.repeat_interleave(GROUP, 1), weight, pairs)[:, :out_columns].to(dtype)


def gathered_product(
    rows: HiddenStates, hidden: int, weight: Quantised, pairs: Pairs, out_columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """As `product`, of packets of `hidden` columns."""
    if on_gpu(rows.data):
        from carpool.experts.fp8 import gemm_kernels as fp8_gemm_kernels

        return fp8_gemm_kernels.gathered_product(rows, hidden, *weight, pairs.slot_RJ, *pairs[1:3], out_columns, dtype)
    return _product(_widened(rows, hidden, pairs), weight, pairs)[:, :out_columns].to(dtype)


def gather_wide(rows: HiddenStates, hidden: int, pairs: Pairs, dtype: torch.dtype) -> torch.Tensor:
    """(P, hidden): each pair's row in `dtype`, be they packets or not."""
    if rows.data.dtype != torch.uint8:
        return gather_rows(rows, pairs, dtype)
    if on_gpu(rows.data):
        from carpool.experts.fp8 import quantise_kernels as fp8_kernels

        return fp8_kernels.gather_wide(rows, hidden, pairs.slot_RJ, *pairs[1:3], dtype)
    return _widened(rows, hidden, pairs).to(dtype)


def activate_backward(
    activation: Activation,
    columns: Columns,
    h: HiddenStates,
    dA_PF: torch.Tensor,
    dy_PH: torch.Tensor | None,
    bias_SH: torch.Tensor | None,
    weight_RJ: torch.Tensor,
    pairs: Pairs,
    wants_wide: bool,
) -> tuple[Quantised, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From dA = dy @ down, not yet weighted, and a computed again from h:

    Returns:
        dh: weight * dA * act'(h), quantised as columns of h.
        dh_PW: the same, not quantised; empty unless wanted.
        scaled_PF: weight * a, F columns, for the down projection's gradient; empty unless wanted.
        dweight_RJ: of each pair <dA, a> + <dy, down bias>, zero where there is no pair.
    """
    if on_gpu(dA_PF):
        from carpool.experts.fp8 import quantise_kernels as fp8_kernels

        dh, dh_PW, scaled_PF, dweight_RJ = fp8_kernels.activate_backward(
            activation, columns.inner, h, dA_PF, dy_PH, bias_SH, weight_RJ, *pairs[:3], wants_wide
        )
        return Quantised(*dh), dh_PW, scaled_PF, dweight_RJ
    weight_P1 = weight_RJ.reshape(-1)[pairs.order_P].unsqueeze(1).float()
    with torch.enable_grad():
        h_PW = h.contiguous(dA_PF.shape[0]).detach().float().requires_grad_()
        a_PF = _in_halves(activation)(h_PW)
    (dh_PW,) = torch.autograd.grad(a_PF, h_PW, dA_PF.float() * weight_P1)
    a_PF = a_PF.detach()
    dweight_P = (dA_PF.float() * a_PF).sum(1)
    if bias_SH is not None:
        assert dy_PH is not None
        dweight_P += (dy_PH * bias_SH[pairs.slot_P]).sum(1, dtype=torch.float32)
    dweight_RJ = torch.zeros_like(weight_RJ)
    dweight_RJ.view(-1)[pairs.order_P.long()] = dweight_P.to(weight_RJ.dtype)
    rows = dA_PF.shape[0] if wants_wide else 0
    scaled_PF = (a_PF * weight_P1)[:rows, : columns.inner].to(dA_PF.dtype)
    return Quantised(*quantise(dh_PW)), dh_PW[:rows].to(dA_PF.dtype), scaled_PF, dweight_RJ


def _in_halves(activation: Activation) -> Activation:
    """The same on the columns of h, which are in order."""
    fields = {name: getattr(activation, name) for name in activation.__dataclass_fields__}
    return Activation(**fields | {"interleaved": False})


def _widened(rows: HiddenStates, hidden: int, pairs: Pairs) -> torch.Tensor:
    """(P, hidden) float32 of packets, in plain PyTorch."""
    return unpack(rows.contiguous(pairs.slot_RJ.shape[0])[pairs.row_P], hidden)


def _product(x_PK: torch.Tensor, weight: Quantised, pairs: Pairs) -> torch.Tensor:
    """(P, N) float32 in plain PyTorch."""
    out_PN = x_PK.new_zeros(x_PK.shape[0], weight.code.shape[1])
    begin = 0
    for slot, end in enumerate(pairs.offsets_S.tolist()):
        scale_NK = weight.scale[slot].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        weight_NK = weight.code[slot].float() * scale_NK
        out_PN[begin:end] = x_PK[begin:end] @ weight_NK[:, : x_PK.shape[1]].t()
        begin = end
    return out_PN
