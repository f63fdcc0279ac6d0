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
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from carpool.placement.trace import Trace

ONE_ROW_PER_RANK = ("nvlink", "dedup", "hierarchical")


class Rows(NamedTuple):
    """Of one dispatch, for each token of a rank.

    Attributes:
        inside: rows that go to other ranks of the node.
        between: rows that go to other nodes.
        arrive: rows that the experts of a rank get, its own tokens' included.
    """

    inside: float
    between: float
    arrive: float


def check_trace(trace: Trace, num_experts: int, top_k: int) -> None:
    """Raises ValueError if a trace is of a model with other experts."""
    if (trace.num_experts, trace.top_k) != (num_experts, top_k):
        raise ValueError(
            f"the trace has {trace.top_k} of {trace.num_experts} experts for each token, and the model {top_k} of "
            f"{num_experts}: take a trace of this model (`carpool trace`), or leave --trace out for uniform routing"
        )


@cache
def _reached(num_experts: int, top_k: int, parts: int) -> float:
    """The chance that one of so many equal parts of the experts has any of K different ones."""
    rest = num_experts - num_experts // parts
    return 1 - math.comb(rest, top_k) / math.comb(num_experts, top_k)


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

    def reached(self, num_experts: int, top_k: int, parts: int) -> float:
        """Of so many equal parts of the experts, the share that a token visits."""
        if not self.chosen:
            return _reached(num_experts, top_k, parts)
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

    def rows(self, transport: str, num_experts: int, top_k: int, ranks: int, per_node: int) -> Rows:
        """For a group of `ranks` ranks, `per_node` of them on each node."""
        nodes = ranks // per_node
        to_rank = self.reached(num_experts, top_k, ranks)
        each = to_rank if transport in ONE_ROW_PER_RANK else top_k / ranks
        arrive = each * ranks
        if transport == "hierarchical" and nodes > 1:
            between = (nodes - 1) * self.reached(num_experts, top_k, nodes)
            return Rows(nodes * (per_node - 1) * to_rank, between, arrive)
        return Rows((per_node - 1) * each, (ranks - per_node) * each, arrive)
