"""Routings of benchmarks: distinct experts, the promised shares, and the same choices for the same seed."""

from __future__ import annotations

import pytest
import torch

from carpool.bench.routings import EXPERT_ROUTINGS, ROUTINGS, make_routings
from carpool.layout import ExpertLayout


@pytest.mark.parametrize("kind", [*ROUTINGS, *EXPERT_ROUTINGS[2:]])
@pytest.mark.parametrize(("tokens", "experts", "ranks", "top_k"), [(199, 37, 4, 5), (1, 32, 4, 4), (64, 24, 6, 3)])
def test_experts_are_distinct_and_weights_sum_to_one(kind: str, tokens: int, experts: int, ranks: int, top_k: int):
    layout = ExpertLayout.contiguous(experts, ranks)
    routings = make_routings(kind, tokens, top_k, layout, seed=3)
    again = make_routings(kind, tokens, top_k, layout, seed=3)
    other = make_routings(kind, tokens, top_k, layout, seed=4)
    assert len(routings) == ranks
    for routing, same in zip(routings, again, strict=True):
        routing.check(tokens, experts)  # int32, in range, no expert twice
        assert routing.weight_TK is not None and same.weight_TK is not None
        assert routing.expert_TK.shape == (tokens, top_k) and routing.expert_TK.min() >= 0
        assert routing.weight_TK.min() > 0
        torch.testing.assert_close(routing.weight_TK.sum(1), torch.ones(tokens))
        assert torch.equal(routing.expert_TK, same.expert_TK) and torch.equal(routing.weight_TK, same.weight_TK)
    if tokens > 1:
        assert not torch.equal(routings[0].expert_TK, routings[1].expert_TK), "ranks have tokens of their own"
        assert not torch.equal(routings[0].expert_TK, other[0].expert_TK)


def load_of(kind: str, layout: ExpertLayout, tokens: int, top_k: int, exponent: float = 1.0) -> torch.Tensor:
    """Choices of each expert, by the tokens of all ranks."""
    routings = make_routings(kind, tokens, top_k, layout, zipf_exponent=exponent)
    return sum(r.expert_TK.long().flatten().bincount(minlength=layout.num_experts) for r in routings)  # type: ignore


@pytest.mark.parametrize(("tokens", "experts", "ranks", "top_k"), [(400, 32, 4, 4), (331, 50, 5, 3), (256, 256, 8, 8)])
def test_the_skew_is_exact(tokens: int, experts: int, ranks: int, top_k: int):
    layout = ExpertLayout.contiguous(experts, ranks)
    load_E = load_of("skewed", layout, tokens, top_k)
    load_W = torch.stack([load_E[list(mine)].sum() for mine in layout.homes])
    mean = tokens * top_k  # all ranks' choices, per rank
    assert int(load_W[0]) == ranks * (3 * tokens * top_k // ranks)
    assert abs(int(load_W[0]) - 3 * mean) < ranks
    assert int(load_W[-1]) == 0
    rest = (ranks * mean - 3 * mean) / (ranks - 2)
    assert ((load_W[1:-1] - rest).abs() < 6 * rest**0.5).all(), "the others share the rest equally, up to chance"


def test_how_unequal_zipf_is():
    layout = ExpertLayout.contiguous(64, 4)
    # With K = 1 the shares are those of the formula.
    load_E = load_of("zipf", layout, 20_000, 1).double().sort(descending=True).values
    expected_E = 1 / torch.arange(1, 65, dtype=torch.float64)
    expected_E *= load_E.sum() / expected_E.sum()
    assert ((load_E - expected_E).abs() < 6 * expected_E.sqrt()).all()
    most = [float(load_of("zipf", layout, 2000, 8, exponent).max()) for exponent in (0.0, 1.0, 2.0)]
    assert most[0] < 1.2 * 8000 * 8 / 64, "exponent 0 is uniform"
    assert most[0] < most[1] < most[2] <= 8000, "no token names an expert twice"
    popular = load_of("zipf", layout, 2000, 8).argsort(descending=True)[:8] // 16
    assert len(set(popular.tolist())) > 1, "the popular experts are not all on one rank"
    uniform_E = load_of("uniform", layout, 2000, 8)
    assert uniform_E.min() / 1000 > 0.8 and uniform_E.max() / 1000 < 1.2


@pytest.mark.parametrize(
    ("kind", "experts", "ranks", "top_k", "message"),
    [
        ("level", 8, 4, 2, "'level' is not known; use one of uniform, zipf, skewed"),
        ("uniform", 8, 4, 9, r"top-k is 9, but it must be 1\.\.8"),
        ("skewed", 9, 3, 2, "needs more than 3 ranks, and there are 3"),
        ("skewed", 8, 4, 4, "would choose 3 experts on rank 0, which has 2"),
        ("skewed", 62, 31, 7, None),
    ],
)
def test_what_cannot_be_drawn(kind: str, experts: int, ranks: int, top_k: int, message: str | None):
    layout = ExpertLayout.contiguous(experts, ranks)
    if message is None:
        make_routings(kind, 5, top_k, layout)
        return
    with pytest.raises(ValueError, match=message):
        make_routings(kind, 5, top_k, layout)


def test_a_hot_expert_is_everybodys_choice():
    layout = ExpertLayout.contiguous(16, 2)
    load_E = load_of("hot", layout, 500, 4)
    assert int(load_E[0]) == 1000
    assert ((load_E[1:] - 200).abs() < 6 * 200**0.5).all(), "the others are equally likely"
