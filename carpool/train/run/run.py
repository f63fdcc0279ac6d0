"""A run on one rank: it has a plan, the model that was built by it, data, and records.

    plan_on_ranks   settings, checked on all ranks -> `Plan`                     carpool/train/plan
    read_data       the plan's data; it says how many steps an epoch has         carpool/train/build/run_data.py
    build           the plan's model, objective and optimizer                    carpool/train/build/assemble.py
    start_run       all of that, then the checkpoint that is resumed, records

What cannot be ends in an error before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from carpool.hf.observe.metrics import LaterRecord
from carpool.hf.seam.layouts import current_layouts, is_logical, logical_like, physical_order, slots_of_rides_kept
from carpool.hf.seam.rides import buffers_of_rides, rooms_of_rides
from carpool.layout.layouts import Layouts
from carpool.metrics.host import peak_memory
from carpool.metrics.metric import METRICS, LaterMetrics, Metric
from carpool.train.blueprint import Blueprint
from carpool.train.build.assemble import Built, build
from carpool.train.build.policy_times import measure_on_small_model
from carpool.train.build.run_data import MakeCorpus, RunData, read_data
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.resume import check_steps_left
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import Tokenizer, load_tokenizer
from carpool.train.launch.machine import find_machine, rank_device, ranks_of
from carpool.train.launch.ranks import from_rank_0, gather
from carpool.train.launch.stopping import StopRequest
from carpool.train.launch.worker import Watchdog
from carpool.train.moving.runtime import Placement
from carpool.train.moving.solve import Facts
from carpool.train.plan.resolve import Plan, resolve
from carpool.train.plan.start_checks import (
    check_choices,
    check_fits,
    check_same_data,
    check_same_settings,
    decisions_from,
    find_checkpoint,
)
from carpool.train.records.run_folder import why_not_writable
from carpool.train.run.run_records import Records, open_records, record_graphs
from carpool.train.steps.capacity import fewer_node_tokens, grow_if_short, random_state, restore_random_state
from carpool.train.steps.objective import Batch, Losses
from carpool.transport import check_codecs, check_transport

T = TypeVar("T")


class StepNumbers(NamedTuple):
    """Of a step that was done, while those of its rides are on their way to the host. `tokens`: that it has, of which
    it may predict fewer."""

    step: int
    tokens: int
    losses: Losses
    norm: float
    rode: LaterRecord
    metrics: LaterMetrics | None
    step_ms: float


@dataclass
class Run:
    """What lives as long as a run, the same on all ranks but for what belongs to a rank. `loop.py` takes its steps.

    Attributes:
        compare_with: a transport whose step times are compared at the end; None: no comparison.
        memory_before: peak bytes of this process before anything was built.
        step, start, saved_at, last_step: now, at the start, of the newest checkpoint, at the end.
        totals, losses: of the whole run, resumed parts included; both go into checkpoints.
        unrecorded: the step that was done last; None: its numbers are recorded.
        rode, measured: rides and plug-ins' metrics of the latest step, on their way to the host.
        metrics: those of plug-ins.
    """

    plan: Plan
    built: Built
    data: RunData
    tokenizer: Tokenizer
    compare_with: str | None = None
    memory_before: int = 0
    step: int = 0
    start: int = 0
    saved_at: int = 0
    last_step: int = 0
    totals: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "bytes_remote": 0, "bytes_remote_alltoall": 0})
    losses: dict[str, float | None] = field(
        default_factory=lambda: dict.fromkeys(("final_loss", "first_eval_loss", "final_eval_loss"))
    )
    stop: StopRequest = field(default_factory=StopRequest)
    unrecorded: StepNumbers | None = None
    rode: LaterRecord = field(init=False)
    measured: LaterMetrics | None = None
    metrics: list[Metric] = field(default_factory=lambda: [cls() for cls in METRICS.values()])
    checkpoints: CheckpointManager = field(init=False)
    placement: Placement = field(init=False)
    records: Records = field(init=False)
    watchdog: Watchdog = field(init=False)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def folder(self) -> Path:
        return Path(self.config.training.output_dir)

    @property
    def main(self) -> bool:
        """Whether this is rank 0."""
        return self.plan.machine.rank == 0

    def layouts(self) -> Layouts:
        """Where the experts of each layer are now. Those of other stages of a pipeline are as this rank's."""
        own = current_layouts(self.built.model)
        if self.plan.pipeline is None:
            return own
        return Layouts(dict.fromkeys(self.plan.pipeline.moe_layers, next(iter(own.values()))))

    def slots_kept(self) -> AbstractContextManager[None]:
        """Inside, slots are filled once, not in every forward."""
        hold, prefetch = self.config.moe.fp8_cache_weights, self.config.placement.prefetch
        return slots_of_rides_kept(self.built.rides, hold, prefetch)

    def with_capacity(self, compute: Callable[[], T]) -> T:
        """What `compute` returns once all tokens had a place in the transport's buffers. Until then the buffers grow,
        and it is repeated from the same random state."""
        rooms, device = rooms_of_rides(self.built.rides), self.built.device
        if not rooms:
            return compute()
        before, mark = random_state(device), self.placement.mark()
        while True:
            result = compute()
            made = grow_if_short(rooms, device, self.forget_graphs)
            if made is None:
                return result
            self.built.model.zero_grad(set_to_none=True)
            restore_random_state(before, device)
            self.built.metrics.reset()
            self.placement.rewind(mark)
            self.records.write("repeat", self.step, **made._asdict())
            now = [f"{made.capacity:,} a slab"] if made.capacity is not None else []
            now += [f"{made.arena_bytes / 2**20:,.0f} MiB for the backward"] if made.arena_bytes else []
            now += [f"{made.node_rows:,} to each other node"] if made.node_rows is not None else []
            self.records.say(f"step {self.step}: more rows than there is room for: now {', '.join(now)}, and once more")

    def fit_capacity(self) -> None:
        """After a step: from now on send as many tokens to each other node as steps need, if these are fewer."""
        rooms = rooms_of_rides(self.built.rides)
        if rooms and (rows := fewer_node_tokens(rooms)) is not None:
            self.forget_graphs()
            self.records.write("node_rows", self.step, rows=rows)
            self.records.say(f"step {self.step}: from now on {rows:,} rows travel to each other node")

    def forget_graphs(self) -> None:
        if self.built.objective.graphs is not None:
            self.built.objective.graphs.forget()

    def check_rides(self) -> None:
        """Raise RankMissingError if a ride since the last call lacked a rank. Looks at host memory."""
        for buffers in buffers_of_rides(self.built.rides):
            buffers.check()

    def to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.built.device, non_blocking=True) for name, value in batch.items()}

    def close(self) -> None:
        # NCCL waits for graphs that hold its operations when a process group is destroyed.
        self.forget_graphs()
        self.data.train.close()
        self.placement.close()
        self.watchdog.stop()
        self.records.close()


