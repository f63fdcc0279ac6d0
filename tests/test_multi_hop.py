"""Hops of pieces that are under way, without ranks: which are started, and that an error leaves none behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from carpool.transport.base import Pending
from carpool.transport.multi_hop import Chunk, Relay, Relays


def ride_of(relays: Relays, started: list[str], name: str, numbers: int, fails: str = "") -> list[Pending]:
    """Chunks of one piece and two hops. `started` gets each second hop as it starts."""
    ride = object()

    def second(hop: str) -> Callable[[str], Pending]:
        def start(came: str) -> Pending:
            if hop == fails:
                raise ConnectionError(hop)
            started.append(hop)
            return Pending(lambda: f"{came} {hop}")

        return start

    def piece(number: int) -> Pending:
        first = Pending(lambda: f"1.{name}{number}")
        return relays.add(Relay(Chunk(ride, "dispatch", number, 1), first, [second(f"2.{name}{number}")]))

    return [piece(number) for number in range(numbers)]


def test_second_hops_start_with_the_neighbour_that_is_waited_for() -> None:
    relays, started = Relays(), list[str]()
    pieces = ride_of(relays, started, "a", 3)
    assert pieces[0].wait() == "1.a0 2.a0" and started == ["2.a0", "2.a1"]
    assert pieces[1].wait() == "1.a1 2.a1" and started == ["2.a0", "2.a1", "2.a2"]
    assert pieces[2].wait() == "1.a2 2.a2" and not relays._under_way


def test_a_ride_that_ended_with_an_error_leaves_no_hops_to_the_next() -> None:
    relays, started = Relays(), list[str]()
    pieces = ride_of(relays, started, "a", 3, fails="2.a1")
    with pytest.raises(ConnectionError, match=r"2\.a1"):
        pieces[0].wait()
    with pytest.raises(RuntimeError, match="dispatch: a hop of this message has failed before"):
        pieces[1].wait()
    assert started == ["2.a0"]
    del pieces
    again = ride_of(relays, started, "b", 2)
    assert [piece.wait() for piece in again] == ["1.b0 2.b0", "1.b1 2.b1"]
    assert started == ["2.a0", "2.b0", "2.b1"], "2.a2 was left behind, and is not started"
