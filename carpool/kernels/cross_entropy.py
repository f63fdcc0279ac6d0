"""The cross-entropy of a linear layer over a large vocabulary, without all of its logits.

A model's output layer makes a logit for each token and each entry of the vocabulary. For 8,192 tokens and 151,936
entries they are 2.5 GB in bfloat16 and 5 GB in float32, and plain PyTorch holds several such tensors at once. Here
chunks of tokens go through one after the other:

    logits of a chunk           x_CH @ weight_VH.T, in the model's dtype
    loss, and its gradient      float32; the gradient takes the place of the logits
    dx, dweight                 gradient @ weight, and += gradient.T @ x

So gradients are computed in the forward, as Liger does (arXiv 2410.10989), and the backward only scales them. What
stays in between is dx, and dweight in float32, to which each chunk is added without rounding. On a CPU, 512 tokens and
151,936 entries of 256 elements took 907 MiB and now 232 (chunks of 64 tokens), in no more time.

torch 2.13 has `torch.nn.functional.linear_cross_entropy`, with chunks too, but 2.11 has not, and its dweight is added
up in the model's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from carpool.kernels.device import on_gpu

# The label of a token that is not predicted.
IGNORED = -100
# Logits that are in memory at once, if nobody says: 1 GiB of them in bfloat16.
LOGITS = 2**29


class TokenLosses:
    """The losses of tokens by their logits; here the cross-entropy. See `cross_entropy_`.

    Attributes:
        columns: N losses of each token, of which the first is differentiated; 0: one, without a dimension.
        logits_at_once: as many are in memory, if nobody says; None: `LOGITS`.
    """

    columns = 0
    logits_at_once: int | None = None

    def __call__(self, logits_CV: torch.Tensor, target_C: torch.Tensor, chunk: slice, gradient: bool) -> torch.Tensor:
        """(C,) or (C, N) of the tokens of a chunk, float32 or float64. With `gradient`, that of the sum of them, or of
        their first column, is then where the logits were."""
        return cross_entropy_(logits_CV, target_C, gradient)


_CROSS_ENTROPY = TokenLosses()


class Layer(NamedTuple):
    """How an output layer multiplies whose frozen weight is not there as a whole: logits (C, V) of x (C, H) and a bias
    (V,) or None, and dx (C, H) of their gradient, in the dtypes of what they are given."""

    logits: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    dx: Callable[[torch.Tensor], torch.Tensor]


def linear_cross_entropy(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_T: torch.Tensor,
    tokens_at_once: int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    layer: Layer | None = None,
    losses: TokenLosses = _CROSS_ENTROPY,
) -> torch.Tensor:
    """The sum over tokens of the cross-entropy of `x_TH @ weight_VH.T + bias_V`, or of other losses of these logits.

    Products are in the dtype of x and weight, or in autocast's. All else is float32 (float64 for float64).

    Args:
        target_T: int64; `IGNORED`: this token counts nothing. Any other label outside of 0 .. V-1 is an error on the
            CPU; on a GPU the result is NaN.
        tokens_at_once: C, the tokens of a chunk. None: as many as make the logits that `losses` says.
        scale: logits are multiplied by it (Granite), in the dtype of the products.
        softcap: c; logits l are then c * tanh(l / c) (Gemma), which takes two more tensors of a chunk's size.
        layer: for which `weight_VH` is a stand-in without memory.
        losses: of tokens.

    Returns:
        A scalar, or (N,) of N losses, float32 or float64. Only first derivatives exist.
    """
    device = x_TH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TH.dtype
    if tokens_at_once is None:
        tokens_at_once = chunk_size(len(x_TH), len(weight_VH), losses.logits_at_once)
    loss: torch.Tensor = _LinearLoss.apply(
        x_TH, weight_VH, bias_V, target_T, losses, tokens_at_once, dtype, torch.is_grad_enabled(), scale, softcap, layer
    )
    return loss


def chunk_size(tokens: int, vocabulary: int, logits: int | None = None) -> int:
    """Tokens of a chunk: equal chunks of at most `logits` (`LOGITS`), in multiples of 128, which products like."""
    chunks = max(1, -(-tokens * vocabulary // (logits or LOGITS)))
    return max(1, -(-tokens // chunks // 128) * 128) if chunks > 1 else max(1, tokens)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_T: torch.Tensor,
        losses: TokenLosses,
        tokens_at_once: int,
        dtype: torch.dtype,
        gradients: bool,
        scale: float,
        softcap: float | None,
        layer: Layer | None,
    ) -> torch.Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for_x, for_weight, for_bias = (gradients and needed for needed in ctx.needs_input_grad[:3])
        shape = (len(x_TH), losses.columns) if losses.columns else (len(x_TH),)
        loss_T = torch.empty(shape, dtype=wide, device=x_TH.device)
        dx_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format) if for_x else None
        dweight_VH = torch.zeros(weight_VH.shape, dtype=wide, device=x_TH.device) if for_weight else None
        dbias_V = torch.zeros(len(weight_VH), dtype=wide, device=x_TH.device) if for_bias else None
        with torch.autocast(x_TH.device.type, enabled=False):
            bias = None if bias_V is None else bias_V.to(dtype)
            if layer is None:
                weight = weight_VH.to(dtype)
                layer = Layer(lambda x, b: F.linear(x, weight, b), lambda slope: slope @ weight)
            for start in range(0, len(x_TH), tokens_at_once):
                chunk = slice(start, start + tokens_at_once)
                x_CH = x_TH[chunk].to(dtype)
                slope_CV = layer.logits(x_CH, bias)
                slope_of_change = change_(slope_CV, scale, softcap)
                loss_T[chunk] = losses(slope_CV, target_T[chunk], chunk, for_x or for_weight or for_bias)
                if slope_of_change is not None:
                    slope_CV *= slope_of_change
                if dx_TH is not None:
                    dx_TH[chunk] = layer.dx(slope_CV)
                if dweight_VH is not None:
                    add_product(dweight_VH, slope_CV.t(), x_CH)
                if dbias_V is not None:
                    dbias_V += slope_CV.sum(0, dtype=wide)
                # Else it would be there beside the next chunk.
                del slope_CV
        ctx.save_for_backward(dx_TH, dweight_VH, dbias_V)
        ctx.dtypes = [None if given is None else given.dtype for given in (x_TH, weight_VH, bias_V)]
        return loss_T.sum(0) if losses.columns else loss_T.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled, dloss = [], dloss if dloss.ndim == 0 else dloss[0]
        for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if slope is not None:
                # In place where that is possible; autograd then refuses a second backward.
                out = slope if slope.dtype == dtype else torch.empty_like(slope, dtype=dtype)
                slope = torch.mul(slope, dloss, out=out)
            scaled.append(slope)
        return *scaled, *(None,) * 8


def change_(logits_CV: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor | float | None:
    """Scale and cap logits in place. Returns the derivative of what that does; None: it does nothing."""
    if scale != 1:
        logits_CV *= scale
    if softcap is None:
        return None if scale == 1 else scale
    slope_CV = logits_CV.div_(softcap).tanh_().square().neg_().add_(1).mul_(scale)
    logits_CV *= softcap
    return slope_CV


def cross_entropy_(logits_CV: torch.Tensor, target_C: torch.Tensor, gradient: bool) -> torch.Tensor:
    """(C,) cross-entropies of each row, float32 or float64. With `gradient`, the gradient of their sum is then where
    the logits were; without, what was there may be lost."""
    if on_gpu(logits_CV) and logits_CV.dtype != torch.float64:
        # Imported here: Triton is not needed, and maybe not there, on a machine without a GPU.
        from carpool.kernels.cross_entropy_kernel import launch

        loss_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
        launch(logits_CV, target_C.contiguous(), loss_C, IGNORED, gradient)
        return loss_C
    wide = torch.float64 if logits_CV.dtype == torch.float64 else torch.float32
    log_CV = torch.log_softmax(logits_CV, 1, dtype=wide)
    ignored_C = target_C == IGNORED
    goal_C1 = target_C.masked_fill(ignored_C, 0).unsqueeze(1)
    loss_C = -log_CV.gather(1, goal_C1).squeeze(1).masked_fill(ignored_C, 0.0)
    if gradient:
        slope_CV = log_CV.exp_()
        slope_CV.scatter_add_(1, goal_C1, slope_CV.new_full(goal_C1.shape, -1.0))
        logits_CV.copy_(slope_CV.masked_fill_(ignored_C.unsqueeze(1), 0.0))
    return loss_C


def add_product(total_VH: torch.Tensor, a_VC: torch.Tensor, b_CH: torch.Tensor) -> None:
    """`total_VH += a_VC @ b_CH`; the product is not rounded to a narrower dtype before it is added."""
    if total_VH.dtype == a_VC.dtype:
        total_VH.addmm_(a_VC, b_CH)
    elif not a_VC.is_cuda:
        total_VH.addmm_(a_VC.to(total_VH.dtype), b_CH.to(total_VH.dtype))
    elif _adds_products(a_VC.device, a_VC.dtype):
        torch.addmm(total_VH, a_VC, b_CH, out_dtype=total_VH.dtype, out=total_VH)
    else:
        total_VH += torch.mm(a_VC, b_CH, out_dtype=total_VH.dtype)


@functools.cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch adds a product of narrow matrices to a float32 one. Some can multiply so, but not add."""
    total, narrow = torch.zeros(16, 16, device=device), torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, narrow, narrow, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