def start_run(
    config: Config,
    compare_with: str | None,
    command: str,
    fixed: Collection[str] = frozenset(),
    make_corpus: MakeCorpus | None = None,
) -> Run:
    """A run before its first step. All ranks call it alike.

    Args:
        compare_with: a transport whose step times are compared at the end.
        command: what the user typed, for the record.
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.
        make_corpus: instead of reading the text that `[data]` names.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used.
    """
    memory_before = peak_memory(rank_device())
    plan, tokenizer, resume, saved = plan_on_ranks(config, compare_with, fixed)
    plan, data = with_data(plan, tokenizer, make_corpus)
    built = build(plan, saved)
    if compare_with is not None:
        check_transport(compare_with, built.rides[0].group)
        if compare_with != "auto":
            check_codecs(compare_with, built.options.codecs)
    run = Run(plan, built, data, tokenizer, compare_with, memory_before)
    run.checkpoints = CheckpointManager(run.folder, plan.config.training.save_total_limit)
    _load_checkpoint(run, resume)
    run.placement = Placement(
        plan.config,
        built.model,
        built.optimizer,
        _facts(plan, built),
        run.folder,
        lambda text: run.records.say(text),
        lambda *args, **fields: run.records.write(*args, **fields),
        saved,
        resume,
    )
    run.records = open_records(run, command, resume)
    if built.objective.graphs is not None:
        built.objective.graphs.known = partial(record_graphs, run)
    run.watchdog = Watchdog(lambda: buffers_of_rides(built.rides))
    run.watchdog.start()
    return run


