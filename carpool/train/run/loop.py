"""The steps of a run (`Run`), on every rank inside an initialised process group.

    start        plan -> data -> model (FSDP x EP) -> optimizer -> resume                run.py
    each step    batch -> loss, gradients, their norm -> all tokens had a place?         here
                 -> finite? -> update -> numbers of the step before -> was anybody asked to stop?
    now and then held-out loss and a sample; a checkpoint                                finish.py
    at the end   held-out loss, checkpoint, comparison with another transport, summary   finish.py

Whatever decides what happens next (is the loss finite, does a checkpoint exist, shall the run stop) is known to all
ranks alike. The numbers of step n are recorded while step n+1 computes, so that nothing waits for them:

    the host      launches step n+1   records step n, starts numbers of n+1   waits for the norm of n+1   launches n+2
    the device              computes step n+1 ....................................................
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from carpool.hf.decoder_layers import eagerly
from carpool.hf.ride_metrics import LaterRecord
from carpool.hf.seam.expert_rides import buffers_of_rides, capacities_of_rides
from carpool.hf.seam.moved_experts import current_layouts, weights_unchanged
from carpool.layout.layouts import Layouts
from carpool.metrics.host import peak_memory
from carpool.metrics.metric import METRICS, LaterMetrics, Metric, start_metrics
from carpool.parallel.ranks import from_rank_0
from carpool.parallel.replicated import replicated
from carpool.train.build.assemble import Built
from carpool.train.build.run_data import RunData
from carpool.train.checkpoints import requested_save
from carpool.train.checkpoints.hub import Hub
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.launch.stopping import STOP_SIGNALS, StopRequest
from carpool.train.launch.worker import Watchdog
from carpool.train.lr_schedules import learning_rate
from carpool.train.moving.runtime import Placement
from carpool.train.plan.auto_plan import MEASURED, SKIPPED
from carpool.train.plan.resolve import Plan
from carpool.train.run.best_model import Best, is_due
from carpool.train.run.finish import announce, collect, compares_models, evaluate, leave, prepare, save
from carpool.train.run.rollback import Spikes, Stragglers, roll_back
from carpool.train.run.run_records import Records, record_plan, record_recovery, say_time_left, warn_of_load
from carpool.train.steps.capacity import fewer_node_tokens, grow_if_short, random_state, restore_random_state
from carpool.train.steps.diagnose import NonFiniteError, WrongStepError, explain
from carpool.train.steps.training_objective import Batch, Losses

T = TypeVar("T")
# What a run that fails leaves a checkpoint to be completed in.
_WRITING_SECONDS = 5.0


class StepNumbers(NamedTuple):
    """Of a step that was done, while those of its rides are on their way to the host. `tokens`: that it has, of which
    it may predict fewer. `source_tokens`: of a mixture, tokens of each source so far."""

    step: int
    tokens: int
    losses: Losses
    norm: float
    rode: LaterRecord
    metrics: LaterMetrics | None
    step_ms: float
    source_tokens: dict[str, int]


@dataclass
class Run:
    """What lives as long as a run, the same on all ranks but for what belongs to a rank. `loop.py` takes its steps.

    Attributes:
        compare_with: a transport whose step times are compared at the end; None: no comparison.
        memory_before: peak bytes of this process before anything was built.
        step, start, saved_at, last_step: now, at the start, of the newest checkpoint, at the end.
        incomplete: the optimizer's state is not whole yet: no checkpoint is written, and the run does not stop.
        totals, losses: of the whole run, resumed parts included; both go into checkpoints.
        unrecorded: the step that was done last; None: its numbers are recorded.
        rode, measured: rides and plug-ins' metrics of the latest step, on their way to the host.
        best: the step with the lowest held-out loss so far.
        metrics: those of plug-ins.
        rollbacks: how often the run has gone back to the checkpoint rolled_back_to.
        spikes, stragglers: of its latest steps; no spikes unless they are looked for.
        hub: where it is uploaded to, on rank 0.
        recovery: of an elastic run that goes on in a new group, `recovery_times` and later ones, until they are said.
    """

    plan: Plan
    built: Built
    data: RunData
    tokenizer: Tokenizer
    compare_with: str | None = None
    memory_before: int = 0
    step: int = 0
    incomplete: bool = False
    start: int = 0
    saved_at: int = 0
    last_step: int = 0
    totals: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "bytes_remote": 0, "bytes_remote_alltoall": 0})
    losses: dict[str, float | None] = field(
        default_factory=lambda: dict.fromkeys(("final_loss", "first_eval_loss", "final_eval_loss"))
    )
    best: Best = field(default_factory=Best)
    stop: StopRequest = field(default_factory=StopRequest)
    unrecorded: StepNumbers | None = None
    rode: LaterRecord = field(init=False)
    measured: LaterMetrics | None = None
    recovery: dict[str, float] | None = None
    rollbacks: int = 0
    rolled_back_to: Path | None = None
    hub: Hub | None = None
    spikes: Spikes | None = field(init=False)
    stragglers: Stragglers = field(init=False)
    metrics: list[Metric] = field(default_factory=lambda: [cls() for cls in METRICS.values()])
    checkpoints: CheckpointManager = field(init=False)
    placement: Placement = field(init=False)
    records: Records = field(init=False)
    watchdog: Watchdog = field(init=False)

    def __post_init__(self) -> None:
        factor = self.config.training.spike_factor
        self.spikes = None if factor is None else Spikes(factor)
        self.stragglers = Stragglers(self.config.training.straggler_steps, self.plan.machine.topology.node_of)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def folder(self) -> Path:
        return self.config.training.folder

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

    def weights_unchanged(self) -> AbstractContextManager[None]:
        """Inside, no weight changes, and FP8 experts may cache theirs."""
        return weights_unchanged(self.built.rides if self.config.moe.fp8_cache_weights else [])

    def with_capacity(self, compute: Callable[[], T]) -> T:
        """What `compute` returns once all tokens had a place in the transport's buffers. Until then the buffers grow,
        and it is repeated from the same random state."""
        capacities, device = capacities_of_rides(self.built.rides), self.built.device
        if not capacities:
            return compute()
        before, mark = random_state(device), self.placement.mark()
        while True:
            result = compute()
            made = grow_if_short(capacities, device, self.forget_graphs)
            if made is None:
                return result
            self.built.model.zero_grad(set_to_none=True)
            restore_random_state(before, device)
            self.built.metrics.reset()
            self.placement.rewind(mark)
            self.records.write("repeat", self.step, **made._asdict())
            now = [f"{made.capacity:,} tokens a slab"] if made.capacity is not None else []
            now += [f"{made.arena_bytes / 2**20:,.0f} MiB for the backward"] if made.arena_bytes else []
            now += [f"{made.node_rows:,} tokens to each other node"] if made.node_rows is not None else []
            now += [f"{made.pairs:,} choices of a rank"] if made.pairs is not None else []
            self.records.say(f"step {self.step}: buffers were too small, and have now {', '.join(now)}; it is repeated")

    def fit_capacity(self) -> None:
        """After a step: from now on send as many tokens to each other node as steps need, if these are fewer."""
        capacities = capacities_of_rides(self.built.rides)
        if capacities and (rows := fewer_node_tokens(capacities)) is not None:
            self.forget_graphs()
            self.records.write("node_rows", self.step, rows=rows)
            self.records.say(f"step {self.step}: from now on {rows:,} tokens travel to each other node")

    def forget_graphs(self) -> None:
        if self.built.objective.graphs is not None:
            self.built.objective.graphs.forget()

    def check_rides(self) -> None:
        """Raise RankMissingError if a ride since the last call lacked a rank. Looks at host memory."""
        for buffers in buffers_of_rides(self.built.rides):
            buffers.check()

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has averaged weights, if the run averages them."""
        if self.built.average is None:
            return nullcontext()
        self.checkpoints.settle()
        return self.built.average.shown(self.built.model)

    def to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.built.device, non_blocking=True) for name, value in batch.items()}

    def close(self) -> None:
        # NCCL waits for graphs that hold its operations when a process group is destroyed.
        self.forget_graphs()
        self.checkpoints.close(_WRITING_SECONDS)
        self.data.train.close()
        self.placement.close()
        self.watchdog.stop()
        self.records.close()


