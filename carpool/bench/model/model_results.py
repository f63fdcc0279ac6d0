"""What was measured of a model's training step, as plain values, and the tables that show it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from carpool.bench.result_files import Result, print_table, terminal
from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.planner.machine.hardware import Hardware
from carpool.profile.kinds import IDLE, KINDS
from carpool.train.blueprint import ModelSize, Trained, flops_per_token
from carpool.transport import find_transport

NAMES = {
    "experts": "experts", "dense": "dense matrix products", "attention": "attention", "loss": "loss",
    "optimizer": "optimizer, clipping", "elementwise": "elementwise, norms", "copies": "copies", "rides": "rides",
    "communication": "other communication", IDLE: "idle",
}  # fmt: skip


class StepTimes(NamedTuple):
    """Milliseconds of a step in one round: until it is done, and those that the host works for it, and waits for the
    device meanwhile."""

    ms: float
    host_ms: float
    host_waits_ms: float = 0.0


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step, of the slowest rank: `rounds`, and the medians of `StepTimes` over them."""

    rounds: list[float]
    ms: float
    host_ms: float
    host_waits_ms: float

    @classmethod
    def of(cls, rounds: Sequence[StepTimes]) -> Times:
        """From those of each round."""
        return cls([one.ms for one in rounds], *(statistics.median(column) for column in zip(*rounds, strict=True)))


@dataclass(frozen=True)
class KindRow:
    """Milliseconds of a kind of kernel in a step, mean over ranks: of the step divided among the kinds, and at all."""

    kind: str
    ms: float
    busy_ms: float


@dataclass
class Row:
    """One contender.

    Attributes:
        what: what it is, as it ran.
        unavailable: why it could not run; then all else is empty.
        loss, grad_norm: of the first step.
        load: of the fullest expert of a layer, over the mean; None if nobody counted.
        changes: what of the model's function it changes; its loss need not be that of the others.
        bytes_remote: of a step, between ranks, forward and backward; None if nobody counted.
        first_step_seconds: how long that took, compiling included.
        peak_bytes: of the largest rank, in PyTorch's memory and in buffers. None on CPU.
        reserved_bytes: what PyTorch's allocator had from the device then, graphs' pools included. None on CPU, and of
            contenders that share a process, as they take turns.
        ratio: how many times faster than the first contender that ran.
        kinds: the time of a step by kind; profiled_ms: of that step, under the profiler.
        captured: its steps are CUDA graphs.
    """

    label: str
    predicted_bytes: int
    what: str = ""
    unavailable: str | None = None
    loss: float | None = None
    grad_norm: float | None = None
    load: float | None = None
    changes: list[str] = field(default_factory=list)
    bytes_remote: int | None = None
    first_step_seconds: float | None = None
    times: Times | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    ratio: float | None = None
    kinds: list[KindRow] = field(default_factory=list)
    profiled_ms: float | None = None
    on_device: bool = False
    captured: bool = False


@dataclass
class Case:
    """All contenders.

    Attributes:
        tokens: of one rank in a step.
        rooflines: the least milliseconds of each kind; None where a rate is not known.
        groups: contenders that took turns with each other.
        warnings: what was said before.
        different: what of the first step differs between contenders, though it should not.
    """

    model: str
    architecture: str
    parameters: int
    active: int
    layers: int
    num_ranks: int
    tokens: int
    sequence: int
    routing: str
    flops_per_token: int
    peak_flops: float | None
    peak_source: str
    rooflines: dict[str, float | None]
    groups: list[list[str]]
    warnings: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def compare(self) -> None:
        """Fill in the ratios."""
        times = [row.times.ms for row in self.rows if row.times is not None]
        for row in self.rows:
            if row.times is not None:
                row.ratio = times[0] / row.times.ms


