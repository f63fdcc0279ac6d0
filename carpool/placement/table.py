"""`carpool place`: runs every solver on one half of a trace, evaluates it on the other half, and writes the best
layout.

The halves are alternate sequences (`Trace.split`). The best solver of each layer is chosen on the half that was solved:
the least modelled time, of those within the load limit there, if any is. So the choice does not bias the numbers of the
held-out half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.placement.objective import Objective, evaluate
from carpool.placement.solvers import check_solver, default_solvers, solve
from carpool.placement.trace import Array, LayerTrace, Trace
from carpool.planner.machine.cost import CostModel


@dataclass(frozen=True)
class Row:
    """One solver on one layer. All numbers are of the held-out half, except solved_*.

    Attributes:
        ranks_per_token: mean number of ranks that a token visits, its own included if it has experts there.
        remote, nodes: hidden states sent per token to other ranks, and to other nodes, by the cost model's transport.
        load: largest rank load over the mean.
        intra: share of pairs of a token's experts that one rank serves.
        layer_us: modelled microseconds of the layer, forward and backward.
        solved_*: the same for the half that was solved.
        seconds: time of the solver.
        best: whether this layout is written.
        unavailable: why the solver could not run, or None.
    """

    layer: str
    solver: str
    ranks_per_token: float = 0.0
    remote: float = 0.0
    nodes: float = 0.0
    load: float = 0.0
    intra: float = 0.0
    layer_us: float = 0.0
    solved_ranks_per_token: float = 0.0
    solved_load: float = 0.0
    solved_layer_us: float = 0.0
    seconds: float = 0.0
    best: bool = False
    unavailable: str | None = None


@dataclass(frozen=True)
class Placement:
    """The result of `place`; `to_dict` can be written as JSON.

    Attributes:
        rows: every solver on every layer.
        layouts: the best of each layer.
        specialisation: of each layer of the trace (`LayerTrace.specialisation`).
        settings: the arguments of `place`.
    """

    rows: list[Row]
    layouts: Layouts
    specialisation: dict[str, dict[str, float]]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "specialisation": self.specialisation,
            "rows": [asdict(row) for row in self.rows],
            "layouts": self.layouts.to_dict(),
        }

    def means(self) -> list[Row]:
        """One row per solver: means over layers, the largest load, the sum of seconds. The last row has the best solver
        of each layer."""
        by_solver: dict[str, list[Row]] = {}
        for row in self.rows:
            by_solver.setdefault(row.solver, []).append(row)
        by_solver["best of each layer"] = [row for row in self.rows if row.best]
        return [_mean(name, rows) for name, rows in by_solver.items()]


def place(
    trace_path: str | Path | Trace,
    *,
    ranks: int,
    nodes: int = 1,
    solvers: Sequence[str] | None = None,
    slots: Sequence[int] | None = None,
    load_limit: float = 1.1,
    layers: Sequence[str] | None = None,
    expert_groups: int | None = None,
    seed: int = 0,
    cost: CostModel | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Placement:
    """Run solvers on every layer of a trace.

    Args:
        trace_path: a file that `Trace.load` reads, or a trace.
        ranks, nodes: W, N.
        solvers: names for `solve`. None: `default_solvers()`. One whose package is missing is reported, not fatal.
        slots: experts that each rank has memory for; None: equally many.
        load_limit: largest rank load over the mean that is allowed.
        layers: names; None: all.
        expert_groups, seed, cost: see `solvers.Problem`.
        on_row: called with each row when it is complete.

    Raises:
        ValueError: no trace, an unknown solver or layer, an impossible layout, or no solver available."""
    solvers = default_solvers() if solvers is None else solvers
    for name in solvers:
        check_solver(name)
    trace = trace_path if isinstance(trace_path, Trace) else Trace.load(trace_path)
    cost, topology = cost or CostModel(), Topology.even(ranks, nodes)
    if not solvers:
        raise ValueError("no solver given")
    solved, held_out = trace.split(2)
    rows: list[Row] = []
    best: dict[str, ExpertLayout] = {}
    for layer in layers or trace.layers:
        mine, other = solved.layer(layer), held_out.layer(layer)
        found: list[tuple[Row, ExpertLayout, Objective]] = []
        missing: list[Row] = []
        for name in solvers:
            start = time.perf_counter()
            try:
                layout = solve(
                    name,
                    mine,
                    topology,
                    seed=seed,
                    experts_per_rank=slots,
                    load_limit=load_limit,
                    expert_groups=expert_groups,
                    cost=cost,
                )
            except ImportError as error:
                missing.append(Row(layer, name, unavailable=str(error)))
                continue
            seconds = time.perf_counter() - start
            here, there = (evaluate(half, layout, topology=topology, cost=cost) for half in (mine, other))
            found.append((_row(layer, name, here, there, seconds), layout, here))
        if not found:
            raise ValueError(f"no solver is available: {missing[0].unavailable}")
        within = [one for one in found if one[2].load_ratio <= load_limit] or found
        chosen = min(within, key=lambda one: one[2].seconds)
        best[layer] = chosen[1]
        for row in [Row(**{**asdict(row), "best": row is chosen[0]}) for row, _, _ in found] + missing:
            rows.append(row)
            if on_row is not None:
                on_row(row)
    settings = {
        "trace": str(trace_path) if not isinstance(trace_path, Trace) else None,
        "trace_meta": dict(trace.meta),
        "tokens_solved": solved.num_tokens,
        "tokens_held_out": held_out.num_tokens,
        "ranks": ranks,
        "nodes": nodes,
        "solvers": list(solvers),
        "slots": None if slots is None else list(slots),
        "load_limit": load_limit,
        "expert_groups": expert_groups,
        "seed": seed,
        "cost": asdict(cost),
    }
    about = {**settings, "solver": {row.layer: row.solver for row in rows if row.best}}
    return Placement(rows, Layouts(best, about), {n: trace.layer(n).specialisation() for n in best}, settings)


def print_table(result: Placement, console: Console | None = None, *, every_layer: bool = False) -> None:
    """Print means over layers, or with `every_layer` a table for each."""
    console = console or Console(width=140)
    settings = result.settings
    nodes = f"{settings['nodes']} node{'s' * (settings['nodes'] != 1)}"
    title = (
        f"{settings['ranks']} ranks on {nodes}, load limit {settings['load_limit']:g}; solved on "
        f"{settings['tokens_solved']} tokens, shown for {settings['tokens_held_out']} held out"
    )
    console.print(title, style="bold", highlight=False)
    if every_layer:
        for layer in result.layouts:
            console.print(layer, highlight=False)
            console.print(_table([row for row in result.rows if row.layer == layer], settings), highlight=False)
    else:
        console.print(_table(result.means(), settings), highlight=False)
    for row in {row.solver: row for row in result.rows if row.unavailable}.values():
        console.print(f"{row.solver} is not available: {row.unavailable}", highlight=False, markup=False)
    console.print(
        "ranks/token: ranks that a token visits, mean; remote, nodes: sends per token to other ranks and nodes; load: "
        "largest of a rank over the mean (of several layers, the largest); intra: pairs of a token's experts that one "
        "rank serves; "
        "modelled: one layer, forward and backward; in brackets: on the half that was solved"
        + ("; *: the best there" if every_layer else ""),
        highlight=False,
    )


def _table(rows: Sequence[Row], settings: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("solver", no_wrap=True)
    for name in ("ranks/token", "remote", "nodes", "load", "intra", "modelled us", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.unavailable:
            table.add_row(row.solver, "not available")
            continue
        load = f"{row.load:.3f} ({row.solved_load:.3f})"
        table.add_row(
            f"{row.solver} *" if row.best else row.solver,
            f"{row.ranks_per_token:.3f} ({row.solved_ranks_per_token:.3f})",
            f"{row.remote:.3f}",
            f"{row.nodes:.3f}" if settings["nodes"] > 1 else "-",
            f"[red]{load}[/]" if row.load > settings["load_limit"] else load,
            f"{row.intra:.1%}",
            f"{row.layer_us:.0f}",
            f"{row.seconds:.2f}",
        )
    return table


def _row(layer: str, name: str, here: Objective, there: Objective, seconds: float) -> Row:
    return Row(
        layer=layer,
        solver=name,
        ranks_per_token=there.ranks_per_token,
        remote=there.rows_remote / there.tokens,
        nodes=there.rows_nodes / there.tokens,
        load=there.load_ratio,
        intra=there.intra_share,
        layer_us=1e6 * there.seconds,
        solved_ranks_per_token=here.ranks_per_token,
        solved_load=here.load_ratio,
        solved_layer_us=1e6 * here.seconds,
        seconds=seconds,
    )


def _mean(name: str, rows: Sequence[Row]) -> Row:
    present = [row for row in rows if not row.unavailable]
    if not present:
        return Row("all", name, unavailable=rows[0].unavailable)

    def mean(what: str) -> float:
        return sum(float(getattr(row, what)) for row in present) / len(present)

    means = ("ranks_per_token", "remote", "nodes", "intra", "layer_us", "solved_ranks_per_token", "solved_layer_us")
    return Row(
        "all",
        name,
        **{what: mean(what) for what in means},  # type: ignore[arg-type]
        load=max(row.load for row in present),
        solved_load=max(row.solved_load for row in present),
        seconds=sum(row.seconds for row in present),
    )


def plot_coactivation(trace: LayerTrace, layout: ExpertLayout, path: str | Path) -> None:
    """Write a figure (PNG, SVG or PDF by its name) of how often two experts are chosen together, before and after.

    Squares are ranks: pairs inside a square need one send. Needs matplotlib.
    """
    from matplotlib.figure import Figure

    plain = ExpertLayout.contiguous(layout.num_experts, layout.num_ranks)
    together_EE = trace.coactivation_EE.astype(np.float64)
    np.fill_diagonal(together_EE, 0)
    expected_EE = _expected(trace.load_E, together_EE)
    excess_EE = together_EE / np.maximum(expected_EE, 1e-9)
    np.fill_diagonal(excess_EE, np.nan)

    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, one, title in zip(axes, (plain, layout), ("in order", "placed"), strict=True):
        order = np.array([expert for home in one.homes for expert in home])
        image = axis.imshow(excess_EE[np.ix_(order, order)], vmin=0, vmax=4, cmap="magma", interpolation="nearest")
        for end in np.cumsum([len(home) for home in one.homes])[:-1]:
            axis.axhline(end - 0.5, color="white", linewidth=0.6)
            axis.axvline(end - 0.5, color="white", linewidth=0.6)
        copies = evaluate(trace, one).ranks_per_token
        axis.set_title(f"{title}: {copies:.2f} ranks per token")
        axis.set_xlabel("expert, by rank")
    axes[0].set_ylabel("expert, by rank")
    figure.colorbar(image, ax=axes, label="chosen together, times what independent choices would be", shrink=0.8)
    figure.suptitle(trace.name)
    figure.savefig(path, dpi=130)


def _expected(load_E: Array, together_EE: Array) -> Array:
    """(E, E) expected counts if experts were chosen independently by their loads; same sum, zero diagonal."""
    product_EE = np.outer(load_E, load_E).astype(np.float64)
    np.fill_diagonal(product_EE, 0)
    return product_EE * (together_EE.sum() / max(product_EE.sum(), 1.0))
