"""Trades of tokens for heads, and ring attention, against attention of whole sequences on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.parallel.context import Cut, kv_repeats, ring_attention, to_heads, to_tokens
from tests.ranks import Ranks

Errors = dict[str, float]


def test_parts_are_each_token_once_and_ring_gives_an_early_and_a_late_one() -> None:
    tokens_BL = torch.arange(24).reshape(2, 12)
    assert Cut(3, 1).part(tokens_BL)[0].tolist() == [4, 5, 6, 7]
    assert Cut(3, 1, "ring").part(tokens_BL)[1].tolist() == [14, 15, 20, 21]
    for way in ("ulysses", "ring"):
        parts = [Cut(3, rank, way).part(tokens_BL) for rank in range(3)]  # type: ignore[arg-type]
        assert torch.cat(parts, dim=1).sort(dim=1).values.equal(tokens_BL)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"), [(8, 8, 4, 1), (8, 2, 4, 2), (8, 4, 2, 1), (12, 6, 4, 2), (6, 1, 3, 3)]
)
def test_key_heads_are_repeated_until_ranks_divide_them(heads: int, kv_heads: int, ranks: int, expected: int) -> None:
    assert kv_repeats(heads, kv_heads, ranks) == expected


def _plain(query_BHLD: torch.Tensor, key_BHLD: torch.Tensor, value_BHLD: torch.Tensor, scale: float) -> torch.Tensor:
    """(B, L, H, D)."""
    out_BHLD = F.scaled_dot_product_attention(
        query_BHLD, key_BHLD, value_BHLD, is_causal=True, enable_gqa=True, scale=scale
    )
    return out_BHLD.transpose(1, 2)


def _attention(way: str, kv_heads: int, batch: int) -> Errors:
    """Errors of this rank's outputs and gradients."""
    group = dist.group.WORLD
    assert group is not None
    ranks, heads, scale = group.size(), 4, 0.3
    cut = Cut(ranks, group.rank(), way)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 6 * ranks, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    *whole, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [x.transpose(1, 2).requires_grad_() for x in whole]
    expected = _plain(inputs[0], inputs[1], inputs[2], scale)
    expected.backward(grad)

    parts = [cut.part(x).transpose(1, 2).requires_grad_() for x in whole]
    if way == "ring":
        found = ring_attention(group, parts[0], parts[1], parts[2], scale).transpose(1, 2)
    else:
        repeats = kv_repeats(heads, kv_heads, ranks)
        repeated = [parts[0], *(x.repeat_interleave(repeats, dim=1) for x in parts[1:])]
        query, key, value = to_heads(group, *repeated)
        found = to_tokens(group, _plain(query, key, value, scale))
    found.backward(cut.part(grad))
    pairs = {"out": (found, expected)} | {
        name: (part.grad.transpose(1, 2), x.grad.transpose(1, 2))  # type: ignore[union-attr]
        for name, part, x in zip("qkv", parts, inputs, strict=True)
    }
    return {name: float((a - cut.part(b)).abs().max()) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize(("way", "kv_heads", "batch"), [("ulysses", 4, 2), ("ulysses", 2, 1), ("ulysses", 1, 3)])
def test_heads_for_tokens_is_exact(ranks: Ranks, way: str, kv_heads: int, batch: int) -> None:
    for errors in ranks(_attention, way, kv_heads, batch):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_ring_attention_is_right(ranks: Ranks, kv_heads: int) -> None:
    # It is merged in float32.
    for errors in ranks(_attention, "ring", kv_heads, 2):
        assert max(errors.values()) < 2e-6, errors


def test_ring_attention_says_what_a_gpu_computes_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match=r"training\.bf16=true"):
        ring_attention(None, x, x, x, 1.0)  # type: ignore[arg-type]
