"""A simulated step as a profile, so that it is shown, and compared, as a measured one is.

An event of the graph (`carpool.planner.step.events`) becomes a piece of work of a trace (`carpool.profile.rank_trace`):

    dispatch, combine, experts, packing           themselves
    attention, dense, elementwise, loss, ...      computation
    gather, reduction, send, offload              other communication
    host                                          nothing: a profile shows streams of the device

A collective lasts from the moment at which the rank is ready, as its kernel would: it waits for the others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carpool.planner.step.events import COMPUTATION, HOST, STREAM_OF, Event, Execution
from carpool.profile.numbers import Profile, measure
from carpool.profile.rank_trace import KINDS, OTHER, STEP, Label, Piece, Recorded


def kind_of_event(event: Event) -> str:
    """Of `carpool.profile.rank_trace.KINDS`."""
    if event.kind in KINDS:
        return event.kind
    return "computation" if STREAM_OF[event.kind] == COMPUTATION else OTHER


def simulated_profile(execution: Execution, about: dict[str, str]) -> Profile:
    """The kept ranks of each stage, numbered as in the whole run. `about`: what was simulated, for a person."""
    numbers = []
    for rank, recorded in _ranks(execution):
        found = measure(recorded, rank)
        # Streams of the graph have names that say what runs there.
        lanes = [lane.model_copy(update={"name": lane.name.partition(":")[0]}) for lane in found.lanes]
        numbers.append(found.model_copy(update={"lanes": lanes}))
    return Profile(about=about, on_device=True, simulated=True, ranks=numbers)


def _ranks(execution: Execution) -> Iterator[tuple[int, Recorded]]:
    step = 0, round(1e9 * execution.step)
    with_experts = {event.layer for event in execution.graph.events if event.kind in ("dispatch", "experts")}
    for stage in range(execution.graph.stages):
        for at, rank in enumerate(execution.kept):
            pieces = []
            for event, start, end in _events(execution, stage, at):
                label = None
                if event.layer in with_experts:
                    label = Label(f"layers.{event.layer}", event.phase, event.name.rpartition("::")[2])
                span = round(1e9 * start), round(1e9 * end)
                pieces.append(Piece(*span, event.stream, kind_of_event(event), label))
            yield stage * execution.ranks + rank, Recorded(step, pieces, on_device=True)


def _events(execution: Execution, stage: int, at: int) -> Iterator[tuple[Event, float, float]]:
    """(event, start, end) of one rank's device."""
    times = zip(execution.graph.events, execution.arrive_EK[:, at], execution.end_EK[:, at], strict=True)
    for event, start, end in times:
        if event.stage == stage and event.kind != HOST and end > start:
            yield event, float(start), float(end)


def write_simulated_trace(execution: Execution, path: Path) -> None:
    """Write a Chrome trace (.json.gz) of the kept ranks for ui.perfetto.dev: a process for each, a thread for each
    stream. Events of the critical path are marked."""
    on_path = {(one.event.name, one.event.micro_batch, one.event.stage) for one in execution.path}
    events: list[dict[str, Any]] = []
    streams = list(dict.fromkeys(event.stream for event in execution.graph.events if event.kind != HOST))
    for stage in range(execution.graph.stages):
        for at, rank in enumerate(execution.kept):
            process = stage * execution.ranks + rank
            events.append(_named("process_name", process, 0, f"rank {process} (simulated)"))
            events += [_named("thread_name", process, number, name) for number, name in enumerate(streams)]
            step = {"ph": "X", "cat": "user_annotation", "name": STEP, "pid": process, "tid": -1, "ts": 0.0}
            events.append({**step, "dur": 1e6 * execution.step})
            for event, start, end in _events(execution, stage, at):
                told = {"kind": event.kind, "phase": event.phase, "micro-batch": event.micro_batch}
                if (event.name, event.micro_batch, stage) in on_path:
                    told["critical path"] = "yes"
                events.append({
                    "ph": "X", "cat": kind_of_event(event), "name": event.name, "pid": process,
                    "tid": streams.index(event.stream), "ts": round(1e6 * start, 3),
                    "dur": round(1e6 * (end - start), 3), "args": told,
                })  # fmt: skip
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file, separators=(",", ":"))


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
