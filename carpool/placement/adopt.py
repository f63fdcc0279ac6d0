"""Whether to move experts: the time that a new layout saves over its lifetime, against the cost of moving.

Moving an expert's home sends its parameters, their float32 masters and both Adam moments, once.

    saved    = (seconds per step now - then) * min(steps left, WINDOW)    loads drift, so a layout has a lifetime
    cost     = bytes of the busiest link / its bandwidth
    adopt if saved > hysteresis * cost, and a step gets faster by at least hysteresis * LEAST_GAIN

Without hysteresis two layouts of nearly equal cost would alternate. `aligned` renames a solver's ranks so that most
experts stay on their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.trace import Array
from carpool.planner.machine.cost import CostModel

WINDOW = 500  # steps
LEAST_GAIN = 0.005  # of a step
STATE_BYTES = 12  # of a parameter in addition to its own: float32 master, two float32 Adam moments


@dataclass(frozen=True)
class Decision:
    """Whether to adopt a layout, and why.

    Attributes:
        adopt: whether to move.
        why: a sentence for the log.
        now_seconds, new_seconds: modelled, per step, all layers.
        steps: over which the gain is counted.
        saved_seconds, cost_seconds: gain over these steps; cost of moving.
        moved_experts, moved_bytes: homes that change, and their size.
    """

    adopt: bool
    why: str
    now_seconds: float
    new_seconds: float
    steps: int
    saved_seconds: float
    cost_seconds: float
    moved_experts: int
    moved_bytes: int


def moved_bytes(before: ExpertLayout, after: ExpertLayout, cost: CostModel) -> tuple[Array, int]:
    """(W, W) bytes from rank to rank for homes that change, and the number of these. Raises ValueError if the layouts
    do not have the same experts and ranks."""
    sizes = [(one.num_ranks, one.num_experts, one.slices) for one in (before, after)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"cannot move {before.num_experts} experts on {before.num_ranks} ranks to a layout of "
            f"{after.num_experts} on {after.num_ranks}"
            + (f" ({before.slices} and {after.slices} slices of each)" if sizes[0][:2] == sizes[1][:2] else "")
        )
    each = cost.expert_bytes // before.slices // cost.element_size * (cost.element_size + STATE_BYTES)
    bytes_WW, number = np.zeros((before.num_ranks, before.num_ranks), dtype=np.int64), 0
    for (source, _), (target, _) in zip(before.home_of, after.home_of, strict=True):
        if source != target:
            bytes_WW[source, target] += each
            number += 1
    return bytes_WW, number


def decide(
    before: Mapping[str, ExpertLayout],
    after: Mapping[str, ExpertLayout],
    now_seconds: float,
    new_seconds: float,
    *,
    steps_left: int,
    hysteresis: float = 2.0,
    topology: Topology | None = None,
    cost: CostModel | None = None,
) -> Decision:
    """Decide whether to move from `before` to `after`.

    Args:
        before, after: layout of each layer, by name; the same layers.
        now_seconds, new_seconds: modelled time per step of all these layers (`Objective.seconds`, summed), under each.
        hysteresis: by how many times the saving must exceed the cost; and how many times `LEAST_GAIN` of
            `now_seconds` a step must get faster. 0: any gain will do.
        topology, cost: links; None: one node of H200s.

    Raises:
        ValueError: other layers, ranks or experts.
    """
    if set(before) != set(after):
        raise ValueError(f"layouts of different layers: {sorted(set(before) ^ set(after))}")
    cost = cost or CostModel()
    moves = [moved_bytes(before[name], after[name], cost) for name in before]
    number, total = sum(count for _, count in moves), int(sum(int(sent.sum()) for sent, _ in moves))
    ranks = next((layout.num_ranks for layout in before.values()), 1)
    links = topology or Topology.even(ranks)
    cost_seconds = sum(cost.transfer_seconds(sent, links) for sent, _ in moves)
    steps, least_gain = max(0, min(steps_left, WINDOW)), hysteresis * LEAST_GAIN
    gain = now_seconds - new_seconds
    saved = gain * steps
    share = gain / now_seconds if now_seconds > 0 else 0.0
    changes = sum(before[name] != after[name] for name in before)

    what = f"moving {number} experts ({total / 1e6:.1f} MB, {1e3 * cost_seconds:.2f} ms)"
    by = f"{1e3 * gain:.3g} ms per step ({share:.1%}), {1e3 * saved:.1f} ms in {steps} steps"
    if not changes:
        adopt, why = False, "the layout found is the one in use"
    elif gain <= 0:
        adopt, why = False, f"stay: the new layout is modelled to be slower by {-1e3 * gain:.3g} ms per step"
    elif share < least_gain:
        adopt, why = False, f"stay: {what} saves {by}; less than {least_gain:.1%} of a step is not worth a move"
    elif saved <= hysteresis * cost_seconds:
        adopt, why = False, f"stay: {what} saves {by}, not {hysteresis:g} times its cost"
    else:
        adopt, why = True, f"move: {what} saves {by}, more than {hysteresis:g} times its cost"
    return Decision(adopt, why, now_seconds, new_seconds, steps, saved, cost_seconds, number, total)


def aligned(found: ExpertLayout, current: ExpertLayout, topology: Topology) -> ExpertLayout:
    """The layout `found` with its ranks renamed and its homes reordered, so that few homes move.

    Each rank of `found` becomes the rank that already has most of its experts, nodes first. Experts that stay on their
    rank stay in their places.

    Args:
        topology: of the ranks. Ranks of one node stay on one node.

    Example: found homes [[2, 3], [0, 1]], current [[0, 1], [3, 2]]  ->  [[0, 1], [3, 2]]
    """
    common_WW = np.array([[len(set(a) & set(b)) for b in current.homes] for a in found.homes])
    ranks_of = [np.flatnonzero(np.array(topology.node_of) == node) for node in range(topology.num_nodes)]
    # Only nodes of equal size can be exchanged.
    common_NN = np.array(
        [[common_WW[np.ix_(a, b)].sum() if len(a) == len(b) else -1 for b in ranks_of] for a in ranks_of]
    )
    target = [0] * found.num_ranks
    for node, other in enumerate(_pairs(common_NN)):
        ranks, places = ranks_of[node], ranks_of[other]
        for rank, place in enumerate(_pairs(common_WW[np.ix_(ranks, places)])):
            target[ranks[rank]] = int(places[place])
    homes: list[tuple[int, ...]] = [()] * found.num_ranks
    for rank, place in enumerate(target):
        homes[place] = _in_rows(found.homes[rank], current.homes[place])
    return ExpertLayout(tuple(homes), found.slices)


def _in_rows(experts: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """`experts`, with those that `rows` contains in the same places, as far as possible."""
    if len(experts) != len(rows):
        return tuple(experts)
    new = iter([e for e in experts if e not in rows])
    return tuple(e if e in experts else next(new) for e in rows)


def _pairs(common_XX: Array) -> list[int]:
    """A greedy assignment of rows to columns, largest numbers first; negative numbers are not assigned."""
    chosen = [-1] * len(common_XX)
    order = np.argsort(-common_XX, axis=None, kind="stable")
    taken: set[int] = set()
    for row, column in zip(*np.unravel_index(order, common_XX.shape), strict=True):
        if chosen[row] == -1 and int(column) not in taken and common_XX[row, column] >= 0:
            chosen[row] = int(column)
            taken.add(int(column))
    return chosen
