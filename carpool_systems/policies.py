"""How published systems place experts by their loads (`placement.policy`; contract: `carpool.placement.policies`).

    lpt_cv  MindSpeed: a new LPT placement (of loads averaged with decay 0.9), adopted only if the coefficient of
            variation of the rank loads falls by 0.08
    pick    SmartMoE (ATC 2023): of a pool of layouts prepared beforehand (`make_pool`), the fastest for the loads of
            now, asked every k steps

Each is deterministic, and returns the given layout if nothing is better. Systems with replicas are plans of spare
slots (spare_plans.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.policies import LoadModel, Policy
from carpool.placement.solvers.plain import pack
from carpool.placement.trace import Array


def lpt_cv(load_E: Array, layout: ExpertLayout, model: LoadModel | None = None, fall: float = 0.08) -> ExpertLayout:
    """LPT by load (already averaged), if the coefficient of variation of rank loads falls by `fall`."""
    rank_E = pack(load_E, np.array([len(home) for home in layout.homes]))
    homes = [np.flatnonzero(rank_E == rank).tolist() for rank in range(layout.num_ranks)]
    found = ExpertLayout(tuple(map(tuple, homes)))
    model = model or LoadModel()
    before, after = (_variation(model.rank_loads(load_E, one)) for one in (layout, found))
    return found if before - after >= fall else layout


def pick(
    load_E: Array,
    layout: ExpertLayout,
    model: LoadModel | None = None,
    pool: Sequence[ExpertLayout] = (),
) -> ExpertLayout:
    """The fastest of the pool and `layout`, which stays if equal."""
    model = model or LoadModel()
    choices = [layout, *pool]
    times = [model.seconds(load_E, one) for one in choices]
    return choices[int(np.argmin(times))]


def make_pool(history_NE: Array, num_ranks: int, size: int = 8) -> list[ExpertLayout]:
    """Layouts that suit the loads of different parts of a history (N steps), each by LPT: SmartMoE's pool."""
    loads_NE = np.asarray(history_NE, dtype=np.float64)
    capacity_W = np.array([len(home) for home in ExpertLayout.contiguous(loads_NE.shape[1], num_ranks).homes])
    pool: list[ExpertLayout] = []
    for part_NE in np.array_split(loads_NE, min(size, len(loads_NE))):
        rank_E = pack(part_NE.sum(0), capacity_W)
        layout = ExpertLayout(tuple(tuple(np.flatnonzero(rank_E == rank).tolist()) for rank in range(num_ranks)))
        if layout not in pool:
            pool.append(layout)
    return pool


def _variation(load_W: Array) -> float:
    return float(load_W.std() / max(load_W.mean(), 1e-12))


LPT_CV = Policy(lambda load_E, layout, model, history_SE: lpt_cv(load_E, layout, model))
PICK = Policy(
    lambda load_E, layout, model, history_SE: pick(load_E, layout, model, make_pool(history_SE, layout.num_ranks))
)
