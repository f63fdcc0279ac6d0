"""The pictures of the page by section, each with the words around it.

A panel without data keeps its place and says what is missing: an absent picture must not pass for a good one. Only
pictures of what a run cannot have (accelerators' peaks, moves of experts, a second rank) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from carpool.report import bars, curves, grids, homes
from carpool.report.read import Run
from carpool.report.schema import Summary
from carpool.report.steps import STEP_TIME


@dataclass(frozen=True)
class Panel:
    """One card of the page; `body` is HTML, None if there is nothing to draw, and then `missing` says why."""

    name: str
    title: str
    caption: str
    missing: str
    body: str | None


def learning(run: Run) -> list[Panel]:
    """Does it learn?"""
    return [
        _panel("loss", "Loss", "The thin line is each step. Points: held-out text.", curves.loss(run), "no loss"),
        _panel(
            "gradient-norm",
            "Gradient norm",
            "Global norm over all parameters of all ranks, before clipping.",
            curves.gradient_norm(run),
            "no gradient norm",
        ),
        _panel("rate", "Learning rate", "As the schedule set it.", curves.learning_rate(run), "no learning rate"),
        _panel(
            "balance",
            "Balance loss",
            "The auxiliary loss that evens out the experts' load; its weight in the objective is router_aux_loss_coef.",
            curves.balance_loss(run),
            "no balance loss (it may be off)",
        ),
    ]


def times(run: Run, summary: Summary) -> list[Panel]:
    """Where does the time go?"""
    made = [
        _panel(
            "speed",
            "Time of each step",
            f"The dashed line is the step time: the {STEP_TIME}.",
            curves.step_time(run, summary.step_ms_median),
            "no times of steps",
        ),
        _panel(
            "parts",
            "Dispatch, experts, combine",
            "Time per call on the slowest rank: the line is the median, the band reaches up to p99.",
            curves.parts(run),
            "no times of dispatch, experts and combine",
        ),
        _panel(
            "rank-experts",
            "Time in experts by rank",
            "Milliseconds of each rank as deviation from the mean of the ranks. A rank that is always slower has more "
            "tokens, or slower hardware.",
            grids.ranks_over_time(run, "experts"),
            "no times by rank",
        ),
        _panel(
            "rank-rides",
            "Time in rides by rank",
            "Whoever waits least in rides is waited for.",
            grids.ranks_over_time(run, "rides"),
            "no times by rank",
        ),
        _panel(
            "utilisation",
            "MFU and HFU",
            "Share of the accelerators' peak. MFU counts the model's own arithmetic (active parameters, causal "
            "attention at half), HFU also what was computed again.",
            curves.utilisation(run),
            "no MFU",
        ),
    ]
    optional = {"utilisation", "rank-experts", "rank-rides"}
    return [panel for panel in made if panel.body is not None or panel.name not in optional]


def rides(run: Run) -> list[Panel]:
    """What travels?"""
    step = f" (step {run.last_layers.step})" if run.last_layers is not None else ""
    made = [
        _panel(
            "copies",
            "Copies per token",
            "How many ranks a token visits, mean over layers. One row per expert would make K. "
            "Dashed: predicted for uniform random routing.",
            curves.copies(run),
            "no copies per token",
        ),
        _panel(
            "copies-layer",
            "Copies per token by layer",
            "Mean over the last tenth of the steps.",
            bars.copies_by_layer(run),
            "no copies per layer",
        ),
        _panel(
            "traffic",
            f"Traffic from rank to rank{step}",
            "Rows of the forward dispatch, all layers together, as deviation from the mean over all pairs of ranks. "
            "The grey diagonal stays on its rank.",
            grids.traffic(run),
            "no traffic between ranks",
        ),
        _panel(
            "remote-rows",
            "Remote rows per token",
            "Rows that a token sends to other ranks, mean over layers. Vertical lines: experts moved. Dashed: "
            "predicted for the new layout, from other tokens.",
            curves.remote_rows(run),
            "no placement",
        ),
    ]
    hidden = set() if run.placements else {"remote-rows"}
    if run.info.parallelism.get("world_size") == 1:
        hidden |= {"traffic", "copies-layer"}
    return [panel for panel in made if panel.name not in hidden]


def experts(run: Run) -> list[Panel]:
    """Who works how much?"""
    step = f" (step {run.last_layers.step})" if run.last_layers is not None else ""
    made = [
        _panel(
            "rank-load",
            "Load of ranks",
            "Choices that the fullest rank computes over the mean of all ranks, mean over layers. "
            "The axis begins at 1, which is even.",
            curves.rank_load(run),
            "no loads of ranks",
        ),
        _panel(
            "rank-share",
            "Choices by rank",
            "Choices that each rank computes, all layers together, as deviation from the mean of the ranks.",
            grids.ranks_over_time(run, "load"),
            "no loads by rank",
        ),
        _panel(
            "load-time",
            "Busiest expert of each layer",
            "Its tokens over the mean of its layer, over time; a column shows the worst of the steps it covers.",
            grids.load_over_time(run),
            "no loads per layer",
        ),
        _panel(
            "load-expert",
            f"Load per expert{step}",
            "Tokens of each expert over the mean of its layer. × marks an expert that no token chose.",
            grids.load_by_expert(run),
            "no loads per expert",
        ),
    ]
    # Runs of earlier versions know the fullest rank only.
    hidden = {panel.name for panel in made if panel.name == "rank-share" and panel.body is None}
    if run.info.parallelism.get("world_size") == 1:
        hidden |= {"rank-load", "rank-share"}
    made = [panel for panel in made if panel.name not in hidden]
    layers = grids.chosen_layers(run)
    names = grids.layer_names(run, len(run.layers[-1].imbalance_L)) if layers else []
    for layer in layers:
        body = grids.experts_over_time(run, layer)
        made.append(
            _panel(
                f"experts-{layer}",
                f"Load per expert over time, layer {names[layer]}",
                "Each column is one recorded step.",
                body,
                "no loads per expert",
            )
        )
    return made


def layouts(run: Run) -> list[Panel]:
    """Where experts live, at the start and after each move; none if that was not recorded."""
    return [
        _panel(f"layout-{i}", title, "A row is a layer, a block a rank, a cell an expert.", body, "no layout")
        for i, (title, body) in enumerate(homes.pictures(run))
    ]


def memory(run: Run) -> list[Panel]:
    """What is kept?"""
    return [
        _panel(
            "memory",
            "Memory per rank",
            "Dashed: predicted from shapes before the run. Solid: the measured peak of the fullest rank.",
            bars.memory(run),
            "neither a predicted nor a measured memory",
        )
    ]


def _panel(name: str, title: str, caption: str, body: str | None, missing: str) -> Panel:
    return Panel(name, title, caption, f"The run recorded {missing}.", body)
