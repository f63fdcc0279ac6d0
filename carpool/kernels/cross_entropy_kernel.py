"""The CUDA side of `carpool.kernels.cross_entropy`: one program per row of logits, which it reads twice.

    first pass      the row's maximum and the sum of powers, both kept up to date block by block
    second pass     probability - (1 at the target) in the place of each logit, if gradients are asked for

Plain PyTorch widens logits to float32, takes their log-softmax, and in the backward makes its gradient and narrows it
again: about 45 bytes of traffic for each bf16 logit, and 12 bytes of memory. Here it is 6 bytes of traffic, and nothing
is allocated. A row without a target is not read, and its gradient is zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import power_of_2, quick

BLOCK = 8192
# Lower than any logit but minus infinity, whose distance from itself is not a number.
LOWEST = tl.constexpr(-3.4e38)


@quick
@triton.jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, target, loss, columns, IGNORED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    goal = tl.load(target + row)
    counts = goal != IGNORED
    reads = tl.where(counts, columns, 0)
    # Before anything of the row is replaced. A target that is no column makes the loss NaN.
    at_goal = tl.load(logits + goal, mask=(goal >= 0) & (goal < columns), other=float("nan")).to(tl.float32)
    top = LOWEST
    total = 0.0
    block = tl.arange(0, BLOCK)
    for start in range(0, reads, BLOCK):
        column = start + block
        x = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    log_total = top + tl.log(tl.where(counts, total, 1.0))
    tl.store(loss + row, tl.where(counts, log_total - at_goal, 0.0))
    if GRADIENT:
        for start in range(0, columns, BLOCK):
            column = start + block
            x = tl.load(logits + column, mask=column < reads, other=0.0).to(tl.float32)
            slope = tl.exp(x - log_total) - tl.where(column == goal, 1.0, 0.0)
            tl.store(logits + column, tl.where(counts, slope, 0.0), mask=column < columns)


def launch(logits_CV: torch.Tensor, target_C: torch.Tensor, loss_C: torch.Tensor, ignored: int, gradient: bool) -> None:
    """Run the kernel. All contiguous; targets int64, loss float32, out. `ignored`: the target that is none."""
    rows, columns = logits_CV.shape
    if rows == 0:
        return
    block = min(BLOCK, power_of_2(columns))
    warps = 16 if block == BLOCK else 4
    constants = {"IGNORED": ignored, "GRADIENT": gradient, "BLOCK": block}
    _cross_entropy[(rows,)](logits_CV, target_C, loss_C, columns, **constants, num_warps=warps)
