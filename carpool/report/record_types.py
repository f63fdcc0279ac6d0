"""The records of a run directory, as types.

A run may be half written, older or newer than this reader, or lack what was not asked for. So every field but the step
has a default, `null` means the same as absent, and unknown fields are ignored. A field of the wrong type is refused.

A step's `step_ms` is the wall time from fetching its batch to reading its last number, on rank 0. Evaluations,
checkpoints, samples and moves of experts lie between steps and are not in it. The **step time** of a run is the median
of `step_ms` over its *steady* steps: all but the first one after each start of the process, which warms up allocators,
caches and connections. Shares, speed and MFU are medians over the same steps (`summarise_steps`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

TIMES = ("milliseconds", "microseconds")
"""Under which name a decision has what it measured: the unit."""
PARTS = ("dispatch", "experts", "combine", "rest")
"""Where a step's time goes, in the order of the layer; dispatch and combine are the rides."""


class Record(BaseModel):
    """Base of all records: immutable, tolerant of unknown fields, `null` as absent."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


def explain(error: ValidationError) -> str:
    """The first complaint of pydantic, in one line: `ms.dispatch.p50: Input should be a valid number (got 'x')`."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "record"
    return f"{field}: {first['msg']} (got {first['input']!r:.80})"


# run.json


class HistoryEntry(Record):
    started: str = ""
    from_step: int = 0
    resumed_from: str | None = None


class ModelInfo(Record):
    architecture: str = "unknown architecture"
    parameters: int | None = None
    active_parameters: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layers: list[str] = Field(default_factory=list)
    hidden_size: int | None = None
    moe_intermediate_size: int | None = None


class TransportInfo(Record):
    name: str = "unknown"
    requested: str | None = None
    buffer_bytes: int | None = None


class Decision(Record):
    """What a run chose for itself: the answer under names of its own, and how it came to it."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    how: str = ""
    why: str = ""
    shape: dict[str, Any] = Field(default_factory=dict)

    @property
    def answer(self) -> dict[str, Any]:
        """By name, without what was timed."""
        return {key: value for key, value in (self.model_extra or {}).items() if key not in TIMES}


class Predicted(Record):
    """Computed before the run from shapes, never measured."""

    memory_per_rank_bytes: dict[str, float | None] = Field(default_factory=dict)
    copies_per_token_uniform: float | None = None
    flops_per_token: float | None = None


class Told(Record):
    """A step as it was predicted by a plan, or as the first steps measured it."""

    step_ms: tuple[float, ...] = ()
    memory_bytes: float | None = None
    exposed_share: float | None = None
    kinds_ms: dict[str, float] = Field(default_factory=dict)
    factors: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _one_time(cls, data: Any) -> Any:
        step = data.get("step_ms") if isinstance(data, dict) else None
        return {**data, "step_ms": (step,)} if isinstance(step, (int, float)) else data


class PlanInfo(Record):
    predicted: Told = Field(default_factory=Told)
    measured: Told = Field(default_factory=Told)


class RunInfo(Record):
    carpool_version: str | None = None
    started: str | None = None
    command: str | None = None
    history: list[HistoryEntry] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    model: ModelInfo = Field(default_factory=ModelInfo)
    parallelism: dict[str, Any] = Field(default_factory=dict)
    transport: TransportInfo = Field(default_factory=TransportInfo)
    decisions: dict[str, Decision] = Field(default_factory=dict)
    plan: PlanInfo | None = None
    layout: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, dict[str, str]] = Field(default_factory=dict)
    exact: bool | None = None
    lossy_reasons: list[str] = Field(default_factory=list)
    predicted: Predicted = Field(default_factory=Predicted)
    peak_flops: float | None = None
    peak_flops_source: str | None = None
    seed: int | None = None
    data: dict[str, Any] = Field(default_factory=dict)


# metrics.jsonl


class Timing(Record):
    """Milliseconds: per call (p50, p99, slowest rank) and summed over the step (total)."""

    p50: float | None = None
    p99: float | None = None
    total: float | None = None


class Train(Record):
    step: int
    loss: float | None = None
    aux_loss: float | None = None
    z_loss: float | None = None
    sequence_aux_loss: float | None = None
    distillation_loss: float | None = None
    mtp_losses: list[float] | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_seen: int | None = None
    bytes_remote_seen: int | None = None
    bytes_remote_alltoall_seen: int | None = None
    bytes_network_seen: int | None = None
    step_ms: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    copies_per_token: float | None = None
    rows_remote: int | None = None
    rows_remote_per_token: float | None = None
    bytes_remote: int | None = None
    bytes_remote_alltoall: int | None = None
    bytes_network: int | None = None
    load_max_over_mean: float | None = None
    rank_load_max_over_mean: float | None = None
    rank_load_before: float | None = None
    rank_load_after: float | None = None
    dead_experts: int | None = None
    router_entropy: float | None = None
    dropped_tokens: int | None = None
    ms: dict[str, Timing] = Field(default_factory=dict)
    memory_peak_bytes: int | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    source_tokens: dict[str, int] = Field(default_factory=dict)

    def part_ms(self, part: str, which: str) -> float | None:
        """`which` (p50, p99 or total) of one part of the layer, in ms; None if it was not measured."""
        timing = self.ms.get(part)
        return None if timing is None else getattr(timing, which)


class SpareLoad(Record):
    """The largest load of a rank in a layer's rides, over the mean, without (before) and with (after) spare slots."""

    before: float = 1.0
    after: float = 1.0