def loop(run: Run) -> None:
    """Take all steps that are left."""
    training = run.config.training
    if training.eval_on_start and run.start == 0:
        evaluate(run)
    elif _was_left_before_evaluation(run):
        evaluate_and_save(run, True, False)
    run.built.metrics.reset()
    begin = time.perf_counter()
    while run.step < run.last_step:
        run.step += 1
        set_learning_rate(run)
        try:
            losses, norm, asked = update(run)
        except WrongStepError as error:
            roll_back(run, error)
            begin = time.perf_counter()
            continue
        if run.recovery is not None:
            record_recovery(run)
        run.unrecorded = step_numbers(run, losses, norm, begin)
        begin = time.perf_counter()
        announce(run)
        if run.step == run.start + 1:
            prepare(run)
        last = run.step == run.last_step
        signum = 0 if run.incomplete else asked.signum
        epoch = run.data.steps_per_epoch
        evaluates = is_due(training.eval_strategy, training.eval_steps, run.step, epoch) and not last
        asks = asked.save and not run.incomplete
        saves = (is_due(training.save_strategy, training.save_steps, run.step, epoch) and not run.incomplete) or asks
        pauses = signum or evaluates or saves or run.placement.decides(run.step)
        if pauses or last:
            record(run)
        run.placement.after_step(run.step)
        if asks:
            collect(run)
            if run.main:
                requested_save.take(run.folder)
        if signum and not last:
            # Whoever takes the machine away may not wait for an evaluation: the run that goes on begins with it.
            leave(run, signum)
        evaluate_and_save(run, evaluates, saves, last)
        if pauses:
            run.built.metrics.reset()
            begin = time.perf_counter()


