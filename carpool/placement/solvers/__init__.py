"""Solvers: from a recorded routing to an `ExpertLayout`. One file each; none needs an accelerator.

    contiguous, random    baselines that ignore the routing
    lpt                   load alone
    hypergraph            the exact objective without load, by Mt-KaHyPar
    search                the exact objective under the load limit

Plug-ins add further ones, such as eplb and occult of carpool_systems. "hypergraph+search" starts the search from the
layout of that solver, and so on.

A solver is a deterministic function from a `Problem` to an `ExpertLayout`. From outside the package:

    # mine.py, with CARPOOL_PLUGINS=mine; or an entry point of the group "carpool.solvers" (carpool/plugins)
    from carpool.placement.solvers import Problem, register

    @register
    def backwards(problem: Problem) -> ExpertLayout:
        rank_E = np.repeat(np.arange(problem.num_ranks), problem.fill_W)[::-1]
        return problem.layout(rank_E)

`carpool place`, `placement.solver` of `carpool train`, and recipes then accept "backwards" and "backwards+search".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.solvers.hypergraph import hypergraph
from carpool.placement.solvers.plain import contiguous, lpt, random
from carpool.placement.solvers.problem import Problem
from carpool.placement.solvers.search import by_pairs, search
from carpool.placement.trace import Array, LayerTrace
from carpool.planner.machine.cost import CostModel
from carpool.plugins import Registry
from carpool.plugins.nearest import nearest

__all__ = [
    "SOLVERS",
    "Problem",
    "Solver",
    "check_solver",
    "default_solvers",
    "register",
    "solve",
    "solver_names",
]

Solver = Callable[[Problem], ExpertLayout]


def _search(problem: Problem) -> ExpertLayout:
    return search(problem, by_pairs(problem), lpt(problem))


def _check(name: str, solver: Solver) -> None:
    if not callable(solver) or not name or "+" in name or "," in name:
        raise ValueError(f"solver {name!r} must be a function, and its name without + and commas; it is {solver!r}")


SOLVERS: Registry[Solver] = Registry(
    "solver",
    "carpool.solvers",
    {"contiguous": contiguous, "random": random, "lpt": lpt, "hypergraph": hypergraph, "search": _search},
    _check,
)
register = SOLVERS.register


def solver_names() -> tuple[str, ...]:
    """The names for `solve`: every solver, and every solver as the start of the search."""
    return (*SOLVERS, *(f"{name}+search" for name in SOLVERS if name != "search"))


def default_solvers() -> tuple[str, ...]:
    """The solvers of `carpool place`: all, and the search from the strongest start."""
    return (*SOLVERS, "hypergraph+search")


def solve(
    name: str,
    trace: LayerTrace,
    topology: Topology,
    *,
    seed: int = 0,
    experts_per_rank: Sequence[int] | None = None,
    load_limit: float = 1.1,
    expert_groups: int | None = None,
    cost: CostModel | None = None,
    load_E: Array | None = None,
    start: ExpertLayout | None = None,
) -> ExpertLayout:
    """The layout of a solver for one layer. Deterministic for a seed.

    Args:
        name: one of `solver_names()`.
        topology: of the ranks; `Topology.even(8, 2)` is two nodes of four.
        start: the layout whose homes start "search"; else that of the solver before "+search".
        others: see `Problem`.

    Raises:
        ValueError: an unknown solver, a start for one that takes none, or an impossible layout.
        ImportError: "hypergraph" without its package, or a plug-in that cannot be imported; with advice.
    """
    check_solver(name)
    problem = Problem(trace, topology, experts_per_rank, load_limit, expert_groups, seed, cost or CostModel(), load_E)
    if start is not None:
        if name != "search":
            raise ValueError(f"solver {name!r} takes no start; use 'search'")
        if (start.num_ranks, start.num_experts) != (topology.num_ranks, trace.num_experts):
            raise ValueError(
                f"start has {start.num_experts} experts on {start.num_ranks} ranks, not {trace.num_experts} on "
                f"{topology.num_ranks}"
            )
        if any(len(home) > capacity for home, capacity in zip(start.homes, problem.capacity_W, strict=True)):
            raise ValueError(f"start has more experts on a rank than {problem.capacity_W.tolist()} allow")
        return search(problem, start)
    first, _, then = name.partition("+")
    layout = SOLVERS[first](problem)
    _check_layout(first, layout, problem)
    return search(problem, layout) if then else layout


def _check_layout(name: str, layout: ExpertLayout, problem: Problem) -> None:
    """Raise ValueError if a solver's layout does not have the problem's experts and ranks, or exceeds a capacity."""
    if not isinstance(layout, ExpertLayout):
        raise ValueError(f"solver {name!r} must return an ExpertLayout, not a {type(layout).__name__}")
    if (layout.num_ranks, layout.num_experts) != (problem.num_ranks, problem.num_experts):
        raise ValueError(
            f"solver {name!r} found a layout of {layout.num_experts} experts on {layout.num_ranks} ranks, not of "
            f"{problem.num_experts} on {problem.num_ranks}"
        )
    homes = [len(one) for one in layout.homes]
    if any(home > capacity for home, capacity in zip(homes, problem.capacity_W, strict=True)):
        raise ValueError(
            f"solver {name!r} gives ranks {homes} experts, but they own {problem.capacity_W.tolist()} at most"
        )


def check_solver(name: str) -> None:
    """Raise ValueError, with the nearest name, if there is no such solver."""
    known = solver_names()
    if name not in known:
        near = nearest(name, known, cutoff=0.4)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"there is no solver {name!r}{hint}. Solvers: {', '.join(SOLVERS)}, or NAME+search")
