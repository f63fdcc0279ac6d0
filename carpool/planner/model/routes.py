"""How many rows a ride sends for each token, inside a node and between nodes, and how full the fullest rank is.

    128 experts, 8 of a token, on 64 ranks of 8 nodes, chosen uniformly

    transport       inside      between nodes    why
    alltoall        0.88        7.00             a row for each expert
    dedup           0.83        6.69             one for each rank that holds any of them
    hierarchical    6.6         4.6              one for each other node, and one for each rank there

`Routes()` counts by probabilities, `Routes.of(trace, ...)` what a recorded routing did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from carpool.planner.transports import transport_class

if TYPE_CHECKING:
    from carpool.placement.trace import Trace
    from carpool.transport.volume import MeanTraffic


def check_trace(trace: Trace, num_experts: int, top_k: int) -> None:
    """Raises ValueError if a trace is of a model with other experts."""
    if (trace.num_experts, trace.top_k) != (num_experts, top_k):
        raise ValueError(
            f"the trace has {trace.top_k} of {trace.num_experts} experts for each token, and the model {top_k} of "
            f"{num_experts}: take a trace of this model (`carpool trace`), or leave --trace out for uniform routing"
        )


class Choice(NamedTuple):
    """Among what a token chooses.

    Attributes:
        num_experts, top_k: E, K.
        groups, of_groups: a token's experts are in `of_groups` of so many equal groups in order, as DeepSeek-V3's
            router has it (arXiv 2412.19437, section 2.1.2): 4 of 8. Equal: anywhere.

    Example: `Choice(256, 8, 8, 4)` with a group on each node: 8 experts of a token are on 4 nodes at most.
    """

    num_experts: int
    top_k: int
    groups: int = 1
    of_groups: int = 1


@cache
def _reached(choice: Choice, parts: int) -> float:
    """The chance that one of so many equal parts of the experts has any of K different ones."""
    experts, top_k, groups, of_groups = choice
    size, open_to = experts // parts, experts * of_groups // groups

    def any_of(number: int) -> float:
        """Of so many experts that are open."""
        return 1 - math.comb(open_to - number, top_k) / math.comb(open_to, top_k)

    if parts % groups == 0:
        # A part lies in one group.
        return of_groups / groups * any_of(size)
    if groups % parts:
        # Groups lie across parts: as if choices were not limited.
        return 1 - math.comb(experts - size, top_k) / math.comb(experts, top_k)
    own = groups // parts
    found = 0.0
    for chosen in range(min(own, of_groups) + 1):
        ways = math.comb(own, chosen) * math.comb(groups - own, of_groups - chosen)
        found += ways / math.comb(groups, of_groups) * any_of(chosen * experts // groups)
    return found


@dataclass(frozen=True)
class Routes:
    """Choices of experts.

    Attributes:
        chosen: (tokens, K) of each layer of a trace; empty: uniform.
        source: what they are, for people.
    """

    chosen: tuple[npt.NDArray[Any], ...] = ()
    source: str = "uniform choices (assumed)"
    _found: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, trace: Trace, name: str, num_experts: int, top_k: int) -> Routes:
        """Of a recorded routing of a model with so many experts, at most 4,096 tokens of a layer.

        Raises:
            ValueError: the trace is of another model."""
        check_trace(trace, num_experts, top_k)
        layers = tuple(np.asarray(layer[:4096], dtype=np.int64) for layer in trace.expert_LTK)
        return cls(layers, f"trace {name}: {len(layers)} layers (measured)")

    def reached(self, choice: Choice, parts: int) -> float:
        """Of so many equal parts of the experts, the share that a token visits."""
        num_experts = choice.num_experts
        if not self.chosen:
            return _reached(choice, parts)
        key = num_experts, parts
        if key not in self._found:
            shares = []
            for expert_TK in self.chosen:
                part_TK = np.sort(expert_TK * parts // num_experts, axis=1)
                shares.append((1 + (np.diff(part_TK, axis=1) > 0).sum(1)).mean() / parts)
            self._found[key] = float(np.mean(shares))
        found: float = self._found[key]
        return found

    def fullest(self, num_experts: int, ranks: int) -> float:
        """The load of the fullest rank over the mean, averaged over layers: ranks meet in every one."""
        if not self.chosen or ranks == 1:
            return 1.0
        key = "fullest", num_experts, ranks
        if key not in self._found:
            loads = [np.bincount(e.ravel() * ranks // num_experts, minlength=ranks) for e in self.chosen]
            self._found[key] = float(np.mean([load.max() / load.mean() for load in loads]))
        found: float = self._found[key]
        return found

    def balanced(self, num_experts: int, ranks: int, slots: int, limit: float | None) -> tuple[float, float]:
        """With so many spare slots on each rank: the load of the fullest rank over the mean, and how many experts the
        rank with most of them fetches or sends. Of a trace by plans that weigh no time, means over layers; else what
        moe.balance_limit allows, with all slots in use."""
        if not self.chosen or ranks == 1:
            return (limit or 1.0, float(slots)) if ranks > 1 else (1.0, 0.0)
        key = "balanced", num_experts, ranks, slots, limit
        if key not in self._found:
            self._found[key] = _planned(self.chosen, num_experts, ranks, slots, limit)
        found: tuple[float, float] = self._found[key]
        return found

    def rows(self, transport: str, choice: Choice, ranks: int, per_node: int) -> MeanTraffic:
        """Of one dispatch over a group of `ranks` ranks, `per_node` of them on each node."""
        way = transport_class(transport)
        return way.mean_traffic(partial(self.reached, choice), choice.num_experts, choice.top_k, ranks, per_node)


def _planned(
    chosen: tuple[npt.NDArray[Any], ...], num_experts: int, ranks: int, slots: int, limit: float | None
) -> tuple[float, float]:
    import torch

    from carpool.replicas.slot_plan import Costs, count_choices, plan_slots

    home_E = torch.arange(num_experts) * ranks // num_experts
    loads, moved = [], []
    for expert_TK in chosen:
        parts = np.array_split(expert_TK.astype(np.int32), ranks)
        load_WE = torch.stack([count_choices(torch.from_numpy(part), num_experts) for part in parts])
        plan = plan_slots(load_WE, home_E, slots, Costs(limit=round(1000 * (limit or 0))))
        filled_WS = plan.expert_WS >= 0
        sent_W = torch.bincount(home_E[plan.expert_WS[filled_WS].long()], minlength=ranks)
        loads.append(float(plan.load_W.max() * ranks / load_WE.sum()))
        moved.append(int(torch.maximum(filled_WS.sum(1), sent_W).max()))
    return float(np.mean(loads)), float(np.mean(moved))