def set_learning_rate(run: Run) -> None:
    """That of the step."""
    for group in run.built.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, run.config.training) * group["lr_ratio"]


def evaluate_and_save(run: Run, evaluates: bool, saves: bool, last: bool = False) -> None:
    """Between two steps. What the checkpoint says of the best step includes this one."""
    training, before = run.config.training, (run.best.step, run.best.loss)
    keeps = evaluates and evaluate(run) and training.load_best_model_at_end
    # What else is decided by the best checkpoint waits for it.
    if saves or keeps:
        if run.incomplete:  # the run whose steps are repeated has saved it
            there = from_rank_0(partial(run.checkpoints.has, run.step))
        else:
            there = save(run, wait=keeps or last) is not None
        if keeps and not there:
            # The best model that is on the disk.
            run.best.step, run.best.loss = before
            run.checkpoints.best = run.best.step
    if run.best.patience_is_over(training):
        run.records.say(
            f"step {run.step}: early stopping after {run.best.waited} evaluations without a lower held-out loss; "
            f"the best was at step {run.best.step}"
        )
        run.last_step = run.step


def _was_left_before_evaluation(run: Run) -> bool:
    """Whether a run that goes on, and compares models, has not evaluated that of its checkpoint, but should have."""
    training = run.config.training
    due = is_due(training.eval_strategy, training.eval_steps, run.start, run.data.steps_per_epoch)
    return due and 0 < run.start < run.last_step and compares_models(run) and run.best.evaluated != run.start


def record(run: Run, wait: bool = True) -> None:
    """Record the step that was done last, if it is not recorded yet. `wait`: until its numbers are there."""
    numbers, run.unrecorded = run.unrecorded, None
    if numbers is not None and (wait or numbers.rode.arrived()):
        record_step(run, numbers)


class Asked(NamedTuple):
    """What ranks were asked for, the same on all: the signal to stop, 0 if none came; and to save a checkpoint."""

    signum: int
    save: bool