class Layers(Record):
    """One step seen layer by layer and rank by rank: load_LE tokens per expert, copies_L, rows_WW from rank i to rank
    j, rank_load_W choices that each rank computes, each rank's milliseconds in experts and rides, and the load of
    each layer with spare slots."""

    step: int
    load: list[list[float]] = Field(default_factory=list)
    copies: list[float | None] = Field(default_factory=list)
    traffic_rows: list[list[float]] = Field(default_factory=list)
    rank_load: list[float] = Field(default_factory=list)
    rank_ms: dict[str, list[float]] = Field(default_factory=dict)
    spare: list[SpareLoad] = Field(default_factory=list)

    @model_validator(mode="after")
    def _shapes(self) -> Layers:
        if len({len(row) for row in self.load}) > 1:
            raise ValueError(f"load names {sorted({len(row) for row in self.load})} experts in different layers")
        if any(len(row) != len(self.traffic_rows) for row in self.traffic_rows):
            raise ValueError("traffic_rows is not square: one row and one column per rank are expected")
        return self


class Eval(Record):
    """`sets`: the loss of each set, where there are several."""

    step: int
    loss: float | None = None
    tokens: int | None = None
    sets: dict[str, float | None] = Field(default_factory=dict)


class Sample(Record):
    step: int
    prompt: str = ""
    text: str = ""


class Probe(Record):
    step: int
    transport: str = ""
    step_ms: list[float] = Field(default_factory=list)
    bytes_remote: int | None = None


class Checkpoint(Record):
    """`seconds`: that training waited; copied and written beside it: of one that it did not wait for."""

    step: int
    path: str = ""
    bytes: int | None = None
    seconds: float | None = None
    copied_seconds: float | None = None
    written_seconds: float | None = None


class Outlook(Record):
    """What a layout makes of a routing: remote rows per token and layer, remote bytes per token over all layers, and
    the fullest rank's choices over the mean; means over layers."""

    rows: float | None = None
    bytes: float | None = None
    load: float | None = None


class Placement(Record):
    """A look at where experts should live (`event` moved or kept), or what was measured since a move (`event`
    measured)."""

    step: int
    event: str = ""
    why: str = ""
    solve_seconds: float | None = None
    layers: int | None = None
    experts: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    before: Outlook = Field(default_factory=Outlook)
    predicted: Outlook = Field(default_factory=Outlook)
    measured: Outlook = Field(default_factory=Outlook)
    since: int | None = None


class Layout(Record):
    """Where experts live from this step on: of all layers alike (homes, slices), or of each by name (layers)."""

    step: int
    homes: list[list[int]] = Field(default_factory=list)
    slices: int = 1
    layers: dict[str, LayerLayout] = Field(default_factory=dict)


