"""Recipes over one trace: `carpool recipes compare`.

A trace is cut into parts of whole sequences, one after another, each the time between two looks at where experts should
live. In each part a recipe does what it would have done there, knowing the earlier parts alone:

    part 1         experts in order; nothing is measured
    part n > 1     a solver sees the choices of the parts before, a policy their loads, as its predictor foretells them;
                   the layout that this gives serves part n, where rows, load and modelled time are measured exactly

Policy "place" solves once, from the first part. "migrate" moves if `carpool.placement.adopt` says so, with the recipe's
hysteresis and least gain, for as many parts as are left. A limit of ranks changes the choices of a part before they
are measured (LOSSY): a trace holds the chosen experts alone, so what an expert that was not chosen would have scored is
taken to be in proportion to its load, and below all that were.

Time is modelled (`CostModel`); rows, load and bytes are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.adopt import decide, moved_bytes
from carpool.placement.forecast import predict
from carpool.placement.objective import evaluate
from carpool.placement.policies import POLICIES, LoadModel, make_pool
from carpool.placement.solvers import solve
from carpool.placement.trace import Array, LayerTrace, Trace
from carpool.planner.cost import CostModel
from carpool.recipes import Recipe
from carpool.routing.limit import RoutingLimit, coactivation_similarity
from carpool.routing.limit_options import LimitOptions

BASELINE = Recipe("in order", Path(), "experts in order", "", "", (), {"moe": {"transport": "dedup"}})


@dataclass(frozen=True)
class Outcome:
    """What a recipe came to: means over layers and over the parts after the first.

    Attributes:
        recipe, transport: names.
        rows: per token, those that stay included.
        remote, nodes: rows per token to other ranks and to other nodes, as the transport sends them.
        load: fullest rank by the mean.
        layer_us: modelled microseconds of a layer, forward and backward.
        replicas: of a layer, in the last part.
        moved: homes that changed in a layer, per part;  moved_bytes: what they weigh.
        lossy: whether the model's function changes.
        seconds: that deciding took.
    """

    recipe: str
    transport: str
    rows: float
    remote: float
    nodes: float
    load: float
    layer_us: float
    replicas: float
    moved: float
    moved_bytes: float
    lossy: bool
    seconds: float


def compare(
    recipes: Sequence[Recipe],
    trace: Trace,
    *,
    ranks: int,
    nodes: int = 1,
    parts: int = 8,
    seed: int = 0,
    cost: CostModel | None = None,
) -> list[Outcome]:
    """Every recipe, and experts in order, over a trace.

    Raises:
        ValueError: fewer sequences than parts, or what cannot be laid out."""
    if not 2 <= parts <= trace.num_sequences:
        raise ValueError(
            f"{parts} parts: the trace has {trace.num_sequences} sequences, and a part needs one; 2 at least"
        )
    cost = cost or CostModel()
    outcomes = []
    for recipe in (BASELINE, *recipes):
        layers = [_Replay(recipe, trace.layer(n), ranks, nodes, parts, seed, cost).run() for n in trace.layers]
        numbers = {
            field.name: float(np.mean([getattr(one, field.name) for one in layers]))
            for field in fields(Outcome)
            if field.type == "float"
        }
        outcomes.append(replace(layers[0], **numbers))  # type: ignore[arg-type]
    return outcomes


class _Replay:
    """One recipe on one layer."""

    def __init__(
        self, recipe: Recipe, trace: LayerTrace, ranks: int, nodes: int, parts: int, seed: int, cost: CostModel
    ) -> None:
        self.recipe, self.ranks, self.nodes, self.seed = recipe, ranks, nodes, seed
        self.parts = list(_cut(trace, parts))
        self.layout = ExpertLayout.contiguous(trace.num_experts, ranks)
        self.transport, self.topology = recipe.get("moe", "transport", "dedup"), Topology.even(ranks, nodes)
        self.cost = replace(cost, transport=self.transport)
        self.replicas = recipe.get("placement", "replicas", 0)
        options = {key: recipe.get("moe", key) for key in ("limit_ranks", "limit_nodes", "limit_by", "topology_cap")}
        self.limit = LimitOptions(**{k: v for k, v in options.items() if v is not None}, num_nodes=nodes)

    def run(self) -> Outcome:
        seconds, moved, found = 0.0, [], []
        for number in range(1, len(self.parts)):
            began, before = time.perf_counter(), self.layout
            self.layout = self._next(number)
            seconds += time.perf_counter() - began
            sent_WW, homes = moved_bytes(before, self.layout, self.cost)
            moved.append((homes, int(sent_WW.sum())))
            found.append(self._measure(self._limited(number)))
        rows, remote, crossing, load, layer_us = np.mean(found, axis=0)
        homes, size = np.mean(moved, axis=0)
        return Outcome(
            self.recipe.name, self.transport, rows, remote, crossing, load, layer_us,
            self.layout.num_replicas, homes, size, self.limit.active(self.ranks), seconds,
        )  # fmt: skip

    def _next(self, number: int) -> ExpertLayout:
        policy = self.recipe.get("placement", "policy")
        seen = _joined(self.parts[:number])
        if policy is None or (policy == "place" and number > 1):
            return self.layout
        history_NE = np.stack([part.load_E for part in self.parts[:number]])
        load_E = predict(self.recipe.get("placement", "predictor", "ema"), history_NE)
        if policy in ("place", "migrate"):
            found = solve(
                self.recipe.get("placement", "solver"), seen, self.ranks, self.nodes,
                seed=self.seed, extra_slots=self.replicas, cost=self.cost, load_E=load_E,
            )  # fmt: skip
            return found if policy == "place" else self._adopted(found, number)
        options: dict[str, Any] = {}
        if policy == "pick":
            options["pool"] = make_pool(history_NE, self.ranks)
        model = LoadModel(self.cost, seen.top_k, self.topology)
        return POLICIES[policy](load_E, self.layout, self.replicas, model, **options)

    def _adopted(self, found: ExpertLayout, number: int) -> ExpertLayout:
        last, left = self.parts[number - 1], len(self.parts) - number
        now, then = (
            evaluate(last, one, topology=self.topology, cost=self.cost).seconds for one in (self.layout, found)
        )
        decision = decide(
            {"layer": self.layout}, {"layer": found}, now, then,
            steps_left=left * self.recipe.get("placement", "every", 1),
            hysteresis=self.recipe.get("placement", "hysteresis", 2.0),
            least_gain=self.recipe.get("placement", "least_gain", 0.01),
            topology=self.topology, cost=self.cost,
        )  # fmt: skip
        return found if decision.adopt else self.layout

    def _limited(self, number: int) -> LayerTrace:
        """The choices of a part, within the recipe's limit."""
        part = self.parts[number]
        if not self.limit.active(self.ranks):
            return part
        seen = _joined(self.parts[:number])
        expert_TK = torch.from_numpy(part.expert_TK.astype(np.int64))
        prior_E = torch.from_numpy(seen.load_E / max(1, seen.load_E.max())).float()
        score_TE = (0.5 * prior_E).expand(len(expert_TK), -1).clone()
        order_K = torch.arange(part.top_k, 0, -1, dtype=torch.float32)
        own_TK = torch.from_numpy(part.weight_TK.astype(np.float32)) if part.weight_TK is not None else order_K
        score_TE.scatter_(1, expert_TK, (1 + own_TK).expand_as(expert_TK))
        similarity_EE = coactivation_similarity(torch.from_numpy(seen.coactivation_EE))
        chosen_TK = np.empty_like(part.expert_TK)
        source_T = part.source_T(self.ranks)
        for rank in range(self.ranks):
            mine = torch.from_numpy(np.flatnonzero(source_T == rank))
            limit = RoutingLimit(self.limit, self.ranks, rank, similarity_EE)
            chosen, _ = limit.choose(score_TE[mine], score_TE[mine], part.top_k, self.layout)
            chosen_TK[mine.numpy()] = chosen.numpy()
        return replace(part, expert_TK=chosen_TK)

    def _measure(self, part: LayerTrace) -> tuple[float, float, float, float, float]:
        found, tokens = evaluate(part, self.layout, topology=self.topology, cost=self.cost), part.num_tokens
        remote = found.sent_WW.sum() - found.sent_WW.trace()
        return (
            found.sent_WW.sum() / tokens, remote / tokens, found.rows_nodes / tokens, found.load_ratio,
            1e6 * found.seconds,
        )  # fmt: skip


