"""Context parallelism: ranks share sequences, and each computes a part of every sequence. Only attention communicates.

    2 ranks, tokens a b c d, heads 0 1          rank 0        rank 1
    embedding, norms, experts, loss             a b           c d          all heads (`Cut.part`)
    attention                                   a b c d       a b c d      head 0; head 1

Two methods for attention:

Ulysses (arXiv 2309.14509): an all-to-all exchanges heads for tokens, so that each rank has whole sequences of its
heads, to which any attention with any mask applies; another all-to-all reverses the exchange. A rank sends and
receives, for each of its tokens, (cp - 1) / cp of the queries, keys and values, and later of the output. cp must divide
the number of heads. Heads of keys and values may be fewer: they are repeated until cp divides their number, and the
gradients of the repetitions are summed.

Ring (arXiv 2310.01889): queries stay, keys and values circulate among the ranks, and partial results are merged in
float32. It supports causal attention without any other mask, and any number of heads. Under a causal mask late tokens
have more work than early ones, so a rank has one early and one late part of each sequence (Brandon et al., arXiv
2311.09431), which balances the work:

    2 ranks, 4 parts of each sequence: rank 0 has parts 0 and 3, rank 1 has parts 1 and 2
    first     rank 0: queries 0 3 on keys 0 3, causal          rank 1: queries 1 2 on keys 1 2, causal
    second    rank 0: query 3 on keys 1 2                      rank 1: queries 1 2 on key 0

The loop and the merging are private functions of PyTorch (`torch.distributed.tensor.experimental`), called with its
flash attention.

Letters: B sequences, L tokens of a whole one, l tokens of this rank's part, H heads, D the size of one, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

Way = Literal["ulysses", "ring"]
aten = torch.ops.aten
SEQUENCE_DIM = 2


@dataclass(frozen=True)
class Cut:
    """The part of every sequence that a rank has.

    Args:
        ranks: W, the number of ranks that share sequences.
        rank: among these.
        way: ulysses: consecutive parts; ring: an early and a late part for each rank.
    """

    ranks: int
    rank: int
    way: Way = "ulysses"

    @property
    def divisor(self) -> int:
        """The number that must divide L."""
        return self.ranks if self.way == "ulysses" else 2 * self.ranks

    def __str__(self) -> str:
        parts = f"1/{self.ranks}" if self.way == "ulysses" else f"2/{2 * self.ranks}, an early and a late one,"
        return f"each rank has {parts} of every sequence, attention by {self.way}"

    def part(self, x_BL: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of whole sequences: (B, L, ...) to (B, l, ...)."""
        pieces = x_BL.chunk(self.divisor, dim=1)
        assert len(pieces) == self.divisor and x_BL.shape[1] % self.divisor == 0
        if self.way == "ulysses":
            return pieces[self.rank]
        return torch.cat([pieces[self.rank], pieces[-1 - self.rank]], dim=1)


def kv_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each head of keys and values is repeated, so that `ranks` divides their number; `ranks` divides
    `heads`.

    8 heads, 2 of keys and values, 4 ranks: 2, so that each rank has 2 heads, and one of keys and values for both."""
    repeats = range(1, heads // kv_heads + 1)
    return next(n for n in repeats if kv_heads * n % ranks == 0 and heads % (kv_heads * n) == 0)


class Shapes:
    """Replaces a group where only shapes matter (`carpool.hf.activation_sizes`): nothing is communicated."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


Group = dist.ProcessGroup | Shapes