def show(result: Result, console: Console | None = None) -> None:
    """Print both tables."""
    console = console or terminal(150)
    case: Case = result.cases[0]
    title = (
        f"{case.model} ({case.architecture}, {case.layers} layers, {case.parameters / 1e9:.4g} B parameters, "
        f"{case.active / 1e9:.4g} B active), {case.num_ranks} ranks, {case.tokens:,} tokens a rank and step in "
        f"sequences of {case.sequence:,}, {case.routing} routing"
    )
    print_table(console, title, *_speeds(case))
    for row in case.rows:
        text = f"is not available: {row.unavailable}" if row.unavailable else row.what
        console.print(f"{row.label}: {text}", highlight=False, markup=False)
    for text in case.different:
        console.print(f"NOT THE SAME COMPUTATION: {text}", style="bold red", highlight=False, markup=False)
    console.print()
    print_table(
        console, "Where the time of a step goes: milliseconds, share of the step, times its roofline", *_kinds(case)
    )
    console.print(_notes(result, case), highlight=False, markup=False)


def _speeds(case: Case) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    headings = [
        "contender", "tokens/s\nper rank", "step\nms", "host\nms", "host\nwaits", "MFU", "TFLOP/s",
        "peak\nGiB", "reserved\nGiB", "first\nstep s", "loss", "speed",
    ]  # fmt: skip
    rows = []
    for row in case.rows:
        if row.times is None:
            rows.append([escape(row.label), "not available"])
            continue
        cells = [
            f"{row.tokens_per_second:,.0f}",
            f"{row.times.ms:.1f}\n[dim]{min(row.times.rounds):.4g}-{max(row.times.rounds):.4g}[/]",
            f"{row.times.host_ms:.1f}",
            f"{row.times.host_waits_ms:.1f}",
            "-" if row.mfu is None else f"{row.mfu:.1%}",
            f"{row.tflops:.3g}",
            *("-" if size is None else f"{size / 2**30:.1f}" for size in (row.peak_bytes, row.reserved_bytes)),
            f"{row.first_step_seconds:.1f}",
            f"{row.loss:.4f}",
            f"{row.ratio:.2f}x",
        ]
        rows.append([escape(row.label), *cells])
    return headings, rows


def _kinds(case: Case) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    measured = [row for row in case.rows if row.profiled_ms is not None]
    rows = []
    for kind in (*KINDS, IDLE):
        least, cells = case.rooflines.get(kind), []
        for row in measured:
            one = next(found for found in row.kinds if found.kind == kind)
            assert row.profiled_ms is not None
            times = f"  {one.busy_ms / least:>5.1f}x" if least and one.busy_ms else ""
            cells.append(f"{one.ms:.1f}  {one.ms / row.profiled_ms:>4.0%}{times}")
        rows.append([NAMES[kind], "-" if least is None else f"{least:.1f}", *cells])
    total = sum(least for least in case.rooflines.values() if least is not None)
    rows.append(["step", f"{total:.1f}" if total else "-", *(f"{row.profiled_ms:.1f}" for row in measured)])
    return ["kind", "roofline\nms", *(row.label for row in measured)], rows


def _notes(result: Result, case: Case) -> str:
    settings = result.settings
    notes = [
        f"ms: median of {settings['rounds']} rounds of {settings['steps']} steps back to back, smallest and largest; "
        "host: what it works for a step, and what it waits for the device meanwhile."
    ]
    if any(row.captured for row in case.rows):
        notes.append(
            "Where steps are CUDA graphs, the host's work is that of a step in which it waits for each graph, so that "
            "no launch waits behind others. What the device waits for the host is idle."
        )
    if len(case.groups) > 1:
        told = "; then ".join(", ".join(group) for group in case.groups)
        notes.append(f"NOT INTERLEAVED, because the models do not fit into memory together: {told}.")
    if case.routing == "learned":
        notes.append("Routing of random weights: skewed as it comes, no basis for a comparison with published speeds.")
    elif case.routing == "balanced":
        notes.append("Choices are forced: every expert serves equally many tokens; weights are the router's own.")
    loads = [f"{row.load:.2f} times the mean ({row.label})" for row in case.rows if row.load is not None]
    if loads:
        notes.append(f"The fullest expert of a layer served {', '.join(loads)}.")
    on_device = all(row.on_device for row in case.rows if row.kinds)
    what = "kernels" if on_device else "operators of the host, on a CPU"
    notes.append(
        f"Kinds: of {what}, in one step under the profiler, mean over ranks. Each moment counts once, computation "
        "before communication; times of the roofline are of all that ran, hidden or not. Activations and permutations "
        "are experts in Carpool's, elementwise and copies in transformers'. Rooflines are of the model's "
        "operations and bytes, and of datasheets."
    )
    return "\n".join([*notes, result.where])


