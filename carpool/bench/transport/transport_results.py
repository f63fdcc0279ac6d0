"""What was measured, as plain values, and the tables that show it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from rich.console import Console

from carpool.bench.contest import Row, print_remarks
from carpool.bench.options import RideShape
from carpool.bench.result_files import Result, print_table, terminal
from carpool.bench.timing import p99


@dataclass(frozen=True)
class Times:
    """One section of one contender.

    Attributes:
        us: microseconds of the slowest rank, for each repetition; their median and 99th percentile (of fewer than 100:
            the largest).
        host_us: median microseconds that rank 0's host spent in it.
        bytes: through the link of the busiest rank; None where that is not the question.
        gb_per_s: 1e9 bytes per second of the median.
        share_of_ceiling: of what plain copies reached; None where that was not measured.
    """

    us: list[float]
    us_median: float
    us_p99: float
    host_us: float
    bytes: int | None
    gb_per_s: float | None
    share_of_ceiling: float | None

    @classmethod
    def of(cls, us: list[float], num_bytes: int | None, ceiling: float | None, host_us: float) -> Times:
        """`ceiling` in GB/s."""
        median = statistics.median(us)
        rate = num_bytes / median / 1e3 if num_bytes else None
        share = rate / ceiling if rate and ceiling else None
        return cls(us, median, p99(us), host_us, num_bytes, rate, share)


@dataclass(kw_only=True)
class ContenderResult(Row):
    """One contender of a case.

    Attributes:
        bytes_sent, bytes_predicted: per verb, bytes that each rank sent to others in one call.
        sections: `Times`; see `carpool.bench.transport`.
        graph: decoding was replayed from a CUDA graph.
    """

    transport: str
    ctas: int | None = None
    bytes_sent: dict[str, list[int]] = field(default_factory=dict)
    bytes_predicted: dict[str, list[int]] = field(default_factory=dict)
    graph: bool = False


@dataclass
class CaseResult:
    """All contenders at one shape and routing. `mode`: "train" or "decode"; `ceiling`: the push of plain copies."""

    shape: RideShape
    routing: str
    mode: str
    num_ranks: int
    rows: list[ContenderResult] = field(default_factory=list)
    ceiling: Times | None = None
    ceiling_bytes: int | None = None


# Heading and section of each time in the tables of the two passes.
_FORWARD = {"plan +\ndispatch": "plan_dispatch", "dispatch,\ncached plan": "dispatch", "combine": "combine"}
_BACKWARD = {"dispatch\ngradients": "dispatch_gradients", "combine\ngradients": "combine_gradients"}
_DECODE = {"plan + dispatch\n+ combine": "decode"}


def show(result: Result, console: Console | None = None) -> None:
    """Print a table for each case and pass."""
    console = console or terminal(120)
    last = "p99" if result.settings["repetitions"] >= 100 else "max"
    for case in result.cases:
        if case.mode == "decode":
            title = f"decode: {case.shape}, {case.routing} routing, {case.num_ranks} ranks"
            _print(console, title, case, _DECODE, last, None)
            continue
        _print(console, _title(result, case), case, _FORWARD, last, ("plan_dispatch", "combine"))
        if result.settings["backward"]:
            rates = ("dispatch_gradients", "combine_gradients")
            _print(console, "backward of the same", case, _BACKWARD, last, rates)
    console.print(
        f"us: of the slowest rank, median / {last} of {result.settings['repetitions']} interleaved repetitions. MB and "
        f"GB/s: through the link of the busiest rank, out / back.\n{result.where}",
        highlight=False,
    )


def _title(result: Result, case: CaseResult) -> str:
    title = f"{case.shape}, {result.settings['dtype']}, {case.routing} routing, {case.num_ranks} ranks"
    if case.ceiling is not None and case.ceiling_bytes is not None:
        title += (
            f"\nceiling: copy engines, {case.ceiling.gb_per_s:.0f} GB/s ({case.ceiling_bytes / 1e6:.1f} MB per rank in "
            f"{case.ceiling.us_median:.0f} us)"
        )
    return title


def _print(
    console: Console,
    title: str,
    case: CaseResult,
    sections: dict[str, str],
    last: str,
    rates: tuple[str, str] | None,
) -> None:
    """One table. `rates`: the sections, out and back, whose bytes and GB/s are shown."""
    headings = ["transport", "CTAs", *(f"{name}\nus / {last}" for name in sections)]
    headings += ["MB", "GB/s", "share of\nceiling"] if rates else ["how"]
    rows = []
    for row in case.rows:
        begin = [row.transport + (" fp8" if row.lossy else ""), "-" if row.ctas is None else str(row.ctas)]
        if row.unavailable:
            rows.append([*begin, "not available"])
            continue
        shown = [row.sections[section] for section in sections.values()]
        cells = [f"{times.us_median:.0f} / {times.us_p99:.0f}" for times in shown]
        if rates is None:
            cells.append("CUDA graph" if row.graph else "eager")
        else:
            both = [row.sections[section] for section in rates]
            cells.append(" / ".join(f"{(times.bytes or 0) / 1e6:.1f}" for times in both))
            cells.append(" / ".join("-" if times.gb_per_s is None else f"{times.gb_per_s:.3g}" for times in both))
            shares = [times.share_of_ceiling for times in both]
            cells.append("-" if None in shares else " / ".join(f"{share:.0%}" for share in shares))
        rows.append([*begin, *cells])
    print_table(console, title, headings, rows)
    print_remarks(console, case.rows)
