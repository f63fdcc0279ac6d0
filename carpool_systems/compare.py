"""Recipes over one trace, one thing at a time: `carpool recipes compare`.

A trace holds which experts each token chose. So a replay (replay.py) can tell apart three things, and a comparison
varies one of them while the other two are the same in every row:

    placement   where experts live. All rows have one transport, and the routing as it was recorded.
    transport   how many rows travel. All rows have one placement, and the routing as it was recorded.
    routing     to how many ranks a token may go (LOSSY). All rows have one transport and one placement.

It cannot tell apart schedules, kernels and their order, whose effect is time on a machine; nor routers with another
top-k, capacity or loss, which would have been trained to other choices than those recorded. `refusal` says why a
recipe has no place in a comparison; `carpool recipes race` (race.py) takes training steps, and tells them apart.
Recipes that do the same to what varies share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from carpool.layout.topology import Topology
from carpool.placement.trace import Trace
from carpool.planner.machine.cost import CostModel
from carpool.recipes import Recipe, names, read
from carpool.routing.limit import LimitOptions
from carpool.train.config import Config
from carpool.train.config.schema import config_type
from carpool.train.extensions import extensions_in_use
from carpool.transport import TRANSPORTS, Transport
from carpool.transport.multi_hop import MultiHop
from carpool_systems.mechanisms import load
from carpool_systems.replay import NUMBERS, Way, replay
from carpool_systems.resolve import in_effect, resolve

__all__ = ["Axis", "Outcome", "chosen", "compare", "print_table", "refusal", "ways"]

Axis = Literal["placement", "transport", "routing"]
IN_ORDER, RECORDED = "experts in order", "as recorded"
_LIMITS = ("limit_ranks", "limit_nodes", "limit_by")
# Settings that change what a router chooses, so that a recording of another router says nothing about them.
_ROUTERS = ("model.num_experts_per_tok", "moe.capacity_factor", "moe.random_second")


@dataclass(frozen=True)
class Outcome:
    """What one way came to: means over layers and over the parts of the trace after the first.

    Attributes:
        name: of what varies: of a transport, or of the recipes that place or limit so.
        rows: per token, those that stay included.
        remote, nodes: rows per token to other ranks and to other nodes.
        load: fullest rank by the mean.
        layer_us: modelled microseconds of a layer, forward and backward.
        moved: homes that changed in a layer, per part;  moved_bytes: what they weigh.
        lossy: whether the model's function changes.
        seconds: that deciding took.
    """

    name: str
    rows: float
    remote: float
    nodes: float
    load: float
    layer_us: float
    moved: float
    moved_bytes: float
    seconds: float
    lossy: bool = False

    def same_as(self, other: Outcome) -> bool:
        """Whether everything that is counted is the same."""
        return all(getattr(self, key) == getattr(other, key) for key in NUMBERS if key != "seconds")


def refusal(recipe: Recipe, axis: Axis) -> str | None:
    """Why a recipe has no place in a comparison of `axis`, or None if it has one."""
    config = resolve(recipe)
    effective, base = in_effect(config), in_effect(config_type()())
    router = [key for key in _ROUTERS if effective.get(key) != base.get(key)]
    if router:
        return "its router has another top-k, or drops, and was not recorded: race it, or train with it and record that"
    if not config.codec.codecs.plain:
        return "its rows are encoded or merged on their way, and a recording does not hold rows: race it"
    if effective.get("sequence_moves.every") is not None:
        return "its sequences move between layers, and a recording holds their choices where they were: race it"
    if any(one.architecture_settings() for one in extensions_in_use(config)):
        return "it is another model, which would have been trained to other choices"
    limits = _limit(config)
    if axis == "routing":
        return None if limits else "it leaves the routing as it is"
    if issubclass(TRANSPORTS.get(config.moe.transport, Transport), MultiHop):
        return "its rows take several hops, which needs several nodes: race it, or see carpool bench transport"
    if axis == "transport":
        return None if config.moe.transport != "auto" else "it leaves the transport to the machine"
    if limits:
        return "it limits the routing, too: compare that with --vary routing, and --placement of a recipe like it"
    if effective.get("moe.spare_slots") and "placement.policy" not in effective:
        return "its replicas follow each micro-batch, and homes stay: race it, or see carpool bench layer"
    if "placement.policy" not in effective:
        return "its experts stay in order: what it is about is time on a machine, which no recording holds: race it"
    return None


def chosen(axis: Axis, given: Sequence[str] | None = None) -> tuple[list[Recipe], dict[str, str]]:
    """The recipes to compare by `axis`, and why others are not among them.

    Args:
        given: names or paths of TOML files. None: of all recipes those that can be compared so.

    Raises:
        ValueError: one that was given cannot be compared so, or there is no such recipe."""
    if given is not None:
        recipes = [load(name) for name in given]
        _refuse(axis, recipes)
        return recipes, {}
    taken: list[Recipe] = []
    refused: dict[str, str] = {}
    for name in names():
        if missing := read(name).missing:
            refused[name] = f"this version lacks {', '.join(missing)}"
        elif why := refusal(recipe := load(name), axis):
            refused[name] = why
        else:
            taken.append(recipe)
    return taken, refused


def _refuse(axis: Axis, recipes: Sequence[Recipe]) -> None:
    if why := {recipe.name: reason for recipe in recipes if (reason := refusal(recipe, axis))}:
        told = [f"{name} cannot be compared by {axis}: {reason}" for name, reason in why.items()]
        raise ValueError("\n".join([*told, f"in training steps: carpool recipes race --recipes {','.join(why)}"]))


def compare(
    axis: Axis,
    recipes: Sequence[Recipe],
    trace: Trace,
    *,
    ranks: int,
    nodes: int = 1,
    transport: str = "dedup",
    placement: Recipe | None = None,
    parts: int = 8,
    seed: int = 0,
    cost: CostModel | None = None,
    on_layer: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Recipes that differ in `axis`, and what they are compared with, over a trace.

    Args:
        recipes: `refusal` must have nothing against them.
        ranks, nodes: W, N.
        transport: of all rows, unless it varies.
        placement: of all rows, unless it varies. None: experts in order.
        parts: of the trace.
        seed, cost: see `carpool.placement.solvers.Problem`.
        on_layer: called with the row's name when one of its layers is done.

    Raises:
        ValueError: a recipe that is refused, fewer sequences than parts, an unknown transport, or what cannot be laid
            out.
    """
    _refuse(axis, recipes)
    if not 2 <= parts <= trace.num_sequences:
        raise ValueError(
            f"{parts} parts: the trace has {trace.num_sequences} sequences, and a part needs one; 2 at least"
        )
    cost = cost or CostModel()
    outcomes: list[Outcome] = []
    for name, way in ways(axis, recipes, transport, placement).items():
        layers = []
        for layer in trace.layers:
            layers.append(replay(way, trace.layer(layer), ranks=ranks, nodes=nodes, parts=parts, seed=seed, cost=cost))
            if on_layer is not None:
                on_layer(name)
        means = {key: float(np.mean([one[key] for one in layers])) for key in NUMBERS}
        lossy = LimitOptions(**way.limit, topology=Topology.even(ranks, nodes)).active(ranks)
        outcome = Outcome(name=name, lossy=lossy, **means)
        # Two transports may send the same rows; then they are one row here, too.
        twin = next((one for one in outcomes if axis == "transport" and one.same_as(outcome)), None)
        if twin is None:
            outcomes.append(outcome)
        else:
            outcomes[outcomes.index(twin)] = replace(twin, name=f"{twin.name} and {name}")
    return outcomes