def _cut(trace: LayerTrace, parts: int) -> Iterator[LayerTrace]:
    sequences = np.array_split(np.unique(trace.sequence_T), parts)
    for own in sequences:
        yield trace.subset(np.isin(trace.sequence_T, own))


def _joined(parts: Sequence[LayerTrace]) -> LayerTrace:
    weights: list[Array] = [part.weight_TK for part in parts if part.weight_TK is not None]
    return replace(
        parts[0],
        expert_TK=np.concatenate([part.expert_TK for part in parts]),
        sequence_T=np.concatenate([part.sequence_T for part in parts]),
        weight_TK=np.concatenate(weights) if len(weights) == len(parts) else None,
    )


def to_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(one) for one in outcomes]


def print_table(outcomes: Sequence[Outcome], nodes: int, console: Console | None = None) -> None:
    """The outcomes, experts in order first."""
    console = console or Console(width=140)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("recipe", no_wrap=True)
    for name in (
        "transport",
        "rows",
        "remote",
        "nodes",
        "load",
        "modelled us",
        "replicas",
        "moved",
        "MB moved",
        "seconds",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcomes:
        table.add_row(
            f"{one.recipe} (lossy)" if one.lossy else one.recipe,
            one.transport,
            f"{one.rows:.3f}",
            f"{one.remote:.3f}",
            f"{one.nodes:.3f}" if nodes > 1 else "-",
            f"{one.load:.3f}",
            f"{one.layer_us:.0f}",
            f"{one.replicas:.1f}",
            f"{one.moved:.1f}",
            f"{one.moved_bytes / 1e6:.1f}",
            f"{one.seconds:.2f}",
        )
    console.print(table, highlight=False)
    console.print(
        "rows, remote, nodes: per token, all, to other ranks, to other nodes; load: fullest rank by the mean; "
        "modelled: one layer, forward and backward; replicas: of a layer; moved: homes of a layer between two parts",
        highlight=False,
    )