@dataclass(frozen=True)
class Sizes:
    """What of a step decides how much there is to do.

    Attributes:
        tokens: T, of one rank in the whole step.
        layers, moe_layers: all of them, and those with experts.
        number_bytes: e of activations; parameter_bytes: of parameters that are trained.
    """

    model: ModelSize
    trained: Trained
    degrees: Degrees
    tokens: int
    sequence: int
    hidden: int
    vocabulary: int
    layers: int
    moe_layers: int
    num_experts: int
    top_k: int
    number_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Work:
    """Of one kind, in a step of one rank: operations, bytes of memory, bytes that the rank sends."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    sent_bytes: float = 0.0


def work_of(sizes: Sizes) -> dict[str, Work]:
    """The least that a step must do, by kind of `carpool.profile.kinds.KINDS`; kinds that nothing needs (copies) are
    missing. With T tokens of a rank, H hidden, V words, L layers, W ranks, e bytes of a number:

        experts         6 operations for each parameter of the K experts that a token visits, 4 for a frozen one, and 6
                        for each of their adapters
        dense           the same for all others that multiply it, the output head's included
        attention       6 S heads head_dim for each token and layer: causal, at half
        loss            logits are read once, and their gradients written once: 2 e T V bytes
        optimizer       8 numbers of each of the rank's own parameters: the parameter and two moments read and written,
                        its gradient read twice (once for the norm)
        elementwise     a residual sum and its norm read and write four rows of H, twice in a layer, and as much again
                        in the backward: 16 e T H L bytes
        rides           one row of H for each token and rank that it visits, if choices are uniform, there and back, and
                        the same for gradients
        communication   gradients of parameters that several ranks hold go out once, and parameters come back once;
                        without those of adapters
    """
    model, degrees, tokens = sizes.model, sizes.degrees, sizes.tokens
    attention = flops_per_token(model, sizes.sequence) - 6 * model.multiplied
    trained = sizes.trained
    # Adapters are small, and whole on each rank or with their experts.
    whole, own = trained.updated == model.total, trained.updated / degrees.ep
    if whole:
        own = (model.total - model.experts) / degrees.non_expert_shards + model.experts / degrees.expert_shards
    copies = degrees.etp * find_transport("dedup").ranks_per_token(sizes.num_experts, sizes.top_k, degrees.ep)
    remote = copies * (degrees.expert_ranks - 1) / degrees.expert_ranks
    row = sizes.hidden * sizes.number_bytes
    shared_dense = (model.total - model.experts) * (degrees.non_expert_shards - 1) / degrees.non_expert_shards
    shared_experts = model.experts / degrees.expert_ranks * (degrees.efsdp - 1) / degrees.efsdp
    return {
        "experts": Work(flops=tokens * (6 * (model.visited + trained.expert_adapters) - 2 * trained.frozen_experts)),
        "dense": Work(flops=tokens * (6 * (model.multiplied - model.visited + trained.adapters) - 2 * trained.frozen)),
        "attention": Work(flops=tokens * attention),
        "loss": Work(memory_bytes=2 * tokens * sizes.vocabulary * sizes.number_bytes),
        "optimizer": Work(memory_bytes=8 * own * sizes.parameter_bytes),
        "elementwise": Work(memory_bytes=16 * tokens * row * sizes.layers),
        "rides": Work(sent_bytes=4 * tokens * remote * row * sizes.moe_layers),
        "communication": Work(sent_bytes=2 * whole * (shared_dense + shared_experts) * sizes.parameter_bytes),
    }


def roofline_ms(work: Work, hardware: Hardware, topology: Topology, peak: float | None) -> float | None:
    """The least milliseconds that it can take; None where a rate is not known.

    Args:
        topology: of all ranks; the slowest link among them counts.
        peak: FLOP/s of the device.
    """
    if peak is None or hardware.memory is None:
        return None
    links = {topology.link(0, other) for other in range(1, topology.num_ranks)}
    slowest = min((hardware.rate(link).bytes_per_second for link in links), default=None)
    seconds = work.flops / peak + work.memory_bytes / hardware.memory
    return 1e3 * (seconds + (work.sent_bytes / slowest if slowest is not None else 0.0))
