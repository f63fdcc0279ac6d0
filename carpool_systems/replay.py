"""One way of placing, sending and limiting, replayed on one layer of a trace.

A trace is cut into parts of whole sequences, one after another. A part stands for the time between two looks at where
experts should live. In each part a way does what it would have done there, knowing the earlier parts alone:

    part 1         experts in order; nothing is measured
    part n > 1     a solver sees the newest choices of the parts before, a policy their loads as its predictor foretells
                   them; the layout that this gives serves part n, whose rows, load and modelled time are computed

Policy "place" solves once, from the first part. "migrate" moves if `carpool.placement.adopt` says so, for as many parts
as are left. A limit of ranks changes the choices of a part before they are counted (LOSSY). A trace holds the chosen
experts alone, so the scores of those that were not chosen are taken to be in proportion to their load, and below
all that were.

Time is modelled (`CostModel`); rows, load and bytes are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.adopt import aligned, decide, moved_bytes
from carpool.placement.objective import evaluate
from carpool.placement.policies import POLICIES, LoadModel, forecast
from carpool.placement.solvers import solve
from carpool.placement.trace import Array, LayerTrace
from carpool.planner.machine.cost import CostModel
from carpool.routing.limit import LimitOptions, RoutingLimit
from carpool.train.config.schema_placement import PlacementSection

__all__ = ["NUMBERS", "Way", "replay"]

# What `replay` finds for each layer; see `carpool_systems.compare.Outcome`.
NUMBERS = ("rows", "remote", "nodes", "load", "layer_us", "moved", "moved_bytes", "seconds")


@dataclass(frozen=True)
class Way:
    """What is replayed.

    Attributes:
        transport: how rows travel.
        placement: where experts live, as a run's section says; None: in order, always.
        limit: keywords of `LimitOptions`; none: the routing as it was recorded.
    """

    transport: str = "dedup"
    placement: PlacementSection | None = None
    limit: Mapping[str, Any] = field(default_factory=dict)


def replay(
    way: Way, trace: LayerTrace, *, ranks: int, nodes: int, parts: int, seed: int, cost: CostModel
) -> dict[str, float]:
    """`NUMBERS` of one way on one layer: means over the parts after the first, and the seconds that all decisions
    took."""
    one = _Replay(way, trace, ranks, nodes, parts, seed, cost)
    return dict(zip(NUMBERS, one.run(), strict=True))


class _Replay:
    def __init__(
        self, way: Way, trace: LayerTrace, ranks: int, nodes: int, parts: int, seed: int, cost: CostModel
    ) -> None:
        self.way, self.ranks, self.seed = way, ranks, seed
        self.topology, self.cost = Topology.even(ranks, nodes), replace(cost, transport=way.transport)
        self.parts = list(_cut(trace, parts))
        self.layout = ExpertLayout.contiguous(trace.num_experts, ranks)
        self.limit = LimitOptions(**way.limit, topology=self.topology)

    def run(self) -> tuple[float, ...]:
        seconds, moved, found = 0.0, [], []
        for number in range(1, len(self.parts)):
            began, before = time.perf_counter(), self.layout
            self.layout = self._next(number)
            seconds += time.perf_counter() - began
            sent_WW, homes = moved_bytes(before, self.layout, self.cost)
            moved.append((homes, int(sent_WW.sum())))
            found.append(self._count(self._limited(number)))
        means = np.mean(np.array(found), axis=0).tolist()
        return *means, *np.mean(np.array(moved), axis=0).tolist(), seconds

    def _next(self, number: int) -> ExpertLayout:
        """The layout of a part."""
        section = self.way.placement
        if section is None or (section.policy == "place" and number > 1):
            return self.layout
        history_NE = np.stack([part.load_E for part in self.parts[:number]])
        load_E = forecast(section.predictor, history_NE)
        if section.policy in ("place", "migrate"):
            found = solve(
                section.solver, self._seen(number, section.tokens), self.topology, seed=self.seed,
                load_limit=section.load_limit, cost=self.cost, load_E=load_E,
            )  # fmt: skip
            return found if section.policy == "place" else self._adopted(found, number, section)
        model = LoadModel(self.cost, self.parts[0].top_k, self.topology)
        moved = POLICIES[section.policy](load_E, self.layout, model, history_NE)
        return aligned(moved, self.layout, self.topology)

    def _seen(self, number: int, tokens: int) -> LayerTrace:
        """The newest parts before a part, as many as hold so many tokens."""
        first, held = number, 0
        while first and held < tokens:
            first -= 1
            held += self.parts[first].num_tokens
        return _joined(self.parts[first:number])

    def _adopted(self, found: ExpertLayout, number: int, section: PlacementSection) -> ExpertLayout:
        """A layout, if `decide` would move to it by the newest part; else the present one."""
        last, left = self.parts[number - 1], len(self.parts) - number
        found = aligned(found, self.layout, self.topology)
        now, then = (
            evaluate(last, one, topology=self.topology, cost=self.cost).seconds for one in (self.layout, found)
        )
        decision = decide(
            {"layer": self.layout}, {"layer": found}, now, then, steps_left=left * (section.every or 1),
            hysteresis=section.hysteresis, topology=self.topology, cost=self.cost,
        )  # fmt: skip
        return found if decision.adopt else self.layout

    def _limited(self, number: int) -> LayerTrace:
        """The choices of a part, within the limit."""
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
        chosen_TK = np.empty_like(part.expert_TK)
        source_T = part.source_T(self.ranks)
        for rank in range(self.ranks):
            mine = torch.from_numpy(np.flatnonzero(source_T == rank))
            limit = RoutingLimit(self.limit, self.ranks)
            chosen = limit.choose(score_TE[mine], score_TE[mine], part.top_k, self.layout)
            chosen_TK[mine.numpy()] = chosen.numpy()
        return replace(part, expert_TK=chosen_TK)

    def _count(self, part: LayerTrace) -> tuple[float, float, float, float, float]:
        """Rows, to other ranks, to other nodes, per token; fullest rank by the mean; modelled microseconds."""
        found, tokens = evaluate(part, self.layout, topology=self.topology, cost=self.cost), part.num_tokens
        sent_WW = found.sent_WW
        return (
            float(sent_WW.sum() / tokens), float((sent_WW.sum() - sent_WW.trace()) / tokens), found.rows_nodes / tokens,
            found.load_ratio, 1e6 * found.seconds,
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
