"""Rides in tiles on real GPUs: tests/gpu/tiles_worker.py on every one of them, up to four, or four on one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.gpu.ranks import RANKS, SHARED, check_mode, needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]


check = partial(check_mode, "tests.gpu.tiles_worker")


@needs(2)
def test_rides_in_tiles_are_the_plain_ones_bit_by_bit() -> None:
    rides = 100 if SHARED else 400
    assert f"{rides} rides on {RANKS} ranks" in check("equal", str(rides))


@needs(1)
def test_one_rank_bit_by_bit() -> None:
    assert "60 rides on 1 ranks" in check("equal", "60", ranks=1)


@needs(2)
def test_a_slow_rank_is_waited_for() -> None:
    check("slow", "40" if SHARED else "100")


@needs(2)
def test_no_ride_waits_for_the_device() -> None:
    check("sync")


@needs(2)
def test_a_missing_rank_is_named() -> None:
    check("missing")
