"""The page of a profile: what hid the rides of one step, and what did not; of two runs, one above the other.

It is made from profile.json alone (`carpool.profile.numbers`), by the template profile.html.j2, in the style of the
report. Two runs are drawn to the same scale of time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from carpool.profile.numbers import LayerTimes, Profile, Times, load_profile
from carpool.report.charts import KINDS_OF_WORK, draw_lanes
from carpool.report.units import MISSING, ms_text, percent_text
from carpool.report.write import fill, write_page

TOTALS = {
    "step": "Step",
    "computation": "Computation",
    "ride": "Rides",
    "exposed": "Rides, exposed",
    "other": "Other communication",
    "other_exposed": "Other communication, exposed",
    "idle": "Nothing ran",
}
"""Fields of `Times`, as the tables name them."""


def profile_path(run: Path) -> Path:
    """Where `carpool profile` leaves the numbers of a run."""
    return run / "profile" / "profile.json"


def write_profile(run: Path, before: Path | None = None, output: Path | None = None) -> Path:
    """Write the page of the run in folder `run` to `output` (default: RUN/profile.html) and return that path.

    Args:
        before: folder of another run, to compare with: it comes first.

    Errors: ValueError if a run has no profile, or the page cannot be written; ImportError if jinja2 is missing.
    """
    found = load_profile(profile_path(run))
    other = load_profile(profile_path(before)) if before is not None else None
    output = output or run / "profile.html"
    named = [(str(run), found)] if before is None or other is None else [(str(before), other), (str(run), found)]
    report = before is None and (output.parent / "report.html").is_file()
    return write_page(output, "page", lambda: render_profile(named, report))


def profile_summary(run: Path) -> str | None:
    """For the run's report: what its profile says, None if it has none."""
    if not profile_path(run).is_file():
        return None
    mean = load_profile(profile_path(run)).mean()
    share = percent_text(mean.exposed / mean.step)
    return (
        f"{ms_text(mean.exposed)} of {ms_text(mean.ride)} of rides were exposed, {share} of a step of "
        f"{ms_text(mean.step)}; other communication was exposed for {ms_text(mean.other_exposed)}, and nothing ran for "
        f"{ms_text(mean.idle)} (means over ranks)"
    )


def render_profile(named: list[tuple[str, Profile]], report: bool = False) -> str:
    """The page as HTML text, of one profile, or of one before and one after, each with its name. `report`: link to
    report.html beside it."""
    named = [(f"{name} (simulated)" if profile.simulated else name, profile) for name, profile in named]
    until = max(one.times.step for _, profile in named for one in profile.ranks)
    runs = [_run(name, profile, until) for name, profile in named]
    compared = _compared([profile for _, profile in named]) if len(named) == 2 else None
    legend = lanes_legend([profile for _, profile in named])
    return fill(
        "profile.html.j2",
        runs=runs,
        compared=compared,
        legend=legend,
        headline=_headline([profile.mean() for _, profile in named]),
        origin=_origin([profile.simulated for _, profile in named]),
        report=report,
    )


def _origin(simulated: list[bool]) -> str:
    """Where the steps are from, in a sentence."""
    words = {False: "recorded by PyTorch's profiler, which slows it a little", True: "simulated: nothing ran"}
    if len(set(simulated)) == 1:
        return f"{'One step' if len(simulated) == 1 else 'One step each'}, {words[simulated[0]]}."
    return f"The first step is {words[simulated[0]]}. The second is {words[simulated[1]]}."


def _headline(means: list[Times]) -> str:
    """What hid the rides, in a sentence."""
    last = means[-1]
    exposed = f"{percent_text(last.exposed / last.step)} of a step of {ms_text(last.step)}"
    if len(means) == 1:
        hidden = f"; {percent_text(1 - last.exposed / last.ride)} of the rides were hidden" if last.ride else ""
        return f"Exposed rides took {exposed}{hidden}."
    before = percent_text(means[0].exposed / means[0].step)
    faster = means[0].step / last.step
    return f"Exposed rides took {exposed}, {before} before; the second step is {faster:.2f} × as fast."


def _run(name: str, profile: Profile, until: float) -> dict[str, Any]:
    mean = profile.mean()
    totals = [[f"rank {one.rank}", *_shown(one.times)] for one in profile.ranks]
    layers = profile.layers()
    return {
        "name": name,
        "about": profile.about,
        "on_device": profile.on_device,
        "facts": _facts(mean, profile),
        "svg": draw_lanes(profile, until, name),
        "columns": ["", *TOTALS.values()],
        "totals": totals + ([["mean", *_shown(mean)]] if len(totals) > 1 else []),
        "layers": fold([_layer(layer, mean.step) for layer in layers]),
        "directions": [_layer(layer, mean.step) for layer in _directions(layers)],
    }


