"""The traces of all ranks as one file, with one process for each rank.

Every rank numbers its threads, streams and arrows for itself, and counts time from a moment of its own. So in the
merged trace

    process    the rank
    thread     numbered anew for each (process, thread) of the rank; their names say what they were
    arrow      id * ranks + rank
    time       from the first event of all ranks, by their clocks: comparable as far as those agree

Ranks are read and written one after the other, so only one trace is in memory at a time.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from carpool.profile.trace import load

FLOWS = ("s", "t", "f")


def merge(traces: Mapping[int, Path], output: Path) -> None:
    """Write the traces of the ranks (by rank) to `output` (.json.gz), for Perfetto.

    Raises:
        ValueError: a file is no trace."""
    origin: int | None = None
    draft = output.with_name(f".{output.name}.part")
    with gzip.open(draft, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for number, (rank, path) in enumerate(sorted(traces.items())):
            data = load(path)
            base = int(data.get("baseTimeNanoseconds", 0))
            times = [event["ts"] for event in data["traceEvents"] if event.get("ph") != "M" and "ts" in event]
            if origin is None:
                origin = base + round(1000 * min(times, default=0.0))
            shift = (base - origin) / 1000
            for event in _renamed(data["traceEvents"], rank, number, len(traces), shift):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")
    draft.replace(output)


def _renamed(events: list[Any], rank: int, number: int, ranks: int, shift: float) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    processes: dict[Any, str] = {}
    for event in events:
        if event.get("name") == "thread_name":
            names[event.get("pid"), event.get("tid")] = str(event.get("args", {}).get("name", ""))
        elif event.get("name") == "process_labels":
            processes[event.get("pid")] = str(event.get("args", {}).get("labels", ""))
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for event in events:
        if event.get("ph") == "M" or "ts" not in event:
            continue
        place = event.get("pid"), event.get("tid")
        if place not in threads:
            threads[place] = len(threads) + 1
            said = names.get(place) or str(place[1])
            where = processes.get(place[0], str(place[0]))
            name = f"{where}: {said}" if where else said
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": threads[place], "args": {"name": name}}
        moved = {**event, "pid": rank, "tid": threads[place], "ts": round(event["ts"] + shift, 3)}
        if event.get("ph") in FLOWS and isinstance(event.get("id"), int):
            moved["id"] = event["id"] * ranks + number
        yield moved
