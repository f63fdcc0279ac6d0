"""Solvers: from a recorded routing to an `ExpertLayout`. One file each; none needs an accelerator.

    contiguous, random    what a layout is worth that knows nothing
    occult                pairwise collaboration, greedily; ignores load
    lpt                   load alone
    eplb                  load, with replicas in the extra slots
    hypergraph            the exact objective without load or replicas, by Mt-KaHyPar
    search                the exact objective under the load limit, with replicas in the extra slots

`search` starts from Occult's and LPT's layouts; "hypergraph+search" and so on start from what that solver found.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from carpool.layout import ExpertLayout
from carpool.placement.solvers.eplb import eplb
from carpool.placement.solvers.hypergraph import hypergraph
from carpool.placement.solvers.lpt import lpt
from carpool.placement.solvers.occult import occult
from carpool.placement.solvers.plain import contiguous, random
from carpool.placement.solvers.problem import Problem
from carpool.placement.solvers.search import search
from carpool.placement.trace import Array, LayerTrace
from carpool.planner.cost import CostModel

__all__ = ["SOLVERS", "STARTS", "Problem", "check_solver", "solve"]

STARTS: Mapping[str, Callable[[Problem], ExpertLayout]] = MappingProxyType(
    {
        "contiguous": contiguous,
        "random": random,
        "occult": occult,
        "lpt": lpt,
        "eplb": eplb,
        "hypergraph": hypergraph,
    }
)
SOLVERS: tuple[str, ...] = (*STARTS, "search", *(f"{name}+search" for name in STARTS))


def solve(
    name: str,
    trace: LayerTrace,
    num_ranks: int,
    num_nodes: int = 1,
    *,
    seed: int = 0,
    experts_per_rank: Sequence[int] | None = None,
    extra_slots: int = 0,
    load_limit: float = 1.1,
    expert_groups: int | None = None,
    cost: CostModel | None = None,
    load_E: Array | None = None,
    start: ExpertLayout | None = None,
) -> ExpertLayout:
    """The layout that a solver finds for one layer. Deterministic by seed.

    Args:
        name: one of `SOLVERS`.
        start: where "search" starts (its homes); else from what the solver before "+search" finds.
        others: see `Problem`.

    Raises:
        ValueError: an unknown solver, a start for one that takes none, or what cannot be laid out.
        ImportError: "hypergraph" without its package; says what to install.
    """
    check_solver(name)
    problem = Problem(
        trace, num_ranks, num_nodes, experts_per_rank, extra_slots, load_limit, expert_groups, seed,
        cost or CostModel(), load_E,
    )  # fmt: skip
    if start is not None:
        if name != "search":
            raise ValueError(f"solver {name!r} takes no start; use 'search'")
        if (start.num_ranks, start.num_experts) != (num_ranks, trace.num_experts):
            raise ValueError(
                f"start has {start.num_experts} experts on {start.num_ranks} ranks, not {trace.num_experts} on "
                f"{num_ranks}"
            )
        if any(len(home) > room for home, room in zip(start.homes, problem.room_W, strict=True)):
            raise ValueError(f"start has more experts on a rank than {problem.room_W.tolist()} allow")
        return search(problem, start)
    first, _, then = name.partition("+")
    if first == "search":
        return search(problem, occult(problem), lpt(problem))
    layout = STARTS[first](problem)
    return search(problem, layout) if then else layout


def check_solver(name: str) -> None:
    """Raise ValueError, with the nearest name, if there is no such solver."""
    if name not in SOLVERS:
        near = difflib.get_close_matches(name, SOLVERS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"there is no solver {name!r}{hint}. Solvers: {', '.join((*STARTS, 'search'))}, or NAME+search"
        )
