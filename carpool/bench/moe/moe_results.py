"""What was measured of experts and layers, as plain values, and the table that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from carpool.bench.contest import Row, print_remarks
from carpool.bench.options import LayerShape
from carpool.bench.result_files import Result, print_table, terminal
from carpool.bench.timing import percentile

# What a pass takes, in forwards.
PASSES = {"forward": 1, "backward": 2, "forward_backward": 3}


@dataclass(frozen=True)
class Times:
    """One pass of one contender.

    Attributes:
        ms: milliseconds of each repetition (of the slowest rank); their median and 10th and 90th percentile.
        host_ms: median milliseconds that the host (of rank 0) spent on it.
        tflops: 1e12 operations of the model per second and rank, of the median.
        share_of_peak: of what the datasheet promises for 16-bit numbers, dense; None for others and where it is not
            known.
    """

    ms: list[float]
    ms_median: float
    ms_p10: float
    ms_p90: float
    host_ms: float
    tflops: float
    share_of_peak: float | None

    @classmethod
    def of(cls, ms: list[float], host_ms: float, flops: int, peak: float | None) -> Times:
        """`flops` of the pass, `peak` in FLOP/s."""
        median = percentile(ms, 50)
        rate = flops / median * 1e3
        return cls(
            ms, median, percentile(ms, 10), percentile(ms, 90), host_ms, rate / 1e12, rate / peak if peak else None
        )


@dataclass(kw_only=True)
class ContenderResult(Row):
    """One contender of a case.

    Attributes:
        experts: by what name they are known to whoever computes them.
        transport: how rows travel; None if they do not.
        sections: `Times` by pass.
        ratio: how many times faster than the baseline, forward and backward.
        saved_bytes: what is saved between forward and backward, beyond input, output and weights.
        peak_bytes: the most that was allocated at one time in forward and backward, beyond input and weights. None on
            CPU.
        remote_bytes: what a rank sends to others in forward and backward, mean over ranks.
        buffer_bytes: what the transport has allocated once, for all layers.
        spare: spare slots of each rank; load: of the fullest rank over the mean, with them.
        of_forced: forward and backward, over those of the same contender without spare slots in forced balance.
    """

    experts: str
    transport: str | None = None
    ratio: float | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    remote_bytes: int | None = None
    buffer_bytes: int | None = None
    spare: int = 0
    load: float | None = None
    of_forced: float | None = None


@dataclass(frozen=True)
class Modelled:
    """A layer with spare slots as the cost model sees it (`carpool.planner.machine.balanced_layer`).

    Attributes:
        hardware: whose rates.
        before, after: load of the fullest rank over the mean, without and with spare slots, exactly.
        replicas: experts fetched by all ranks.
        ms: of forward and backward; of_forced: over those in forced balance.
    """

    hardware: str
    spare: int
    before: float
    after: float
    replicas: int
    ms: float
    of_forced: float


@dataclass
class CaseResult:
    """All contenders at one shape and routing.

    Attributes:
        flops: of the forward of one rank's tokens.
        peak_flops: of the device, in FLOP/s.
        baseline: the label of the contender that the others are compared with.
        modelled: with spare slots.
    """

    shape: LayerShape
    routing: str
    num_ranks: int
    flops: int
    peak_flops: float | None
    baseline: str
    rows: list[ContenderResult] = field(default_factory=list)
    modelled: list[Modelled] = field(default_factory=list)

    def compare(self) -> None:
        """Fill in the ratios."""
        base = next((row for row in self.rows if row.label == self.baseline and row.sections), None)
        for row in self.rows:
            if base is not None and row.sections:
                times = (one.sections["forward_backward"].ms_median for one in (base, row))
                row.ratio = next(times) / next(times)


_UNITS = ((1.0, "T"), (1e3, "G"), (1e6, "M"))  # CPUs have less than GPUs
_SHORT = {"forward": "f", "backward": "b", "forward_backward": "f + b"}
_HEADINGS = {"forward": "forward", "backward": "backward", "forward_backward": "forward +\nbackward"}


def show(result: Result, console: Console | None = None) -> None:
    """Print a table for each case."""
    console = console or terminal(140)
    settings = result.settings
    for case in result.cases:
        if case.rows:
            _print(console, result, case)
    if balances := [case for case in result.cases if case.modelled]:
        for case in balances:
            _print_balance(console, case)
        console.print(
            "forced: as many choices, spread evenly over experts. Modelled: loads, replicas and rows are exact, "
            "times follow from rates, and fetches count where they exceed the products of experts at home.",
            highlight=False,
        )
    if not any(case.rows for case in result.cases):
        return
    layers = settings.get("iterations")
    back_to_back = f" (layers back to back in each: {layers})" if layers else ""
    ranks = "; times and memory of the slowest and largest rank, MB that a rank sends" if layers else ""
    console.print(
        f"ms: median, and 10th to 90th percentile, of {settings['repetitions']} interleaved repetitions{back_to_back}"
        f"{ranks}. FLOP/s: of the model's operations, nothing counted twice; of peak: dense 16-bit. error: share of "
        f"what is allowed.\n{result.where}",
        highlight=False,
    )


def _print(console: Console, result: Result, case: CaseResult) -> None:
    layer = any(row.transport for row in case.rows)
    sections = [name for name in PASSES if any(name in row.sections for row in case.rows)]
    rates = [row.sections[name].tflops for row in case.rows for name in sections if row.sections]
    unit, prefix = next((u, p) for u, p in _UNITS if u * max(rates, default=1.0) >= 1 or p == "M")
    headings = ["contender", *(f"{_HEADINGS[name]} ms" for name in sections)]
    headings += [f"{prefix}FLOP/s\n" + " / ".join(_SHORT[name] for name in sections)]
    headings += ["of\npeak", "speed-\nup", "saved\nMiB", "peak\nMiB", *(["MB\nsent"] if layer else []), "error"]
    rows = []
    for row in case.rows:
        if row.unavailable:
            rows.append([escape(row.label), "not available"])
            continue
        times = [row.sections[name] for name in sections]
        cells = [f"{t.ms_median:.4g}\n[dim]{t.ms_p10:.3g}-{t.ms_p90:.3g}[/]" for t in times]
        cells.append(" / ".join(f"{unit * t.tflops:.3g}" for t in times))
        share = times[-1].share_of_peak
        cells.append("-" if share is None else f"{share:.0%}")
        cells.append("-" if row.ratio is None else f"{row.ratio:.2f}x")
        cells += [_number(row.saved_bytes, 2**20), _number(row.peak_bytes, 2**20)]
        cells += [_number(row.remote_bytes, 1e6)] if layer else []
        rows.append([escape(row.label), *cells, f"{row.error:.2f}"])
    ranks = f", {case.num_ranks} ranks" if layer else ""
    title = f"{case.shape}, {result.settings['dtype']}, {case.routing} routing{ranks}"
    print_table(console, title, headings, rows)
    print_remarks(console, case.rows)


def _print_balance(console: Console, case: CaseResult) -> None:
    """Loads and times by number of spare slots, beside forced balance."""
    measured = {(row.label.partition(",")[0], row.spare): row.of_forced for row in case.rows if row.of_forced}
    ways = list(dict.fromkeys(way for way, _ in measured))
    headings = ["spare\nslots", "load of ranks\nbefore", "\nafter", "replicas", "modelled\nms"]
    headings += ["modelled,\nof forced", *(f"measured,\n{way}" for way in ways)]
    rows = []
    for one in case.modelled:
        beside = [f"{measured[way, one.spare]:.3f}x" if (way, one.spare) in measured else "-" for way in ways]
        cells = [f"{one.before:.2f}", f"{one.after:.3f}", str(one.replicas), f"{one.ms:.2f}"]
        rows.append([str(one.spare), *cells, f"{one.of_forced:.3f}x", *beside])
    hardware = case.modelled[0].hardware
    title = f"Spare slots, {case.shape}, {case.routing} routing, {case.num_ranks} ranks; modelled: {hardware}"
    print_table(console, escape(title), headings, rows)


def _number(value: int | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3g}" if value < 1000 * unit else f"{value / unit:.0f}"
