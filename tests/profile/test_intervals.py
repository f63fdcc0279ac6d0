"""Unions and differences of spans, against sets of moments."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from carpool.profile.rank_trace import Span, length, subtract, union


def moments(spans: list[Span]) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(3, 3), (5, 4)], []),
        ([(4, 6), (0, 2)], [(0, 2), (4, 6)]),
        ([(0, 2), (2, 4)], [(0, 4)]),
        ([(0, 9), (3, 5)], [(0, 9)]),
        ([(0, 4), (2, 6), (5, 7)], [(0, 7)]),
    ],
)
def test_union(spans, expected):
    assert union(spans) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [(0, 1)], []),
        ([(0, 4)], [], [(0, 4)]),
        ([(0, 4)], [(0, 4)], []),
        ([(0, 4)], [(4, 8)], [(0, 4)]),
        ([(0, 9)], [(3, 5)], [(0, 3), (5, 9)]),
        ([(3, 5)], [(0, 9)], []),
        ([(0, 4), (10, 18)], [(2, 6), (12, 15)], [(0, 2), (10, 12), (15, 18)]),
        ([(0, 2), (3, 5), (6, 8)], [(1, 7)], [(0, 1), (7, 8)]),
    ],
)
def test_subtract(one, other, expected):
    assert subtract(one, other) == expected


def test_against_sets_of_moments():
    rng = random.Random(0)
    for _ in range(500):
        one, other = (
            [(start, start + rng.randint(0, 6)) for start in rng.choices(range(30), k=rng.randint(0, 7))]
            for _ in range(2)
        )
        first, second = union(one), union(other)
        assert moments(first) == moments(one)
        assert all(a[1] < b[0] for a, b in pairwise(first))
        assert moments(subtract(first, second)) == moments(one) - moments(other)
        assert length(first) == len(moments(one))
