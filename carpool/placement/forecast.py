"""What the next load of each expert will be, from the loads of the steps before.

    last    the load of the last step (FasterMoE, Prophet). Right where loads drift slowly, noisy for small batches.
    ema     the exponential moving average (MindSpeed's migrator, decay 0.9). Averages noise away, follows drift late.

Each is a function of a history (N, E), oldest first, to a load (E,) with the sum of the last step. `compare` runs them
over a history, always on the past only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from carpool.placement.solvers.lpt import pack
from carpool.placement.trace import Array

Predictor = Callable[[Array], Array]


def last(history_NE: Array) -> Array:
    """The load of the last step."""
    return _checked(history_NE)[-1].copy()


def ema(history_NE: Array, decay: float = 0.9) -> Array:
    """Moving average of the shares; a step that is n steps old counts decay**n. Unbiased from the first step on."""
    loads_NE = _checked(history_NE)
    age_N = np.arange(len(loads_NE))[::-1]
    share_E = np.average(_shares(loads_NE), axis=0, weights=decay**age_N)
    return share_E * loads_NE[-1].sum()


PREDICTORS: Mapping[str, Predictor] = MappingProxyType({"last": last, "ema": ema})


def predict(name: str, history_NE: Array) -> Array:
    """The next load, by one of `PREDICTORS`."""
    if name not in PREDICTORS:
        raise ValueError(f"there is no load predictor {name!r}; use one of {', '.join(PREDICTORS)}")
    return PREDICTORS[name](history_NE)


def compare(history_NE: Array, num_ranks: int, *, warmup: int = 8, every: int = 1) -> list[dict[str, float | str]]:
    """Each predictor on each step after `warmup`, given the steps before it.

    Returns:
        for each predictor, and for "oracle", which knows the next step: `error`, the sum of absolute errors by the
        sum of loads; `load_ratio`, max by mean of the rank loads in the next step if experts are placed by LPT from the
        prediction. Means over steps.
    """
    loads_NE = _checked(history_NE)
    if not 1 <= warmup < len(loads_NE):
        raise ValueError(f"a history of {len(loads_NE)} steps leaves nothing to predict after {warmup}")
    num_experts = loads_NE.shape[1]
    room_W = np.full(num_ranks, -(-num_experts // num_ranks))
    records: list[dict[str, float | str]] = []
    for name in (*PREDICTORS, "oracle"):
        rows = []
        for step in range(warmup, len(loads_NE), every):
            real_E = loads_NE[step]
            guess_E = real_E if name == "oracle" else predict(name, loads_NE[:step])
            load_W = np.bincount(pack(guess_E, room_W), weights=real_E, minlength=num_ranks)
            share_E = guess_E / max(guess_E.sum(), 1e-12) * real_E.sum()
            error = np.abs(share_E - real_E).sum() / max(real_E.sum(), 1e-12)
            rows.append((error, load_W.max() / max(load_W.mean(), 1e-12)))
        error, ratio = np.mean(rows, axis=0)
        records.append({"name": name, "error": float(error), "load_ratio": float(ratio)})
    return records


def _checked(history_NE: Array) -> Array:
    loads_NE = np.asarray(history_NE, dtype=np.float64)
    if loads_NE.ndim != 2 or not loads_NE.size:
        raise ValueError(f"a history of loads must be (steps, experts), at least one of each, not {loads_NE.shape}")
    if not np.isfinite(loads_NE).all() or (loads_NE < 0).any():
        raise ValueError("a history of loads must be finite and not negative")
    return loads_NE


def _shares(loads_NE: Array) -> Array:
    total_N1 = loads_NE.sum(1, keepdims=True)
    return np.where(total_N1 > 0, loads_NE / np.maximum(total_N1, 1e-12), 1 / loads_NE.shape[1])
