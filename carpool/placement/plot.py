"""The co-activation matrix of a layer, experts in order and as a layout groups them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.objective import evaluate
from carpool.placement.trace import Array, LayerTrace


def plot_coactivation(trace: LayerTrace, layout: ExpertLayout, path: str | Path) -> None:
    """Write a figure (PNG, SVG or PDF by its name): how often two experts are chosen together, before and after.

    Squares are ranks; what lies inside a square shares a ride. Replicas are left out: an expert stands at its home.
    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    plain = ExpertLayout.contiguous(layout.num_experts, layout.num_ranks)
    together_EE = trace.coactivation_EE.astype(np.float64)
    np.fill_diagonal(together_EE, 0)
    expected_EE = _expected(trace.load_E, together_EE)
    excess_EE = together_EE / np.maximum(expected_EE, 1e-9)
    np.fill_diagonal(excess_EE, np.nan)

    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, one, title in zip(axes, (plain, layout), ("in order", "placed"), strict=True):
        order = np.array([expert for home in one.homes for expert in home])
        image = axis.imshow(excess_EE[np.ix_(order, order)], vmin=0, vmax=4, cmap="magma", interpolation="nearest")
        for end in np.cumsum([len(home) for home in one.homes])[:-1]:
            axis.axhline(end - 0.5, color="white", linewidth=0.6)
            axis.axvline(end - 0.5, color="white", linewidth=0.6)
        copies = evaluate(trace, ExpertLayout(one.homes)).copies_per_token
        axis.set_title(f"{title}: {copies:.2f} ranks per token")
        axis.set_xlabel("expert, by rank")
    axes[0].set_ylabel("expert, by rank")
    figure.colorbar(image, ax=axes, label="chosen together, times what independent choices would be", shrink=0.8)
    figure.suptitle(trace.name)
    figure.savefig(path, dpi=130)


def _expected(load_E: Array, together_EE: Array) -> Array:
    """(E, E) what the counts would be if experts were chosen by their loads alone; the same sum, an empty diagonal."""
    product_EE = np.outer(load_E, load_E).astype(np.float64)
    np.fill_diagonal(product_EE, 0)
    return product_EE * (together_EE.sum() / max(product_EE.sum(), 1.0))
