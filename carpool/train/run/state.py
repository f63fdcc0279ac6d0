"""What a run consists of while it lives. `setup.py` makes it, `loop.py` takes its steps, others report on it.

It stands below all of these, so that what reports on a run (`about.py`, `evaluate.py`, `numbers.py`, `finish.py`) need
not import what starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from carpool.hf.seam.layouts import current_layouts, slots_of_rides_kept
from carpool.hf.seam.rides import buffers_of_rides, rooms_of_rides
from carpool.layout.layouts import Layouts
from carpool.train.build.assemble import Assembled
from carpool.train.build.run_data import RunData
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.launch.stopping import StopRequest
from carpool.train.launch.watchdog import Watchdog
from carpool.train.moving.runtime import Placement
from carpool.train.records.display import Display
from carpool.train.records.record import Recorder
from carpool.train.steps.objective import Batch
from carpool.train.steps.room import fewer_node_rows, make_room, random_state, restore_random_state

T = TypeVar("T")


class RunState(Assembled):
    """Everything that lives as long as a run, the same on all ranks but for what belongs to a rank: what was assembled,
    data, and records.

    Attributes:
        compare_with: a transport whose step times are compared at the end; None: no comparison.
        memory_before: peak bytes of this process before anything was built.
        step, start, saved_at, last_step: now, at the start, of the newest checkpoint, at the end.
        totals, losses: of the whole run, resumed parts included.
        flops, peak, peak_source: operations per token; the device's peak and where that number is from.
        unwritten: what could not be written so far, by name.
        info: run.json.
    """

    compare_with: str | None
    memory_before: int
    folder: Path
    checkpoints: CheckpointManager
    tokenizer: Tokenizer
    data: RunData
    placement: Placement
    step: int
    start: int
    saved_at: int
    last_step: int
    totals: dict[str, int]
    losses: dict[str, float | None]
    flops: int
    peak: float | None
    peak_source: str
    step_records: list[dict[str, Any]]
    stop: StopRequest
    unwritten: dict[str, str]
    recorder: Recorder
    display: Display
    watchdog: Watchdog
    info: dict[str, Any]

    def layouts(self) -> Layouts:
        """Where the experts of each layer are now. Those of other stages of a pipeline are as this rank's."""
        own = current_layouts(self.model)
        if self.pipeline is None:
            return own
        return Layouts(dict.fromkeys(self.pipeline.moe_layers, next(iter(own.values()))))

    def slots_kept(self) -> AbstractContextManager[None]:
        """Inside, slots are filled once, not in every forward."""
        return slots_of_rides_kept(self.rides, self.config.moe.fp8_hold_weights, self.config.placement.prefetch)

    def with_room(self, compute: Callable[[], T]) -> T:
        """What `compute` returns once all rows had a place in the transport's buffers. Until then the buffers grow, and
        it is repeated from the same random state."""
        rooms = rooms_of_rides(self.rides)
        if not rooms:
            return compute()
        before, mark = random_state(self.device), self.placement.mark()
        while True:
            result = compute()
            made = make_room(rooms, self.device, self._forget_graphs)
            if made is None:
                return result
            self.model.zero_grad(set_to_none=True)
            restore_random_state(before, self.device)
            self.metrics.reset()
            self.placement.rewind(mark)
            self.recorder.write("repeat", self.step, **made._asdict())
            now = [f"{made.capacity:,} a slab"] if made.capacity is not None else []
            now += [f"{made.arena_bytes / 2**20:,.0f} MiB for the backward"] if made.arena_bytes else []
            now += [f"{made.node_rows:,} to each other node"] if made.node_rows is not None else []
            self.display.say(f"step {self.step}: more rows than there is room for: now {', '.join(now)}, and once more")

    def fit_room(self) -> None:
        """After a step: from now on send as many rows to each other node as steps need, if these are fewer."""
        if (rows := fewer_node_rows(rooms_of_rides(self.rides))) is not None:
            self._forget_graphs()
            self.recorder.write("node_rows", self.step, rows=rows)
            self.display.say(f"step {self.step}: from now on {rows:,} rows travel to each other node")

    def _forget_graphs(self) -> None:
        if self.objective.graphs is not None:
            self.objective.graphs.forget()

    def check_rides(self) -> None:
        """Raise RankMissingError if a ride since the last call lacked a rank. Looks at host memory."""
        for buffers in buffers_of_rides(self.rides):
            buffers.check()

    def to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def close(self) -> None:
        # NCCL waits for graphs that hold its operations when a process group is destroyed.
        self._forget_graphs()
        self.data.train.close()
        self.placement.close()
        self.watchdog.stop()
        self.recorder.close()
        self.display.close()
