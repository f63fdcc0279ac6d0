"""Placement policies: the next layout from expected loads and the current layout.

A policy knows how often each expert is chosen, but not which experts are chosen together. So it counts (token, expert)
pairs, without deduplication. If tokens are distributed evenly over ranks, an expert with load l and replicas on c of W
ranks gives each of these l / c pairs, of which l (1/c - 1/W) come from other ranks. `LoadModel` converts this to
seconds:

    4 verbs of the rank that receives most  +  GEMMs of the rank with the largest load  +  filling replicas, gradients

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
from carpool.placement.trace import Array
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.plugins import Registry
from carpool.transport import find_transport


@dataclass(frozen=True)
class LoadModel:
    """Seconds of a layer from loads alone. `tokens_per_rank` of the cost model and `top_k` scale the loads."""

    cost: CostModel = field(default_factory=CostModel)
    top_k: int = 8
    topology: Topology | None = None  # None: one node with NVLink

    def rank_loads(self, load_E: Array, held_EW: Array) -> Array:
        """(W,) pairs of each rank, if the replicas of an expert share its load equally."""
        return np.asarray((np.asarray(load_E, dtype=np.float64) / held_EW.sum(1)) @ held_EW)

    def seconds(self, load_E: Array, held_EW: Array, home_E: Array, slices: int = 1) -> float:
        """Modelled time of one layer, forward and backward.

        Args:
            held_EW: bool, whether a rank holds each expert; home_E: its home.
            slices: of each expert. held_EW and home_E then have E * slices entries, and load_E has E."""
        return float(self.seconds_of(load_E, held_EW[None], home_E, slices)[0])

    def seconds_of(self, load_E: Array, held_CEW: Array, home_E: Array, slices: int = 1) -> Array:
        """(C,) the same for C candidates."""
        num_ranks, loads = held_CEW.shape[2], np.asarray(load_E, dtype=np.float64)
        pairs = loads * (self.cost.tokens_per_rank * num_ranks * self.top_k / max(loads.sum(), 1e-12))
        pairs = pairs.repeat(slices)
        held = held_CEW.astype(np.float64)
        replicas_CE = held.sum(2)
        load_CW = np.matmul((pairs / replicas_CE)[:, None], held)[:, 0] / slices
        # A token is sent once for all slices of an expert that a rank holds.
        apart = held.reshape(len(held), -1, slices, num_ranks)
        riding = (apart / np.maximum(1, apart.sum(2, keepdims=True))).reshape(held.shape)
        arriving_CW = np.matmul((pairs * (1 / replicas_CE - 1 / num_ranks))[:, None], riding)[:, 0]
        # Equally many from all other ranks.
        arriving_CWW = np.repeat(arriving_CW[:, None] / max(1, num_ranks - 1), num_ranks, axis=1)
        filling_CWW = self._filling(held, home_E, slices) * self.cost.expert_bytes / slices
        hops_in_turn = find_transport(self.cost.transport).hops_in_turn
        rides_C = RIDES * self._over_links(arriving_CWW * self.cost.row_bytes, in_turn=hops_in_turn)
        # Parameters in one direction, gradients in the other, which takes as long.
        upkeep_C = 2 * self._over_links(filling_CWW, idle=False)
        last_C = (load_CW / self.cost.speed_W(num_ranks)).max(1) * self.cost.pair_seconds
        return np.asarray(rides_C + last_C + (1 - self.cost.replicas_hidden) * upkeep_C)

    def _filling(self, held_CEW: Array, home_E: Array, slices: int) -> Array:
        """(C, W, W) experts that ranks send to fill slots; inter-node approximately `node_slots.rows_filled`, which
        uses two hops only if several ranks of a node replicate the same expert."""
        num_rows, num_ranks = len(home_E), held_CEW.shape[2]
        home_EW = np.zeros((num_rows, num_ranks))
        home_EW[np.arange(num_rows), home_E] = 1
        topology = self.topology or Topology.even(num_ranks)
        nodes = topology.num_nodes if slices == 1 else 1
        per_node, over = divmod(num_ranks, nodes)
        if nodes == 1 or over or topology.node_of != Topology.even(num_ranks, nodes).node_of:
            return np.asarray(np.matmul(home_EW.T, held_CEW * (1 - home_EW)))
        held_CENP, home_ENP = (of.reshape(*of.shape[:-1], nodes, per_node) for of in (held_CEW, home_EW))
        wanted_CEN = held_CENP.max(3) * (1 - home_ENP.max(2))
        filling_CNPNP = np.zeros((len(held_CEW), nodes, per_node, nodes, per_node))
        number = np.arange(per_node)
        filling_CNPNP[:, :, number, :, number] = np.einsum("enp,cem->pcnm", home_ENP, wanted_CEN)
        inside_CNPP = np.einsum("ep,cenq->cnpq", home_ENP.sum(1), held_CENP) * (1 - np.eye(per_node))
        for node in range(nodes):
            filling_CNPNP[:, node, :, node] += inside_CNPP[:, node]
        return filling_CNPNP.reshape(-1, num_ranks, num_ranks)

    def _over_links(self, bytes_CWW: Array, idle: bool = True, in_turn: bool = False) -> Array:
        """(C,) seconds of the slowest kind of link of the `CostModel`, or with `in_turn` of all. `idle`: a link without
        traffic takes its latency, too."""
        topology, seconds_C = self.topology or Topology.even(bytes_CWW.shape[2]), np.zeros(len(bytes_CWW))
        for link in topology.pairs:
            each_C = self.cost.seconds_over(link, bytes_CWW, topology)
            used_C = np.any(bytes_CWW * topology.pairs[link], axis=(1, 2))
            each_C = each_C if idle else np.where(used_C, each_C, 0.0)
            seconds_C = seconds_C + each_C if in_turn else np.maximum(seconds_C, each_C)
        return seconds_C


@dataclass(frozen=True)
class Policy:
    """A policy. All ranks call it with the same arguments, so it must be deterministic.

    Attributes:
        find: (load_E, layout, extra_slots, model, history_SE) -> the next layout; the given one if none is better.
            load_E are expected choices of each expert, history_SE those of the last steps.
        replicas: whether it fills extra slots with replicas, and needs some.
    """

    find: Callable[[Array, ExpertLayout, int, LoadModel, Array], ExpertLayout]
    replicas: bool = True

    def __call__(
        self,
        load_E: Array,
        layout: ExpertLayout,
        extra_slots: int,
        model: LoadModel | None = None,
        history_SE: Array | None = None,
    ) -> ExpertLayout:
        """The next layout of a layer.

        Args:
            load_E: (E,) expected choices.
            extra_slots: of each rank, for replicas.
            model: of time; None: for the default machine.
            history_SE: (S, E) choices of the last S steps; None: load_E alone."""
        history_SE = np.asarray(load_E)[None] if history_SE is None else history_SE
        return self.find(load_E, layout, extra_slots, model or LoadModel(), history_SE)


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
