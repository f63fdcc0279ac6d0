"""Which rank each sequence goes to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from carpool_systems.sequences import assign_sequences


@pytest.mark.parametrize("seed", range(8))
def test_no_other_assignment_costs_less(seed: int) -> None:
    draw = np.random.default_rng(seed)
    home_N = np.array([0, 0, 1, 2, 2, 2])
    cost_NW = draw.integers(0, 20, (6, 3))
    found_N = assign_sequences(cost_NW, home_N)
    assert (np.bincount(found_N) == np.bincount(home_N)).all()
    least = min(cost_NW[np.arange(6), order].sum() for order in set(itertools.permutations(home_N.tolist())))
    assert cost_NW[np.arange(6), found_N].sum() == least
    assert home_N.tolist() == [0, 0, 1, 2, 2, 2]


def test_who_gains_nothing_stays() -> None:
    home_N = np.arange(4).repeat(2)
    assert (assign_sequences(np.full((8, 4), 5), home_N) == home_N).all()


def test_many_sequences_on_many_ranks() -> None:
    """Each has one rank where it costs nothing; these ranks are a permutation of where they are."""
    draw = np.random.default_rng(0)
    home_N = np.arange(16).repeat(8)
    best_N = draw.permutation(home_N)
    cost_NW = draw.integers(1, 10**9, (128, 16))
    cost_NW[np.arange(128), best_N] = 0
    assert (assign_sequences(cost_NW, home_N) == best_N).all()