def _facts(mean: Times, profile: Profile) -> list[tuple[str, str, str]]:
    """Label, value, detail."""
    measured = f"{ms_text(profile.plain_ms)} without the profiler, on the slowest rank"
    return [
        ("Exposed rides", percent_text(mean.exposed / mean.step), f"{ms_text(mean.exposed)} of {ms_text(mean.step)}"),
        (
            "Hidden of the rides",
            percent_text(1 - mean.exposed / mean.ride) if mean.ride else MISSING,
            f"{ms_text(mean.ride)} of rides in all",
        ),
        (
            "Other communication, exposed",
            percent_text(mean.other_exposed / mean.step),
            f"{ms_text(mean.other_exposed)}; {ms_text(mean.other)} in all",
        ),
        # Time in which communication waits is exposed, not idle: a zero here would seem to deny it.
        *(
            [("Nothing ran", percent_text(mean.idle / mean.step), f"{ms_text(mean.idle)}: gaps between kernels")]
            if mean.idle > 0.0005 * mean.step
            else []
        ),
        ("Step", ms_text(mean.step), "simulated" if profile.simulated else measured),
    ]


def _shown(times: Times) -> list[str]:
    values = times.model_dump()
    share = {key: f" ({percent_text(values[key] / times.step)})" for key in TOTALS if key != "step"}
    return [ms_text(values[key]) + share.get(key, "") for key in TOTALS]


def _layer(layer: LayerTimes, step: float) -> list[str]:
    of_rides = percent_text(layer.exposed / layer.ride if layer.ride else None)
    shares = [of_rides, percent_text(layer.exposed / step)]
    ride, exposed, *others = map(ms_text, (layer.ride, layer.exposed, layer.packing, layer.experts))
    return [layer.layer, layer.direction, ride, exposed, *shares, *others]


def _directions(layers: list[LayerTimes]) -> list[LayerTimes]:
    """Sums over layers, of each direction."""
    sums: dict[str, dict[str, float]] = {}
    for layer in layers:
        total = sums.setdefault(layer.direction, {})
        for key, value in layer.model_dump(exclude={"layer", "direction"}).items():
            total[key] = total.get(key, 0.0) + value
    return [LayerTimes(layer="all layers", direction=way, **total) for way, total in sums.items()]


def _compared(pair: list[Profile]) -> dict[str, Any]:
    """Before and after, with the differences."""
    before, after = (profile.mean().model_dump() for profile in pair)
    totals = [_difference([text], before[key], after[key]) for key, text in TOTALS.items()]
    for key, text in (("exposed", "Rides, exposed, % of the step"), ("idle", "Nothing ran, % of the step")):
        shares = before[key] / before["step"], after[key] / after["step"]
        difference = f"{100 * (shares[1] - shares[0]):+.1f} points"
        totals.append([text, *(percent_text(share) for share in shares), difference, MISSING])
    old, new = ({(layer.layer, layer.direction): layer for layer in profile.layers()} for profile in pair)
    keys = dict.fromkeys([*old, *new])
    layers = [
        _difference(list(key), *(side[key].exposed if key in side else None for side in (old, new))) for key in keys
    ]
    return {"totals": totals, "layers": fold(layers)}


def fold(rows: list[list[str]]) -> list[list[str]]:
    """Rows of one layer each; layers that are equal in all other columns share a row, which says how many they are.

    >>> fold([["layers.0", "forward", "1 ms"], ["layers.1", "forward", "1 ms"], ["layers.1", "backward", "2 ms"]])
    [['layers.0 … layers.1 (2 layers)', 'forward', '1 ms'], ['layers.1', 'backward', '2 ms']]
    """
    layers: dict[tuple[str, ...], list[str]] = {}
    for name, *columns in rows:
        layers.setdefault(tuple(columns), []).append(name)
    return [
        [names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} layers)", *columns]
        for columns, names in layers.items()
    ]


def _difference(names: list[str], before: float | None, after: float | None) -> list[str]:
    change = ratio = MISSING
    if before is not None and after is not None:
        change = ("+" if after > before else "") + ms_text(after - before)
        ratio = f"{after / before:.2f}" if before else MISSING
    return [*names, ms_text(before), ms_text(after), change, ratio]


def lanes_legend(profiles: list[Profile]) -> list[tuple[str, str]]:
    """(kind, what it is) of each kind of work that the lanes show."""
    shown = {run[2] for profile in profiles for one in profile.ranks for lane in one.lanes for run in lane.runs}
    return [(kind, text) for kind, text in KINDS_OF_WORK.items() if kind in shown]
