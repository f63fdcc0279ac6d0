"""How published systems place experts by their loads (`placement.policy`; contract: `carpool.placement.policies`).

    lpt_cv  MindSpeed: a new LPT placement (of loads averaged with decay 0.9), adopted only if the coefficient of
            variation of the rank loads falls by 0.08
    pick    SmartMoE (ATC 2023): of a pool of layouts prepared beforehand (`make_pool`), the fastest for the loads of
            now, asked every k steps
    degree  Tutel (MLSys 2023): each expert, cut into slices, is computed by as many ranks as is fastest: by one for
            each slice, by fewer, which then fetch slices, or by every rank (`ExpertLayout.with_degree`)

Each is deterministic, and returns the given layout if nothing is better. Systems whose replicas follow the load are
plans of spare slots (spare_plans.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.policies import LoadModel, Policy
from carpool.placement.solvers.plain import pack
from carpool.placement.solvers.problem import held, homes_of
from carpool.placement.trace import Array


def lpt_cv(
    load_E: Array, layout: ExpertLayout, extra_slots: int = 0, model: LoadModel | None = None, fall: float = 0.08
) -> ExpertLayout:
    """LPT by load (already averaged), if the coefficient of variation of rank loads falls by `fall`. No replicas."""
    rank_E = pack(load_E, np.array([len(home) for home in layout.homes]))
    homes = [np.flatnonzero(rank_E == rank).tolist() for rank in range(layout.num_ranks)]
    found = ExpertLayout(tuple(map(tuple, homes)))
    model = model or LoadModel()
    before, after = (_variation(model.rank_loads(load_E, held(one))) for one in (layout, found))
    return found if before - after >= fall else layout


def pick(
    load_E: Array,
    layout: ExpertLayout,
    extra_slots: int = 0,
    model: LoadModel | None = None,
    pool: Sequence[ExpertLayout] = (),
) -> ExpertLayout:
    """The fastest of the pool and `layout`, which stays if equal."""
    model = model or LoadModel()
    choices = [layout, *pool]
    times = [model.seconds(load_E, held(one), homes_of(one)) for one in choices]
    return choices[int(np.argmin(times))]


def degree(load_E: Array, layout: ExpertLayout, extra_slots: int, model: LoadModel | None = None) -> ExpertLayout:
    """The degree that takes least time, of those for which ranks have room; the largest of equal ones."""
    model, slices = model or LoadModel(), layout.slices
    candidates = [n for n in range(slices, 0, -1) if slices % n == 0]
    found: list[tuple[float, ExpertLayout]] = []
    for one in [*candidates, 0]:
        other = ExpertLayout(layout.homes, slices=slices).with_degree(one)
        room = all(len(a) - len(b) <= extra_slots for a, b in zip(other.slots, other.homes, strict=True))
        if room:
            found.append((model.seconds(load_E, held(other), homes_of(other), slices), other))
    return min(found, key=lambda pair: pair[0])[1]


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


def _of(find: object, replicas: bool = True) -> Policy:
    """A function that needs no history."""
    return Policy(lambda load_E, layout, slots, model, history_SE: find(load_E, layout, slots, model), replicas)  # type: ignore[operator]


DEGREE = _of(degree)
LPT_CV = _of(lpt_cv, replicas=False)
PICK = Policy(
    lambda load_E, layout, slots, model, history_SE: pick(
        load_E, layout, slots, model, make_pool(history_SE, layout.num_ranks)
    ),
    replicas=False,
)