def to_heads(group: Group, *parts_BHlD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange tokens for heads, all tensors in one all-to-all: each (B, H, l, D) to (B, H / W, L, D).

    W divides each H; H and D may differ between tensors."""
    return _ToHeads.apply(group, *parts_BHlD)  # type: ignore[no-any-return, no-untyped-call]


def to_tokens(group: Group, whole_BLHD: torch.Tensor) -> torch.Tensor:
    """Exchange heads for tokens: (B, L, H / W, D) to (B, l, H, D)."""
    return _ToTokens.apply(group, whole_BLHD)  # type: ignore[no-any-return, no-untyped-call]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *parts_BHlD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        found = _trade_tokens(group, [part.transpose(1, 2) for part in parts_BHlD])
        return tuple(whole.transpose(1, 2) for whole in found)

    @staticmethod
    def backward(ctx: Any, *grads_BHLD: torch.Tensor) -> tuple[Any, ...]:
        found = _trade_heads(ctx.group, [grad.transpose(1, 2) for grad in grads_BHLD])
        return None, *(part.transpose(1, 2) for part in found)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, whole_BLHD: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _trade_heads(group, [whole_BLHD])[0]

    @staticmethod
    def backward(ctx: Any, grad_BlHD: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _trade_tokens(ctx.group, [grad_BlHD])[0]


def _trade_tokens(group: Group, parts_BlHD: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each (B, l, H, D) to (B, L, H / W, D)."""
    ranks, (batch, tokens) = group.size(), parts_BlHD[0].shape[:2]
    # The heads for one rank, of all tensors, are contiguous: X numbers per token.
    sent_WBlX = torch.cat([x.reshape(batch, tokens, ranks, -1).permute(2, 0, 1, 3) for x in parts_BlHD], dim=-1)
    came_WBlX = _exchange(group, sent_WBlX)
    came_BLX = came_WBlX.transpose(0, 1).reshape(batch, ranks * tokens, -1)
    shapes = [(x.shape[2] // ranks, x.shape[3]) for x in parts_BlHD]
    of_each = came_BLX.split([heads * size for heads, size in shapes], dim=-1)
    return [x_BLX.unflatten(-1, shape) for x_BLX, shape in zip(of_each, shapes, strict=True)]


def _trade_heads(group: Group, wholes_BLHD: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each (B, L, H / W, D) to (B, l, H, D)."""
    ranks, (batch, length) = group.size(), wholes_BLHD[0].shape[:2]
    tokens = length // ranks
    sent_WBlX = torch.cat([x.reshape(batch, ranks, tokens, -1).transpose(0, 1) for x in wholes_BLHD], dim=-1)
    came_WBlX = _exchange(group, sent_WBlX)
    of_each = came_WBlX.split([x.shape[2] * x.shape[3] for x in wholes_BLHD], dim=-1)
    return [
        x_WBlX.permute(1, 2, 0, 3).reshape(batch, tokens, -1, like.shape[3])
        for x_WBlX, like in zip(of_each, wholes_BLHD, strict=True)
    ]


def _exchange(group: Group, sent_WX: torch.Tensor) -> torch.Tensor:
    sent_WX = sent_WX.contiguous()
    came_WX = torch.empty_like(sent_WX)
    if not isinstance(group, Shapes):
        dist.all_to_all_single(came_WX, sent_WX, group=group)
    return came_WX


def ring_attention(
    group: dist.ProcessGroup, query_BHlD: torch.Tensor, key_BHlD: torch.Tensor, value_BHlD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal ring attention over whole sequences, of which each rank has the parts of `Cut`.

    Args:
        group: the ranks that share sequences, in the order of their parts.
        key_BHlD, value_BHlD: may have fewer heads than queries, whose number they divide.
        scale: of the attention scores.

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
        ring = _ring()
        assert ring._cp_options.enable_load_balance, "parts are an early and a late one"
        own = aten._scaled_dot_product_flash_attention
        if not query_BHlD.is_cuda:
            own = aten._scaled_dot_product_flash_attention_for_cpu
        out_BHlD, lse_BHl, *rest = ring._templated_ring_attention(
            group, SEQUENCE_DIM, own, query_BHlD, key_BHlD, value_BHlD, is_causal=True, dropout_p=0.0, scale=scale
        )
        # On GPUs the backward takes sizes and random state; there is no drop-out here.
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
        found = _ring()._templated_ring_attention_backward(
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


def _ring() -> Any:
    """PyTorch's module, imported lazily because the planner does not need it."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention
