"""How near `assign` comes to the fewest ranks that a token can visit."""

from __future__ import annotations

import itertools

import pytest
import torch

from carpool import ExpertLayout, Routing, assign


def replicated(experts: int, ranks: int, replicas: int, seed: int) -> ExpertLayout:
    """Contiguous, with replicas of experts drawn by popularity (0 is the most popular) on ranks without them."""
    draw = torch.Generator().manual_seed(seed)
    layout = ExpertLayout.contiguous(experts, ranks)
    free = torch.ones(experts, ranks)
    for rank, held in enumerate(layout.homes):
        free[list(held), rank] = 0
    free *= popularity(experts).unsqueeze(1)
    chosen = torch.multinomial(free.flatten(), replicas, generator=draw).tolist()
    return layout.with_replicas((number // ranks, number % ranks) for number in chosen)


def popularity(experts: int) -> torch.Tensor:
    return 1 / (1 + torch.arange(experts).float()) ** 0.5


def choices(experts: int, top_k: int, tokens: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.multinomial(popularity(experts).expand(tokens, experts), top_k, generator=draw).int()


def fewest(layout: ExpertLayout, experts: list[int], source: int) -> int:
    """Brute force: ranks beside its own that a token must visit."""
    holders = [{slot // layout.slots_per_rank for slot in layout.slots_of[e]} for e in experts]
    holders = [ranks for ranks in holders if source not in ranks]
    others = sorted(set().union(*holders))
    for number in range(len(others) + 1):
        if any(all(ranks.intersection(some) for ranks in holders) for some in itertools.combinations(others, number)):
            return number
    raise AssertionError


def visited(layout: ExpertLayout, expert_TK: torch.Tensor, source: int) -> torch.Tensor:
    """(T,) ranks beside its own that each token visits."""
    rank_TK = assign(Routing(expert_TK, None), layout, source) // layout.slots_per_rank
    seen_TW = torch.zeros(len(expert_TK), layout.num_ranks, dtype=torch.bool)
    seen_TW.scatter_(1, rank_TK.long(), True)
    seen_TW[:, source] = False
    return seen_TW.sum(1)


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "replicas", "optimal"),
    [
        (64, 8, 4, 6, 1.0),
        (64, 8, 8, 6, 1.0),
        (64, 8, 8, 64, 0.995),
        (64, 6, 16, 32, 0.995),
        (12, 6, 6, 20, 0.98),
        (37, 3, 5, 37, 0.995),
    ],
)
def test_nearly_always_the_optimum(experts: int, top_k: int, ranks: int, replicas: int, optimal: float) -> None:
    layout, expert_TK = replicated(experts, ranks, replicas, 0), choices(experts, top_k, 400, 1)
    best_T = torch.tensor([fewest(layout, row, 1) for row in expert_TK.tolist()])
    found_T = visited(layout, expert_TK, 1)
    assert bool((found_T >= best_T).all())
    assert (found_T == best_T).float().mean() >= optimal


def test_the_choice_between_equal_ranks_looks_ahead() -> None:
    """Four experts on the edges of a path of ranks 0-1-2-3-4: 1 and 3 serve all; after 2, it takes three."""
    layout = ExpertLayout(((0,), (1,), (2,), (3,), (), (4,))).with_replicas([(0, 1), (1, 2), (2, 3), (3, 4)])
    expert_TK = torch.tensor([[0, 1, 2, 3]] * 16, dtype=torch.int32)
    assert visited(layout, expert_TK, 5).tolist() == [2] * 16


def test_equal_ranks_take_turns() -> None:
    """Two experts, both on each of two ranks: half of the tokens go to either."""
    layout = ExpertLayout(((0, 1), (2,), (3,), (4,))).with_replicas([(0, 2), (1, 2)])
    rank_TK = assign(Routing(torch.tensor([[0, 1]] * 64, dtype=torch.int32), None), layout, 3) // layout.slots_per_rank
    assert bool((rank_TK[:, 0] == rank_TK[:, 1]).all())
    assert rank_TK[:, 0].bincount(minlength=4).tolist() == [32, 0, 32, 0]


def test_rounds_are_no_more_than_needed() -> None:
    plain = ExpertLayout.contiguous(8, 4)
    assert plain.shared_rounds(8) == 0
    assert plain.with_replicas([(0, 2), (1, 3)]).shared_rounds(8) == 1  # rank 0 holds both
    assert plain.with_replicas([(0, 2), (2, 3)]).shared_rounds(8) == 0  # no ride can serve two of them
    assert plain.with_replicas([(0, 2), (2, 3), (4, 0), (5, 1)]).shared_rounds(8) == 2
    assert plain.with_replicas([(0, 2), (2, 3), (4, 0), (5, 1)]).shared_rounds(3) == 1
