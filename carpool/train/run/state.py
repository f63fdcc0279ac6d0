"""What a run consists of while it lives. `setup.py` fills it, `loop.py` takes its steps, others report on it.

It stands below all of these, so that what reports on a run (`about.py`, `evaluate.py`, `numbers.py`, `finish.py`) need
not import what starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from carpool.experts import Choices
from carpool.hf.bias import BiasBalance
from carpool.hf.expert_parallel import ExpertRides, buffers_of_rides, rooms_of_rides
from carpool.hf.layouts import current_layouts, slots_kept
from carpool.hf.metrics import RideMetrics
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.memory.host_experts import HostExperts
from carpool.parallel.consumed import ConsumedGradients
from carpool.parallel.meshes import Meshes
from carpool.planner.chosen import Chosen
from carpool.schedule import Schedule
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.data.corpus import Corpus
from carpool.train.data.loader import EvalLoader
from carpool.train.data.prefetch import Prefetch
from carpool.train.data.sequences import Sequences
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.launch.stopping import StopRequest
from carpool.train.launch.watchdog import Watchdog
from carpool.train.moving.runtime import Placement
from carpool.train.run.display import Display
from carpool.train.run.prepare import Prepared
from carpool.train.run.record import Recorder
from carpool.train.run.room import fewer_node_rows, make_room, random_state, restore_random_state
from carpool.train.run.step import Batch, Objective
from carpool.transport import TransportOptions

T = TypeVar("T")


class RunState(Prepared):
    """Everything that lives as long as a run, the same on all ranks but for what belongs to a rank: what was prepared,
    and what is made of it.

    Attributes:
        compare_with: a transport whose step times are compared at the end; None: no comparison.
        rank, world, main: this rank, their number, whether this is rank 0.
        memory_before: peak bytes of this process before anything was built.
        ep_topology: of this rank's expert-parallel group.
        rides: the layers that ride.
        load_seconds: until all ranks had the model.
        parameters: what the optimizer and clipping see: this rank's shards, where the model is sharded.
        no_graphs: why steps are not captured as CUDA graphs; None: they are.
        bias: moves the biases of routers; None: nothing does.
        adapted: parameters of the adapter; 0: the model itself is trained.
        options, most_tokens: of the transport; tokens of a rank in the largest forward.
        transport_choice, stages, schedule: of the decisions, those that need the model; stages: None if its experts
            have none.
        experts_lossy, limits_lossy: how these change the model's function, for the log.
        layout_source: what says where experts live at the start.
        step, start, saved_at, last_step: now, at the start, of the newest checkpoint, at the end.
        consumed: uses gradients in the backward; None: they are kept until the optimizer's step.
        away: keeps experts in host memory; None: they are on the device.
        totals, losses: of the whole run, resumed parts included.
        flops, peak, peak_source: operations per token; the device's peak and where that number is from.
        unwritten: what could not be written so far, by name.
        info: run.json.
    """

    compare_with: str | None
    rank: int
    world: int
    main: bool
    device: torch.device
    memory_before: int
    folder: Path
    checkpoints: CheckpointManager
    tokenizer: Tokenizer
    meshes: Meshes
    ep_topology: Topology
    corpus: Corpus
    sequences: Sequences
    loader: Prefetch
    eval_loader: EvalLoader
    model: PreTrainedModel
    bias: BiasBalance | None
    load_seconds: float
    adapted: int
    parameters: list[nn.Parameter]
    no_graphs: str | None
    rides: list[ExpertRides]
    options: TransportOptions
    most_tokens: int
    transport_choice: Chosen[str]
    stages: Chosen[Choices] | None
    schedule: Chosen[Schedule]
    experts_lossy: list[str]
    limits_lossy: list[str]
    layout_source: str
    watchdog: Watchdog
    objective: Objective
    optimizer: torch.optim.Optimizer
    consumed: ConsumedGradients | None
    away: HostExperts | None
    metrics: RideMetrics
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
    info: dict[str, Any]

    def __init__(self, prepared: Prepared) -> None:
        vars(self).update(vars(prepared))
        device = prepared.machine.device
        assert device is not None, "a run has ranks"
        self.rank, self.world, self.device = prepared.machine.rank, prepared.machine.ranks, device
        self.main = self.rank == 0

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.config.training.computes_in_bf16(self.machine.cuda)

    @property
    def element_size(self) -> int:
        """Bytes of an element of a row that travels, before a codec."""
        return 2 if self.bf16 else self.model.dtype.itemsize

    def layouts(self) -> Layouts:
        """Where the experts of each layer are now. Those of other stages of a pipeline are as this rank's."""
        own = current_layouts(self.model)
        if self.pipeline is None:
            return own
        return Layouts(dict.fromkeys(self.pipeline.moe_layers, next(iter(own.values()))))

    def slots_kept(self) -> AbstractContextManager[None]:
        """Inside, slots are filled once, not in every forward."""
        return slots_kept(self.model, self.config.moe.fp8_hold_weights, self.config.placement.prefetch)

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
        self.loader.close()
        self.placement.close()
        self.watchdog.stop()
        self.recorder.close()
        self.display.close()
