"""Spans of time as (start, end) pairs of integers, exact.

A *set* is a list of spans in order, apart from each other and not empty; `union` makes one of any spans. The rides of
a rank that nothing hides, where # is a kernel:

    rides            ####      ########                 union(rides)         [(0, 4), (10, 18)]
    computation        ####      ###                    union(computation)   [(2, 6), (12, 15)]
    exposed          ##        ##   ###                 subtract(...)        [(0, 2), (10, 12), (15, 18)], length 7
"""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The set of all moments that lie in at least one span. Empty spans (end <= start) hold none."""
    result: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def subtract(one: list[Span], other: list[Span]) -> list[Span]:
    """The moments of one set that are not in the other."""
    result: list[Span] = []
    first = 0
    for start, end in one:
        while first < len(other) and other[first][1] <= start:
            first += 1
        at, place = start, first
        while place < len(other) and other[place][0] < end:
            if at < other[place][0]:
                result.append((at, other[place][0]))
            at = other[place][1]
            place += 1
        if at < end:
            result.append((at, end))
    return result


def length(spans: list[Span]) -> int:
    """Of a set."""
    return sum(end - start for start, end in spans)
