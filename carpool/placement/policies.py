"""Placement policies: the next layout from expected loads and the current layout.

A policy knows how often each expert is chosen, but not which experts are chosen together. So it counts (token, expert)
pairs, without deduplication. If tokens are distributed evenly over W ranks, l - l / W of an expert's l pairs come from
other ranks. `LoadModel` converts this to seconds:

    4 verbs of the rank that receives most  +  GEMMs of the rank with the largest load

`placement.policy` names one of `POLICIES`, a registry for plug-ins (entry points of the group "carpool.policies"), or
"migrate" or "place", which use a solver instead (`carpool.placement.solvers`). One of `PREDICTORS` gives the expected
loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.solvers.problem import homes_of
from carpool.placement.trace import Array
from carpool.planner.machine.cost import CostModel
from carpool.plugins import Registry


@dataclass(frozen=True)
class LoadModel:
    """Seconds of a layer from loads alone. `tokens_per_rank` of the cost model and `top_k` scale the loads."""

    cost: CostModel = field(default_factory=CostModel)
    top_k: int = 8
    topology: Topology | None = None  # None: one node with NVLink

    def rank_loads(self, load_E: Array, layout: ExpertLayout) -> Array:
        """(W,) pairs of each rank."""
        return np.bincount(homes_of(layout), weights=load_E, minlength=layout.num_ranks)

    def seconds(self, load_E: Array, layout: ExpertLayout) -> float:
        """Modelled time of one layer, forward and backward."""
        ranks, loads = layout.num_ranks, np.asarray(load_E, dtype=np.float64)
        pairs = self.cost.tokens_per_rank * ranks * self.top_k
        load_W = self.rank_loads(loads, layout) * (pairs / max(loads.sum(), 1e-12))
        # Equally many from each rank.
        arriving_WW = np.tile(load_W / ranks, (ranks, 1)) * (1 - np.eye(ranks))
        rides = self.cost.ride_seconds(arriving_WW, self.topology or Topology.even(ranks))
        return rides + self.cost.compute_seconds(load_W)


@dataclass(frozen=True)
class Policy:
    """A policy. All ranks call it with the same arguments, so it must be deterministic.

    Attributes:
        find: (load_E, layout, model, history_SE) -> the next layout; the given one if none is better. load_E are
            expected choices of each expert, history_SE those of the last steps.
    """

    find: Callable[[Array, ExpertLayout, LoadModel, Array], ExpertLayout]

    def __call__(
        self,
        load_E: Array,
        layout: ExpertLayout,
        model: LoadModel | None = None,
        history_SE: Array | None = None,
    ) -> ExpertLayout:
        """The next layout of a layer.

        Args:
            load_E: (E,) expected choices.
            model: of time; None: for the default machine.
            history_SE: (S, E) choices of the last S steps; None: load_E alone."""
        history_SE = np.asarray(load_E)[None] if history_SE is None else history_SE
        return self.find(load_E, layout, model or LoadModel(), history_SE)


def _check(name: str, policy: Policy) -> None:
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {name!r} must be a carpool.placement.policies.Policy, not {policy!r}")


POLICIES: Registry[Policy] = Registry("policy", "carpool.policies", {}, _check)


# -- expected loads ---------------------------------------------------------------------------------------------------

Predictor = Callable[[Array], Array]


def last(history_NE: Array) -> Array:
    """The load of the last step (FasterMoE, Prophet). Good for slow drift, noisy for small batches."""
    return checked_history(history_NE)[-1].copy()


def ema(history_NE: Array, decay: float = 0.9) -> Array:
    """Moving average of the shares, with weight decay**n for a step that is n steps old (MindSpeed's migrator). Reduces
    noise, follows drift late."""
    loads_NE = checked_history(history_NE)
    age_N = np.arange(len(loads_NE))[::-1]
    share_E = np.average(_shares(loads_NE), axis=0, weights=decay**age_N)
    return share_E * loads_NE[-1].sum()


PREDICTORS: Mapping[str, Predictor] = MappingProxyType({"last": last, "ema": ema})


def forecast(name: str, history_NE: Array) -> Array:
    """The next load of each expert, (E,) with the sum of the last step, from those of the steps before.

    Args:
        name: one of `PREDICTORS`.
        history_NE: (N, E) loads, oldest first."""
    if name not in PREDICTORS:
        raise ValueError(f"there is no load predictor {name!r}; use one of {', '.join(PREDICTORS)}")
    return PREDICTORS[name](history_NE)


def checked_history(history_NE: Array) -> Array:
    loads_NE = np.asarray(history_NE, dtype=np.float64)
    if loads_NE.ndim != 2 or not loads_NE.size:
        raise ValueError(f"a history of loads must be (steps, experts), at least one of each, not {loads_NE.shape}")
    if not np.isfinite(loads_NE).all() or (loads_NE < 0).any():
        raise ValueError("a history of loads must be finite and not negative")
    return loads_NE


def _shares(loads_NE: Array) -> Array:
    total_N1 = loads_NE.sum(1, keepdims=True)
    return np.where(total_N1 > 0, loads_NE / np.maximum(total_N1, 1e-12), 1 / loads_NE.shape[1])