def plan_on_ranks(
    config: Config, compare_with: str | None = None, fixed: Collection[str] = (), resumes: bool = True
) -> tuple[Plan, Tokenizer, Path | None, dict[str, Any]]:
    """(the plan, the tokenizer, the checkpoint to go on from, what that says beside weights).

    Args:
        resumes: the run may go on from a checkpoint."""
    check_same_settings(config, compare_with)
    folder = Path(config.training.output_dir)
    if why := gather(why_not_writable(folder) if dist.get_rank() == 0 else None)[0]:
        raise ValueError(f"training.output_dir = {folder}: {why}; choose another folder")
    # Together the ranks look again when the model is there.
    check_choices(config, compare_with)
    machine = find_machine(config.parallelism, rank_device())
    resume, saved = from_rank_0(lambda: find_checkpoint(config)) if resumes else (None, {})
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
    blueprint = Blueprint.of_config(config, tokenizer)
    decisions = decisions_from(config, resume)
    plan = resolve(config, machine, blueprint, decisions, fixed, measure_on_small_model)
    # Advice takes a while, and the answer is the same.
    from_rank_0(lambda: check_fits(plan))
    return plan, tokenizer, resume, saved


def with_data(plan: Plan, tokenizer: Tokenizer, make_corpus: MakeCorpus | None = None) -> tuple[Plan, RunData]:
    """The data, and the plan with as many steps as they have, where epochs were asked for."""
    data = read_data(plan, tokenizer, rank_device(), make_corpus)
    check_same_data(data.corpus)
    training = plan.config.training.in_steps(data.steps_per_epoch)
    return replace(plan, config=plan.config.model_copy(update={"training": training})), data


def _load_checkpoint(run: Run, resume: Path | None) -> None:
    """What changes from step to step: from the start, or as the checkpoint has it."""
    training, built = run.config.training, run.built
    if resume is not None:
        hooks: dict[str, Any] = {}
        if not is_logical(built.model):
            hooks = {
                "from_logical": partial(physical_order, built.model),
                "logical_like": partial(logical_like, built.model),
            }
        try:
            state = load(resume, built.model, built.optimizer, **hooks)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_older(run.checkpoints, resume)}") from error
        run.step, run.totals, run.losses = state["step"], state["totals"], state["losses"]
        run.data.train.load_state_dict(state["loader"])
        if built.consumed is not None and state.get("norm") is not None:
            built.consumed.norm.fill_(state["norm"])
    run.start = run.saved_at = run.step
    run.last_step = min(training.steps, training.stop_at_step or training.steps)
    if resume is not None:
        # Now with the steps of an epoch.
        check_steps_left(resume, run.step, training)


def _older(checkpoints: CheckpointManager, checkpoint: Path) -> str:
    """How to go on from the checkpoint before a damaged one, if there is one. The same on all ranks."""
    saved = from_rank_0(lambda: [str(path.absolute()) for path in checkpoints.list()])
    path = str(checkpoint.absolute())
    before = saved[: saved.index(path)] if path in saved else []
    return f". The one before is training.resume_from_checkpoint={before[-1]}" if before else ""


def _facts(plan: Plan, built: Built) -> Facts:
    """What the cost of a layout depends on in this run."""
    layer, training = built.rides[0], plan.config.training
    speeds = plan.config.parallelism.rank_speeds
    return Facts(
        transport=built.transport.answer,
        topology=built.ep_topology,
        tokens=plan.tokens,
        micro_batches=training.gradient_accumulation_steps,
        top_k=plan.blueprint.top_k,
        hidden=plan.blueprint.row_size,
        element_size=plan.dtype.itemsize,
        codecs=built.options.codecs,
        expert_elements=layer.layout.slices
        * sum(math.prod(parameter.shape[1:]) for parameter in layer.experts.parameters()),
        hardware=plan.machine.hardware,
        speeds=tuple(speeds[rank] for rank in ranks_of(layer.group)) if isinstance(speeds, tuple) else (),
    )