def update(run: Run) -> tuple[Losses, float, Asked]:
    """The optimizer's step on the next batches: their losses, the norm of the gradient, and what was asked for. The
    same on all ranks. The step before is recorded meanwhile."""
    built = run.built
    if built.consumed is not None and built.objective.graphs is not None:
        # Weights change in a graph, which the host does not interrupt.
        run.checkpoints.settle()
    for extension in built.extensions:
        extension.before_step(run)
    batches = [run.to_device(batch) for batch in next(run.data.train)]
    if run.placement.records(run.step):
        run.forget_graphs()
    means, measured = run.with_capacity(partial(_launch, run, batches))
    run.fit_capacity()
    # Here alone the host waits for the device, and what follows depends on it.
    *found, norm = torch.cat([means, measured.to(means).view(1)]).tolist()
    losses = built.objective.losses(found, run.data.train.targets)
    *signals, saves = found[built.objective.sums :]
    # A ride that lacked a rank is known now, and what it gave is worth nothing.
    run.check_rides()
    if not (math.isfinite(losses.loss) and math.isfinite(norm)):
        _stop_not_finite(run, losses.loss, norm, batches)
    if run.spikes is not None and (why := run.spikes.add(losses.loss)) is not None:
        raise WrongStepError(
            f"step {run.step}: {why} (training.spike_factor); the run can go on from its newest checkpoint"
        )
    run.checkpoints.settle()
    with torch.profiler.record_function("carpool::optimizer"):
        if built.consumed is None:  # else updated in the backward
            built.optimizer.clipped_step(measured, _max_norm(run))
        built.optimizer.zero_grad(set_to_none=True)
        if built.average is not None:
            built.average.update(run.step)
        if built.bias is not None:
            built.bias.step()
        if (kept := replicated(built.model)) is not None:
            kept.write()
    for extension in built.extensions:
        extension.after_step(run)
    signum = max((signum for signum, ranks in zip(STOP_SIGNALS, signals, strict=True) if ranks), default=0)
    return losses, norm, Asked(signum, bool(saves))


