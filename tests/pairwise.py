"""A small set of combinations in which every two values of every two factors meet.

Most bugs of a configuration need two settings to meet (a replica *and* a bias, EP 2 *and* an auxiliary loss), few
need three. All pairs of a dozen factors fit into a few dozen cases; the product would be millions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def all_pairs(
    factors: Mapping[str, Sequence[Any]], forbidden: Sequence[Mapping[str, Any]] = (), start: Sequence[Case] = ()
) -> list[Case]:
    """Complete cases that together contain each pair of values that is not forbidden. Deterministic.

    Args:
        factors: values of each factor.
        forbidden: pairs that cannot be together, such as {"transport": "local", "ep": 4}.
        start: partial cases that must be among the result; they are completed first.

    Example: factors {"a": [0, 1], "b": [0, 1]}  ->  4 cases; with a third factor "c": [0, 1] still 4.
    """
    banned = {frozenset(pair.items()) for pair in forbidden}
    missing = dict.fromkeys(feasible_pairs(factors, forbidden))  # a dict keeps the order, so the result is the same
    used: Counter[tuple[str, Any]] = Counter()
    cases: list[Case] = []
    for partial in start:
        cases.append(_complete(dict(partial), factors, banned, missing, used))
    while missing:
        cases.append(_complete(dict(next(iter(missing))), factors, banned, missing, used))
    return cases


def feasible_pairs(factors: Mapping[str, Sequence[Any]], forbidden: Sequence[Mapping[str, Any]] = ()) -> list[Pair]:
    banned = {frozenset(pair.items()) for pair in forbidden}
    found = [
        frozenset({(a, va), (b, vb)}) for a, b in combinations(factors, 2) for va in factors[a] for vb in factors[b]
    ]
    return [pair for pair in found if pair not in banned]


def _complete(
    case: Case,
    factors: Mapping[str, Sequence[Any]],
    banned: set[Pair],
    missing: dict[Pair, None],
    used: Counter[tuple[str, Any]],
) -> Case:
    """Fill in the factors that `case` leaves open, each with the value that meets most new pairs, and among equals
    with the one used least; then cross off what was met."""
    for name in factors:
        if name in case:
            continue
        ranked = []
        for number, value in enumerate(factors[name]):
            pairs = [frozenset({(name, value), item}) for item in case.items()]
            if not any(pair in banned for pair in pairs):
                ranked.append((-sum(pair in missing for pair in pairs), used[name, value], number))
        assert ranked, f"no value of {name} may join {case}"
        case[name] = factors[name][min(ranked)[2]]
    used.update(case.items())
    for pair in combinations(case.items(), 2):
        missing.pop(frozenset(pair), None)
    return {name: case[name] for name in factors}
