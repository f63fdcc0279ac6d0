"""How published systems place experts by their loads (`placement.policy`; contract: `carpool.placement.policies`).

    shadow         FasterMoE (PPoPP 2022): experts by falling load; the hottest goes to *all* ranks while time falls
    subset         Prophet (2023): the (expert, rank) that lowers time most, one after another: a *subset* of ranks
    expand_shrink  FlexMoE (SIGMOD 2023): while time falls, the best of: one more replica, one less, one in the place
                   of another, one elsewhere; only if the fullest rank exceeds the mean by `trigger`
    lpt_cv         MindSpeed: a new LPT placement (of loads averaged with decay 0.9), adopted only if the coefficient of
                   variation of the rank loads falls by 0.08
    pick           SmartMoE (ATC 2023): of a pool of layouts prepared beforehand (`make_pool`), the fastest for
                   the loads of now, asked every k steps
    fetch          Janus (SIGCOMM 2023): all experts to all ranks, so that tokens stay, or none, so that tokens
                   travel, whichever takes less time
    degree         Tutel (MLSys 2023): each expert, cut into slices, is computed by as many ranks as is fastest: by one
                   for each slice, by fewer, which then fetch slices, or by every rank (`ExpertLayout.with_degree`)
    eplb           DeepSeek-V3: homes and replicas anew, all extra slots filled, so that ranks have equal loads; adopted
                   whether or not the model of time says that it pays

Each is deterministic, and returns the given layout if nothing is better, but for eplb.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.policies import LoadModel, Policy
from carpool.placement.solvers.plain import pack
from carpool.placement.solvers.problem import held, homes_of
from carpool.placement.trace import Array
from carpool_systems.eplb import from_loads


def shadow(load_E: Array, layout: ExpertLayout, extra_slots: int, model: LoadModel | None = None) -> ExpertLayout:
    """The hottest experts on all ranks. Replicas that `layout` has are forgotten: it is decided anew each step."""
    model, home_E, held_EW = _start(layout, model, keep=False)
    best = model.seconds(load_E, held_EW, home_E)
    for expert in np.argsort(-np.asarray(load_E), kind="stable"):
        everywhere_EW = held_EW.copy()
        everywhere_EW[expert] = True
        seconds = model.seconds(load_E, everywhere_EW, home_E)
        if seconds >= best or not _fits(everywhere_EW, home_E, extra_slots):
            break
        best, held_EW = seconds, everywhere_EW
    return _layout(layout, held_EW)


def subset(load_E: Array, layout: ExpertLayout, extra_slots: int, model: LoadModel | None = None) -> ExpertLayout:
    """Replicas one at a time, each where it lowers time most; decided anew each step."""
    model, home_E, held_EW = _start(layout, model, keep=False)
    while True:
        held_EW, better = _best(_expansions(load_E, held_EW, model), held_EW, load_E, home_E, extra_slots, model)
        if not better:
            return _layout(layout, held_EW)


def expand_shrink(
    load_E: Array, layout: ExpertLayout, extra_slots: int, model: LoadModel | None = None, trigger: float = 1.1
) -> ExpertLayout:
    """Today's replicas changed step by step."""
    model, home_E, held_EW = _start(layout, model, keep=True)
    load_W = model.rank_loads(load_E, held_EW)
    if load_W.max() <= trigger * load_W.mean():
        return layout
    while True:
        replicas = [(e, w) for e, w in np.argwhere(held_EW).tolist() if home_E[e] != w]
        expansions = _expansions(load_E, held_EW, model)
        changes = [*expansions, *([(e, w, False)] for e, w in replicas)]
        changes += [[(e, w, False), *more] for e, w in replicas for more in expansions if more[0][1] == w]
        coldest = int(model.rank_loads(load_E, held_EW).argmin())
        changes += [[(e, w, False), (e, coldest, True)] for e, w in replicas if not held_EW[e, coldest]]
        held_EW, better = _best(changes, held_EW, load_E, home_E, extra_slots, model)
        if not better:
            return _layout(layout, held_EW)


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


def eplb(load_E: Array, layout: ExpertLayout, extra_slots: int = 0, model: LoadModel | None = None) -> ExpertLayout:
    """What EPLB finds for the load, all extra slots filled, whether or not the model of time says that it pays."""
    capacity_W = np.array([len(home) for home in layout.homes])
    topology = model.topology if model is not None else None
    return from_loads(load_E, capacity_W, topology or Topology.even(layout.num_ranks), extra_slots)