def _launch(run: Run, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gradients`. Then the device has work, and the host does what would else keep it waiting."""
    found, device = gradients(run, batches), run.built.device
    record(run)
    # Collective; waits for the end of the step's rides if they are timed.
    run.rode = run.built.metrics.start(device, beside=(peak_memory(device) - run.memory_before,))
    if run.metrics:
        run.measured = start_metrics(run.metrics, run.built.model, device)
    return found


def gradients(run: Run, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one step, on the device: means of the losses with how many ranks were asked (`Asked`), and the norm.
    Slots are filled inside of what may be repeated: no gradient outlives a repetition, and no load is counted twice."""
    built, stages = run.built, run.plan.degrees.stage_size
    if built.bias is not None:
        built.bias.forget()
    asked = [float(run.stop.signum == signum) for signum in STOP_SIGNALS]
    asked.append(float(run.main and Path(run.config.training.output_dir, requested_save.REQUEST).exists()))
    consume = None if built.consumed is None else partial(_consume, run)
    with run.weights_unchanged():
        means = built.objective.accumulate(batches, run.data.train.targets, asked, consume)
    if (kept := replicated(built.model)) is not None:
        kept.finish()
    with torch.profiler.record_function("carpool::optimizer"):
        if built.consumed is not None:
            return means, built.consumed.finish()
        return means, built.optimizer.gradient_norm(built.parameters, _max_norm(run), stages)


def _consume(run: Run, loss: torch.Tensor) -> None:
    """Gradients that come from now on are used at once, unless tokens had no place or the loss is not finite."""
    built = run.built
    assert built.consumed is not None
    run.checkpoints.settle()
    fine = torch.isfinite(loss)
    for room in capacities_of_rides(built.rides):
        fine &= ~room.overflowed().to(fine.device)
    built.consumed.begin(fine)


def _max_norm(run: Run) -> float:
    return run.config.training.max_grad_norm or math.inf


def _stop_not_finite(run: Run, loss: float, norm: float, batches: list[Batch]) -> None:
    def forward() -> None:
        for batch in batches:
            run.built.objective.forward(batch)

    with eagerly():
        where = explain(run.built.model, forward)
    collect(run)
    latest = run.checkpoints.latest()
    made = "No update was made"
    if run.built.consumed is not None and math.isfinite(loss):
        made = "Gradients were consumed, so that parameters of this step may be wrong"
    good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
    then = "Lower training.learning_rate or training.max_grad_norm, or look at that layer's input"
    if (weights := run.config.model.weights) is not None and latest is None and where.startswith("the weights"):
        then = f"Copy or download {weights} again"
    raise NonFiniteError(f"step {run.step}: loss {loss:g}, gradient norm {norm:g}: {where}. {made}; {good}. {then}")


def step_numbers(run: Run, losses: Losses, norm: float, begin: float) -> StepNumbers:
    """The numbers of the step that was just done, which began at `begin` (`time.perf_counter`)."""
    step_ms = 1e3 * (time.perf_counter() - begin)
    tokens, seen = run.data.train.tokens, run.data.train.state_dict().get("seen", {})
    return StepNumbers(run.step, tokens, losses, norm, run.rode, run.measured, step_ms, seen)


def record_step(run: Run, numbers: StepNumbers) -> None:
    """Record them. Waits until they are there."""
    training, records, info = run.config.training, run.records, run.records.info
    step, tokens, losses, norm, later, measured, step_ms, source_tokens = numbers
    rode = later.read()
    # The others wait for the slowest rank in their rides, and work no longer than they must.
    rode.rank_ms["work"] = [step_ms - ms for ms in rode.rank_ms["rides"]]
    run.placement.count(rode)
    per_second = tokens / step_ms * 1e3
    flops, peak = info["predicted"]["flops_per_token"], info["peak_flops"]
    used = flops * per_second / run.plan.machine.ranks / peak if peak else None
    run.totals["tokens"] += losses.tokens
    for key in ("bytes_remote", "bytes_remote_alltoall", "bytes_network"):
        if key in rode.record:
            run.totals[key] = run.totals.get(key, 0) + rode.record[key]
    record = {
        **asdict(losses),
        "learning_rate": learning_rate(step, training),
        "grad_norm": norm,
        "tokens_seen": run.totals["tokens"],
        "bytes_remote_seen": run.totals["bytes_remote"],
        "bytes_remote_alltoall_seen": run.totals["bytes_remote_alltoall"],
        **({"bytes_network_seen": run.totals["bytes_network"]} if "bytes_network" in run.totals else {}),
        "step_ms": step_ms,
        "tokens_per_second": per_second,
        "mfu": used,
        "hfu": used * _computed_again(run) if used is not None else None,
        **rode.record,
        "memory_peak_bytes": int(rode.most[0]),
        **({"source_tokens": source_tokens} if source_tokens else {}),
        **({} if measured is None else {"metrics": measured.read()}),
    }
    run.losses["final_loss"] = losses.loss
    records.steps.append({"step": step, **record})
    if step % training.logging_steps == 0 or step in (run.start + 1, run.last_step):
        records.write("train", step, **record)
        records.write(
            "layers", step, load=rode.load_LE, copies=rode.copies_L, traffic_rows=rode.traffic_WW,
            rank_load=rode.rank_load_W, rank_ms=rode.rank_ms,
            **({"spare": [load._asdict() for load in rode.spare_L]} if rode.spare_L else {}),
        )  # fmt: skip
        records.display.step(step, record)
    warn_of_load(run, step, rode)
    if any(rode.rank_ms["rides"]) and (slow := run.stragglers.add(rode.rank_ms["work"])) is not None:
        records.write("straggler", step, **slow)
        records.say(
            f"warning: step {step}: rank {slow['rank']} on node {slow['node']} is slow: it has worked "
            f"{slow['ratio']:.2f} times as long as the rank in the middle, over {slow['steps']} steps, and the others "
            "wait for it"
        )
    if len(records.steps) == SKIPPED + MEASURED:
        if run.plan.searched is not None:
            record_plan(records, run.plan.searched.answer)
        say_time_left(run)


def _computed_again(run: Run) -> float:
    """What is computed, recomputation included, over what a step needs: a forward is a third of it."""
    memory = run.config.memory
    if memory.layer_activations != "recompute":
        return 1.0
    size = run.plan.blueprint.size
    rest = size.active - (size.total - size.experts)
    return 1 + (1 - rest / size.active if memory.moe_outputs != "recompute" else 1) / 3
