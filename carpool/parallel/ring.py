"""Ring attention: queries stay, keys and values of other ranks come by, and partial results are merged.

    2 ranks, 4 parts of each sequence: rank 0 has parts 0 and 3, rank 1 has parts 1 and 2
    first     rank 0: queries 0 3 on keys 0 3, causal          rank 1: queries 1 2 on keys 1 2, causal
    second    rank 0: query 3 on keys 1 2                      rank 1: queries 1 2 on key 0

So each rank has the same to do. Liu et al., arXiv 2310.01889, with parts as in Brandon et al., arXiv 2311.09431. The
loop and the merging are PyTorch's (`torch.distributed.tensor.experimental`), private functions of it, given its flash
attention; here is what autograd needs around them. The merging is in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten = torch.ops.aten
SEQUENCE_DIM = 2


def ring_attention(
    group: dist.ProcessGroup, query_BHlD: torch.Tensor, key_BHlD: torch.Tensor, value_BHlD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention over whole sequences, of which each rank has the parts of `carpool.parallel.context.Cut`.

    Args:
        group: the ranks that share sequences, in the order of their parts.
        key_BHlD, value_BHlD: may have fewer heads than queries, and a number that divides theirs.
        scale: of the scores.

    Returns:
        (B, H, l, D).

    Raises:
        ValueError: float32 on a GPU, for which PyTorch has no flash attention."""
    if query_BHlD.is_cuda and query_BHlD.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"ring attention on a GPU computes in bfloat16, not in {query_BHlD.dtype}: set training.bf16=true or "
            "parallelism.cp_attention=ulysses"
        )
    return _Ring.apply(group, query_BHlD, key_BHlD, value_BHlD, scale)  # type: ignore[no-any-return, no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        query_BHlD: torch.Tensor,
        key_BHlD: torch.Tensor,
        value_BHlD: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        assert ring._cp_options.enable_load_balance, "parts are an early and a late one"
        own = aten._scaled_dot_product_flash_attention
        if not query_BHlD.is_cuda:
            own = aten._scaled_dot_product_flash_attention_for_cpu
        out_BHlD, lse_BHl, *rest = ring._templated_ring_attention(
            group, SEQUENCE_DIM, own, query_BHlD, key_BHlD, value_BHlD, is_causal=True, dropout_p=0.0, scale=scale
        )
        # On GPUs, sizes and random numbers that the backward asks for: nothing is random here.
        ctx.rest = rest[:6]
        ctx.group, ctx.scale = group, scale
        ctx.save_for_backward(query_BHlD, key_BHlD, value_BHlD, out_BHlD, lse_BHl)
        return out_BHlD

    @staticmethod
    def backward(ctx: Any, grad_BHlD: torch.Tensor) -> tuple[Any, ...]:
        query_BHlD, key_BHlD, value_BHlD, out_BHlD, lse_BHl = ctx.saved_tensors
        settings: dict[str, Any] = {"dropout_p": 0.0, "scale": ctx.scale}
        own = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        if query_BHlD.is_cuda:
            own = aten._scaled_dot_product_flash_attention_backward.default
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            settings |= dict(zip(names, ctx.rest, strict=True))
        found = ring._templated_ring_attention_backward(
            ctx.group,
            SEQUENCE_DIM,
            own,
            grad_BHlD.contiguous(),
            "grad_out",
            query_BHlD,
            key_BHlD,
            value_BHlD,
            out_BHlD,
            lse_BHl,
            is_causal=True,
            **settings,
        )
        return None, *found[:3], None