def fetch(load_E: Array, layout: ExpertLayout, extra_slots: int, model: LoadModel | None = None) -> ExpertLayout:
    """Experts to tokens, if there is room for all of them on each rank and it is faster; else tokens to experts."""
    model, home_E, held_EW = _start(layout, model, keep=False)
    everywhere_EW = np.ones_like(held_EW)
    if not _fits(everywhere_EW, home_E, extra_slots):
        return _layout(layout, held_EW)
    stay, travel = (model.seconds(load_E, one, home_E) for one in (everywhere_EW, held_EW))
    return _layout(layout, everywhere_EW if stay < travel else held_EW)


def degree(load_E: Array, layout: ExpertLayout, extra_slots: int, model: LoadModel | None = None) -> ExpertLayout:
    """The degree that takes least time, of those for which ranks have room; the largest of equal ones. Without slices
    it is `fetch`."""
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


MOST_AT_ONCE = 1 << 20  # entries of the tables of candidates, which bounds memory
Change = list[tuple[int, int, bool]]  # (expert, rank, whether it is held then)


def _expansions(load_E: Array, held_EW: Array, model: LoadModel) -> list[Change]:
    """One more copy of an expert of the fullest rank, anywhere."""
    fullest = int(model.rank_loads(load_E, held_EW).argmax())
    return [[(int(e), int(w), True)] for e in np.flatnonzero(held_EW[:, fullest]) for w in np.flatnonzero(~held_EW[e])]


def _best(
    changes: Sequence[Change], held_EW: Array, load_E: Array, home_E: Array, extra_slots: int, model: LoadModel
) -> tuple[Array, bool]:
    """After the change with the least time, if that is less than now."""
    best, best_EW = model.seconds(load_E, held_EW, home_E) - 1e-12, None
    capacity_W = np.bincount(home_E, minlength=held_EW.shape[1]) + extra_slots
    most = max(1, MOST_AT_ONCE // held_EW.size)
    for first in range(0, len(changes), most):
        some = changes[first : first + most]
        after_CEW = np.repeat(held_EW[None], len(some), axis=0)
        for number, change in enumerate(some):
            for expert, rank, holds in change:
                after_CEW[number, expert, rank] = holds
        after_CEW = after_CEW[(after_CEW.sum(1) <= capacity_W).all(1)]
        if not len(after_CEW):
            continue
        seconds_C = model.seconds_of(load_E, after_CEW, home_E)
        if seconds_C.min() < best:
            best, best_EW = seconds_C.min(), after_CEW[seconds_C.argmin()]
    return (held_EW, False) if best_EW is None else (best_EW, True)


def _start(layout: ExpertLayout, model: LoadModel | None, *, keep: bool) -> tuple[LoadModel, Array, Array]:
    return model or LoadModel(), homes_of(layout), held(layout if keep else ExpertLayout(layout.homes))


def _fits(held_EW: Array, home_E: Array, extra_slots: int) -> bool:
    own_W = np.bincount(home_E, minlength=held_EW.shape[1])
    return bool((held_EW.sum(0) <= own_W + extra_slots).all())


def _layout(layout: ExpertLayout, held_EW: Array) -> ExpertLayout:
    home_E = homes_of(layout)
    replicas = [(e, w) for e, w in np.argwhere(held_EW).tolist() if home_E[e] != w]
    return ExpertLayout(layout.homes).with_replicas(replicas)


def _variation(load_W: Array) -> float:
    return float(load_W.std() / max(load_W.mean(), 1e-12))


def _of(find: object, replicas: bool = True) -> Policy:
    """A function that needs no history."""
    return Policy(lambda load_E, layout, slots, model, history_SE: find(load_E, layout, slots, model), replicas)  # type: ignore[operator]


SHADOW, SUBSET, EXPAND_SHRINK = _of(shadow), _of(subset), _of(expand_shrink)
EPLB, FETCH, DEGREE = _of(eplb), _of(fetch), _of(degree)
LPT_CV = _of(lpt_cv, replicas=False)
PICK = Policy(
    lambda load_E, layout, slots, model, history_SE: pick(
        load_E, layout, slots, model, make_pool(history_SE, layout.num_ranks)
    ),
    replicas=False,
)