class LayerLayout(Record):
    """For each rank, the experts whose parameters it owns. Of experts that are cut into several slices, slice i of
    expert e is number e * slices + i."""

    homes: list[list[int]] = Field(default_factory=list)
    slices: int = 1


class Stopped(Record):
    """What ended a run before its last step: an error (finite=False: NaN or inf), or a signal, after a checkpoint."""

    step: int
    why: str = ""
    signal: str | None = None
    finite: bool | None = None


class Recovery(Record):
    """How an elastic run went on in a new group: seconds until it had formed, for processes and imports, for the plan
    and the model, for the checkpoint, and for the first step."""

    step: int
    ranks: int = 0
    from_step: int = 0
    regroup: float = 0.0
    imports: float = 0.0
    build: float = 0.0
    load: float = 0.0
    first_step: float = 0.0

    @property
    def seconds(self) -> float:
        """From the last step of the group before."""
        return self.regroup + self.imports + self.build + self.load + self.first_step


# summary.json


class Compare(Record):
    transport: str = "alltoall"
    step_ms: float | None = None
    ours_step_ms: float | None = None
    ratio: float | None = None
    repetitions: int | None = None

    @classmethod
    def of_times(cls, times: Mapping[str, Sequence[float]], ours: str, theirs: str) -> Compare:
        """Medians of two transports' step times, and their ratio (theirs over ours: above 1, ours is faster)."""
        ours_ms, theirs_ms = (statistics.median(times[name]) for name in (ours, theirs))
        return cls(
            transport=theirs,
            step_ms=theirs_ms,
            ours_step_ms=ours_ms,
            ratio=theirs_ms / ours_ms if ours_ms else None,
            repetitions=min(len(times[ours]), len(times[theirs])),
        )


class Summary(Record):
    steps: int = 0
    tokens: int | None = None
    final_loss: float | None = None
    final_eval_loss: float | None = None
    first_eval_loss: float | None = None
    best_step: int | None = None
    best_eval_loss: float | None = None
    bytes_remote: int | None = None
    bytes_remote_alltoall: int | None = None
    bytes_network: int | None = None
    copies_per_token: float | None = None
    num_experts_per_tok: int | None = None
    step_ms_median: float | None = None
    compare: Compare | None = None
    ride_share: float | None = None
    share: dict[str, float] = Field(default_factory=dict)
    exact: bool | None = None
    lossy_reasons: list[str] = Field(default_factory=list)
    tokens_per_second_median: float | None = None
    mfu_median: float | None = None


# The step time of a run: one definition for the terminal, the report and comparisons

STEP_TIME = "median of the steps after warm-up, without evaluations and checkpoints"
"""The definition in words, as pages and the terminal give it."""


def steady(train: Sequence[Train], starts: Collection[int]) -> list[Train]:
    """The steps that count for times. `starts`: the first step of each process; a run of these alone keeps them."""
    return [t for t in train if t.step not in starts] or list(train)


def summarise_steps(train: Sequence[Train], starts: Collection[int]) -> dict[str, Any]:
    """Medians and means of `train` records, under the names of summary.json; None for what no step measured."""
    used = steady(train, starts)
    share = {}
    for part in PARTS[:-1]:
        spent = median(
            None if (ms := t.part_ms(part, "total")) is None or not t.step_ms else ms / t.step_ms for t in used
        )
        if spent is not None:
            share[part] = spent
    rides = [share[part] for part in ("dispatch", "combine") if part in share]
    copies = [t.copies_per_token for t in train if t.copies_per_token is not None]
    return {
        "copies_per_token": statistics.fmean(copies) if copies else None,
        "step_ms_median": median(t.step_ms for t in used),
        "ride_share": sum(rides) if rides else None,
        "share": {**share, "rest": max(0.0, 1.0 - sum(share.values()))} if share else {},
        "tokens_per_second_median": median(t.tokens_per_second for t in used),
        "mfu_median": median(t.mfu for t in used),
    }


def median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured and is a number; None if nothing was."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.median(known) if known else None
