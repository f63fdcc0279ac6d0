"""The model of a ride in chunks, against formulas and by hand."""

from __future__ import annotations

import itertools

import pytest

from carpool_systems.planners import Pieces, chunked


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_equal_rides_follow_the_formula(chunks: int) -> None:
    for a, c in itertools.product((0.1, 1.0, 2.0, 7.0), (0.1, 1.0, 3.0, 9.0)):
        formula = max(2 * chunks * a, 2 * a + chunks * c, (chunks + 1) * a + c)
        took = chunked(Pieces(a, c, a), chunks)
        # Between, the links wait once for the first chunk's experts; a third dispatch under way would fill that.
        assert took == pytest.approx(formula) if c <= a or c >= 2 * a else formula <= took <= formula + 2 * (c - a)


def test_nothing_beside_takes_the_sum() -> None:
    pieces = Pieces(1.0, 2.0, 3.0, 4.0)
    assert chunked(pieces, 3, beside=False) == pytest.approx(30.0) == 3 * pieces.alone


def test_a_delayed_gradient_hides_the_combine() -> None:
    assert chunked(Pieces(1.0, 2.0, 3.0, after=4.0), 1) == 7.0
    assert chunked(Pieces(1.0, 2.0, 3.0, after=1.0), 1) == 6.0


def test_a_slow_host_makes_chunks_useless() -> None:
    ready = {r: chunked(Pieces(2 / r, 4 / r, 2 / r, host=0.0), r) for r in (1, 2, 4)}
    slow = {r: chunked(Pieces(2 / r, 4 / r, 2 / r, host=6.0), r) for r in (1, 2, 4)}
    assert min(ready, key=ready.__getitem__) == 4 and min(slow, key=slow.__getitem__) == 1
    assert slow[2] > 12.0