def ways(
    axis: Axis, recipes: Sequence[Recipe], transport: str = "dedup", placement: Recipe | None = None
) -> dict[str, Way]:
    """What is replayed, by the name of its row; the first is what the others are compared with."""
    fixed = Way(transport, None if placement is None else resolve(placement).placement)
    varied: dict[str, Way] = {}
    if axis == "placement":
        varied[IN_ORDER] = replace(fixed, placement=None)
    elif axis == "routing":
        varied[RECORDED] = fixed
    groups: dict[Any, tuple[list[str], Way]] = {}
    for recipe in recipes:
        config = resolve(recipe)
        if axis == "placement":
            own = {key: value for key, value in in_effect(config).items() if key.startswith("placement.")}
            key: Any = sorted(own.items())
            way = replace(fixed, placement=config.placement)
        elif axis == "transport":
            key, way = config.moe.transport, replace(fixed, transport=config.moe.transport)
        else:
            limit = _limit(config)
            key, way = sorted(limit.items()), replace(fixed, limit=limit)
        groups.setdefault(str(key), ([], way))[0].append(recipe.name)
    for members, way in groups.values():
        varied[way.transport if axis == "transport" else ", ".join(members)] = way
    return varied


def _limit(config: Config) -> dict[str, Any]:
    """Keywords of `LimitOptions` that limit something."""
    limit = {key: getattr(config.moe, key) for key in _LIMITS}
    found = {key: value for key, value in limit.items() if value is not None}
    return found if len(found) > 1 else {}  # limit_by alone limits nothing


def print_table(
    outcomes: Sequence[Outcome],
    axis: Axis,
    *,
    nodes: int,
    same: Mapping[str, str],
    refused: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """The outcomes. `same`: the other two things, which all rows share; `refused`: why recipes are not among them."""
    console = console or Console(width=140)
    shared = ", ".join(f"{key} {value}" for key, value in same.items())
    console.print(f"{axis} varies; in all rows: {shared}", style="bold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(axis, overflow="fold")
    for heading in (
        "rows",
        "remote",
        "nodes",
        "load",
        "modelled us",
        "moved",
        "MB moved",
        "seconds",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in outcomes:
        table.add_row(
            f"{one.name} (lossy)" if one.lossy else one.name,
            f"{one.rows:.3f}",
            f"{one.remote:.3f}",
            f"{one.nodes:.3f}" if nodes > 1 else "-",
            f"{one.load:.3f}",
            f"{one.layer_us:.0f}",
            f"{one.moved:.1f}",
            f"{one.moved_bytes / 1e6:.1f}",
            f"{one.seconds:.2f}",
        )
    console.print(table, highlight=False)
    console.print(
        "rows, remote, nodes: per token, all, to other ranks, to other nodes; load: fullest rank by the mean; "
        "modelled: one layer, forward and backward; moved: homes of a layer between two parts",
        highlight=False,
    )
    refused = refused or {}
    for reason in dict.fromkeys(refused.values()):
        members = ", ".join(name for name, why in refused.items() if why == reason)
        console.print(f"left out: {members}: {reason}", highlight=False, markup=False)
    if refused:
        console.print("carpool recipes race --recipes NAME,... takes training steps instead", highlight=False)
