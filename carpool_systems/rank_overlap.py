"""How many copies experts get, and on which nodes, so that as many as possible outlive nodes (Lazarus, arXiv
2407.04656v2, section 4.1).

N nodes have c slots each. An expert is lost when all nodes with a copy of it are.

    allocate    copies in proportion to load, `fewest` at least (equation 1): with fewer dead nodes nothing is lost
    place       maximum rank overlap: experts by rising number of copies in groups of c; the nodes of a group have all
                of its experts, as many nodes as the first of them has copies; then copies that are left, where room is

    4 experts of 2 copies, 4 nodes of 2 slots      nodes             pairs of nodes that may die together
    overlap                                        01 01 23 23       4 of 6
    spread (the next node has a copy)              03 10 21 32       2 of 6

All experts of a group live as long as its first one, so that few sets of dead nodes lose anything. For given numbers of
copies no placement survives with a larger probability, if every set of so many nodes is as likely to die (theorem 1).
Where slots do not divide experts, the paper's rule may run out of nodes in the last group and leave an expert with less
than its copies: 3 experts of 2 copies on 3 nodes of 2 slots come to 01 01 2. Then experts change places: 01 02 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Held = list[set[int]]


def allocate(load_E: Sequence[float], slots: int, fewest: int, most: int) -> list[int]:
    """Copies of each expert, `slots` together at most.

    Args:
        fewest: copies of an expert at least; as many as slots suffice for, if that is less.
        most: copies of an expert that are of use, one for each node."""
    fewest = max(1, min(fewest, slots // len(load_E), most))
    copies_E, left, load = [0] * len(load_E), slots, float(sum(load_E))
    for count, expert in enumerate(sorted(range(len(load_E)), key=lambda one: (load_E[one], one))):
        share = load_E[expert] / load if load > 0 else 1 / (len(load_E) - count)
        copies_E[expert] = min(max(int(share * left + 1e-9), fewest), most)
        left, load = left - copies_E[expert], load - load_E[expert]
    return copies_E


def place(copies_E: Sequence[int], slots: int, homes_N: Sequence[set[int]]) -> Held:
    """The experts that each node holds, `slots` at most. Nodes are named so that many experts stay where they are.

    Args:
        homes_N: the experts that each node has already. Experts with equally many copies are taken in this order.

    Raises:
        ValueError: the copies need more slots than there are, or one has more copies than there are nodes."""
    nodes = len(homes_N)
    if sum(copies_E) > nodes * slots or max(copies_E) > nodes:
        raise ValueError(
            f"{sum(copies_E)} copies, up to {max(copies_E)} of an expert: {nodes} nodes have {slots} slots"
        )
    home_E = {expert: node for node, its in enumerate(homes_N) for expert in its}
    order = sorted(range(len(copies_E)), key=lambda one: (copies_E[one], home_E.get(one, 0), one))
    held: Held = [set() for _ in range(nodes)]
    left_E, first = list(copies_E), 0
    for begin in range(0, len(order), slots):
        group = order[begin : begin + slots]
        for node in range(first, min(nodes, first + copies_E[group[0]])):
            held[node].update(group)
        for expert in group:
            left_E[expert] -= min(copies_E[group[0]], nodes - first)
        first = min(nodes, first + copies_E[group[0]])
    for expert in order:
        room = [n for n in range(nodes) if len(held[n]) < slots and expert not in held[n]]
        for node in sorted(room, key=lambda n: len(held[n]))[: left_E[expert]]:
            held[node].add(expert)
            left_E[expert] -= 1
    for expert in order:
        for _ in range(left_E[expert]):
            _make_room(held, expert, slots, copies_E)
    return _named(held, homes_N)


def _make_room(held: Held, expert: int, slots: int, copies_E: Sequence[int]) -> None:
    """Give an expert a node more: one with slots left takes one of that node's experts, of those with most copies."""
    moves = [
        (-copies_E[other], other, full, free)
        for free, its in enumerate(held)
        for full, theirs in enumerate(held)
        for other in theirs - its
        if len(its) < slots and expert not in theirs
    ]
    _, other, full, free = min(moves)
    held[full] ^= {other, expert}
    held[free].add(other)


def _named(held: Held, homes_N: Sequence[set[int]]) -> Held:
    """The same sets, each given to the node that has most of it: greedily, as section 4.3 moves nodes to a new plan."""
    pairs = [(len(its & homes), n, m) for n, homes in enumerate(homes_N) for m, its in enumerate(held)]
    found: dict[int, int] = {}
    for _, node, place in sorted(pairs, key=lambda one: (-one[0], one[1], one[2])):
        if node not in found and place not in found.values():
            found[node] = place
    return [held[found[node]] for node in range(len(held))]


def survival(held_N: Sequence[set[int]], experts: int, dead: int) -> float:
    """The share of sets of so many dead nodes that leave a copy of every expert."""
    alive = list(combinations(held_N, len(held_N) - dead))
    return sum(len(set().union(*its)) == experts for its in alive) / len(alive)
