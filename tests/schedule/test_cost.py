"""The model of a ride in chunks, against formulas and by hand."""

from __future__ import annotations

import itertools

import pytest

from carpool.schedule.cost import Pieces, best_chunks, best_pair, between, chunked


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
    ready = {r: [Pieces(2 / r, 4 / r, 2 / r, host=0.0)] for r in (1, 2, 4)}
    slow = {r: [Pieces(2 / r, 4 / r, 2 / r, host=6.0)] for r in (1, 2, 4)}
    assert best_chunks(ready)[0] == 4 and best_chunks(slow)[0] == 1
    assert best_chunks(slow)[1][2] > 12.0


def test_the_fewest_chunks_of_equal_ones() -> None:
    assert best_chunks({4: [Pieces(0, 1, 0)], 2: [Pieces(0, 2, 0)], 1: [Pieces(0, 4, 0)]})[0] == 1


def test_sizes_between_and_beyond_those_known() -> None:
    of = between({100: Pieces(1, 10, 1), 200: Pieces(2, 12, 1), 400: Pieces(3, 20, 1)})
    assert of(150) == Pieces(1.5, 11, 1) and of(300) == Pieces(2.5, 16, 1)
    assert of(500) == Pieces(3.5, 24, 1) and of(0) == Pieces(0, 8, 1)
    with pytest.raises(ValueError, match="two or more"):
        between({1: Pieces(1, 1, 1)})


def test_parts_of_a_chunk_travel_together() -> None:
    """By hand: the chunk of two parts comes at 2, is computed until 6, and combined until 9, beside what is put off."""
    assert chunked(Pieces(2.0, 2.0, 3.0), 1, parts=2) == 9.0
    assert chunked(Pieces(2.0, 2.0, 3.0, after=1.0), 1, parts=2) == 2 + 2 + 1 + 2 + 3
    # Two such: links 0-2, 2-4, combines 7-9 (after 6) and 13-15 (after 12); processors 2-6, 6-10.
    assert chunked(Pieces(2.0, 2.0, 3.0), 2, parts=2) == 13.0
    assert chunked(Pieces(1.0, 2.0, 3.0), 3, beside=False, parts=2) == 3 * (1 + 4 + 3)


def test_forward_and_backward_each_with_their_own() -> None:
    """A message costs 3 before it costs anything by its size. The forward has much to hide rides behind, the backward
    little: 11 + 2 + 11 in one chunk, and two would keep the links busy for 4 * 7."""
    pieces = {
        r: (Pieces(3 + 8 / r, 20 / r, 3 + 8 / r), Pieces(3 + 8 / r, 2 / r, 3 + 8 / r)) for r in (1, 2)
    }  # fmt: skip
    best, times = best_pair(pieces)
    assert best == (2, 1)
    assert times == {(1, 1): 42 + 24, (1, 2): 42 + 28, (2, 1): 34 + 24, (2, 2): 34 + 28}
    for r in pieces:
        assert times[r, r] == best_chunks({s: list(own) for s, own in pieces.items()})[1][r]
