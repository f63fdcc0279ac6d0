"""A run on one rank, from its settings to its last line: it has a plan, what was built by it, data, and records.

    plan_on_ranks   settings, checked on all ranks -> `Plan`                     carpool/train/plan
    read_data       the plan's data; it says how many steps an epoch has         carpool/train/build/run_data.py
    build           the plan's model, objective and optimizer                    carpool/train/build/assemble.py
    start_run       all of that, then the checkpoint that is resumed, records
    train           start, all steps (`loop.py`), the end (`finish.py`)

What cannot be ends in an error before anything is written.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from carpool.hf.architecture_changes import why_not_in_transformers
from carpool.hf.seam.expert_rides import buffers_of_rides
from carpool.metrics.host import peak_memory
from carpool.parallel.ranks import from_rank_0, gather, together
from carpool.planner.machine.cost import CostModel
from carpool.train.blueprint import Blueprint
from carpool.train.build.assemble import Built, build
from carpool.train.build.policy_times import measure_on_small_model
from carpool.train.build.run_data import MakeCorpus, RunData, read_data
from carpool.train.checkpoints.checkpoint_files import CheckpointError
from carpool.train.checkpoints.hub import Hub
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.resume import check_base, check_steps_left, set_aside
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import Tokenizer, tokenizer_of
from carpool.train.launch.machine import find_machine, rank_device, ranks_of
from carpool.train.launch.regroup import FULL, RegroupError, recovery_times
from carpool.train.launch.stopping import Stopped
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
from carpool.train.run.best_model import check_metric
from carpool.train.run.finish import finish
from carpool.train.run.loop import Run, loop, record
from carpool.train.run.rollback import load_state
from carpool.train.run.run_records import open_records, record_graphs
from carpool.train.steps.diagnose import NonFiniteError, determinism
from carpool.transport import check_codecs, check_transport


def train(
    config: Config, *, compare: str | None = None, command: str = "carpool train", fixed: Collection[str] = ()
) -> None:
    """Train as `config` says, from the start or from a checkpoint.

    Args:
        compare: at the end, compare step times with this transport.
        command: what the user typed, for the record.
        fixed: settings that the user has said, by SECTION.KEY.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used; nothing has been written then.
        WrongStepError: the loss or its gradient is NaN or infinite, or the loss jumped, and training.max_rollbacks
            allows no further step; the last checkpoint is untouched.
        Stopped: a rank got SIGTERM or SIGUSR1; there is a checkpoint of the last step.
        UnwrittenError: the run came to its end, but not all of it could be written.
    """
    # transformers' own progress bars, one per rank, would write over the run's.
    disable_progress_bar()
    with determinism(config.training.full_determinism):
        run = start_run(config, compare, command, fixed)
        try:
            with run.stop:
                loop(run)
                finish(run)
        except Exception as error:
            with suppress(Exception):  # a lost device has no numbers
                record(run, wait=False)
            # Why the run ends here, for its report.
            asked = error.signal if isinstance(error, Stopped) else None
            finite = False if isinstance(error, NonFiniteError) else None
            run.records.write("stopped", run.step, why=str(error) or type(error).__name__, signal=asked, finite=finite)
            raise
        finally:
            run.close()


def start_run(
    config: Config,
    compare_with: str | None,
    command: str,
    fixed: Collection[str] = frozenset(),
    make_corpus: MakeCorpus | None = None,
) -> Run:
    """A run before its first step: as `train`, on all ranks. `make_corpus`: instead of reading what `[data]` names.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used."""
    recovery = recovery_times(config.training.folder)
    memory_before = peak_memory(rank_device())
    plan, tokenizer, resume, saved = plan_on_ranks(config, compare_with, fixed)
    plan, data = with_data(plan, tokenizer, make_corpus)
    built = build(plan, saved)
    if compare_with is not None:
        check_transport(compare_with, built.rides[0].group)
        if compare_with != "auto":
            check_codecs(compare_with, built.options.codecs)
    check_metric(plan.config.training, data.held_out)
    run = Run(plan, built, data, tokenizer, compare_with, memory_before)
    limit, seconds = plan.config.training.save_total_limit, float(plan.config.parallelism.timeout_seconds)
    run.checkpoints = CheckpointManager(run.folder, limit, seconds)
    loads = time.time()
    restored = _load_checkpoint(run, resume)
    if recovery is not None:
        run.recovery = {**recovery, "build": loads, "load": time.time()}
    run.placement = Placement(
        plan.config, built.model, built.optimizer, _facts(plan, built), run.folder,
        lambda text: run.records.say(text), lambda *args, **fields: run.records.write(*args, **fields), saved, resume,
        built.average, max(plan.config.training.gradient_accumulation_steps, built.objective.at_once),
        plan.degrees.world_size // plan.degrees.tp, run.forget_graphs,
    )  # fmt: skip
    _open_hub(run)
    run.records = open_records(run, command, None if restored else resume)
    if built.objective.graphs is not None:
        built.objective.graphs.known = partial(record_graphs, run)
    run.watchdog = Watchdog(lambda: buffers_of_rides(built.rides))
    run.watchdog.start()
    return run


def plan_on_ranks(
    config: Config, compare_with: str | None = None, fixed: Collection[str] = (), resumes: bool = True
) -> tuple[Plan, Tokenizer, Path | None, dict[str, Any]]:
    """(the plan, the tokenizer, the checkpoint to go on from, what that says beside weights). `resumes`: the run may
    go on from a checkpoint."""
    check_same_settings(config, compare_with)
    folder = config.training.folder
    if why := gather(why_not_writable(folder) if dist.get_rank() == 0 else None)[0]:
        raise ValueError(f"training.output_dir = {folder}: {why}; choose another folder")
    # Together the ranks look again when the model is there.
    check_choices(config, compare_with)
    machine = find_machine(config.parallelism, rank_device())
    resume, saved = from_rank_0(lambda: find_checkpoint(config)) if resumes else (None, {})
    tokenizer = tokenizer_of(config)
    blueprint = Blueprint.of_config(config, tokenizer)
    decisions = decisions_from(config, resume)
    plan = resolve(config, machine, blueprint, decisions, fixed, measure_on_small_model)
    if resume is not None:
        from_rank_0(lambda: check_base(resume, config, plan.degrees.world_size))
    # Advice takes a while, and the answer is the same.
    from_rank_0(lambda: check_fits(plan))
    return plan, tokenizer, resume, saved


def with_data(plan: Plan, tokenizer: Tokenizer, make_corpus: MakeCorpus | None = None) -> tuple[Plan, RunData]:
    """The data, and the plan with as many steps as they have, where epochs were asked for."""
    data = read_data(plan, tokenizer, rank_device(), make_corpus)
    check_same_data(data.corpora)
    training = plan.config.training.in_steps(data.steps_per_epoch)
    return replace(plan, config=plan.config.model_copy(update={"training": training})), data


def _load_checkpoint(run: Run, resume: Path | None) -> bool:
    """What changes from step to step: from the start, as the checkpoint has it, or as an extension has it, which is
    what is returned."""
    training = run.config.training
    states = (extension.restore(run, resume) for extension in run.built.extensions)
    state = next((one for one in states if one is not None), None)
    restored = state is not None
    if not restored and resume is not None:
        try:
            state = load_state(run, resume)
        except CheckpointError as error:
            if FULL in os.environ:
                aside = from_rank_0(partial(set_aside, resume))
                raise RegroupError(f"{error}; it is now {aside}, and the run goes on from the one before") from error
            raise CheckpointError(f"{error}{_older(run.checkpoints, resume)}") from error
    if state is not None:
        if training.load_best_model_at_end:
            # A run that goes on from another's checkpoint has none of that one's best step.
            if not from_rank_0(lambda: run.checkpoints.has(run.best.step)):
                run.best.step = run.best.loss = None
            run.checkpoints.best = run.best.step
        run.data.train.load_state_dict(state["loader"])
    run.start, run.saved_at = run.step, 0 if restored else run.step
    run.last_step = min(training.steps, training.stop_at_step or training.steps)
    if run.best.patience_is_over(training):
        run.last_step = run.step
    if resume is not None:
        # Now with the steps of an epoch.
        check_steps_left(resume, run.step, training)
    return restored


def _older(checkpoints: CheckpointManager, checkpoint: Path) -> str:
    """How to go on from the checkpoint before a damaged one, if there is one. The same on all ranks."""
    saved = from_rank_0(lambda: [str(path.absolute()) for path in checkpoints.list()])
    path = str(checkpoint.absolute())
    before = saved[: saved.index(path)] if path in saved else []
    return f". The one before is training.resume_from_checkpoint={before[-1]}" if before else ""


def _open_hub(run: Run) -> None:
    """Make sure that the run can be uploaded at its end, if it is to be. Collective."""
    if not run.config.training.push_to_hub:
        return
    if not run.built.adapted and (why := why_not_in_transformers(run.built.model.config)):
        raise ValueError(f"training.push_to_hub = true, but Transformers could not load the model: {why}")
    with together(ValueError, ""):
        if run.main:
            run.hub = Hub(run.config.training)


def _facts(plan: Plan, built: Built) -> Facts:
    """What the cost of a layout depends on in this run."""
    layer = built.rides[0]
    speeds = plan.config.parallelism.rank_speeds
    elements = layer.layout.slices * sum(math.prod(one.shape[1:]) for one in layer.experts.parameters())
    hidden = plan.blueprint.row_size
    cost = CostModel(
        hidden=hidden,
        # Of experts with three matrices: those of two have as many elements with another F.
        expert_hidden=max(1, elements // (3 * hidden)),
        element_size=plan.dtype.itemsize,
        tokens_per_rank=plan.tokens,
        hardware=plan.machine.hardware,
        transport=built.transport.answer,
        codecs=built.options.codecs,
        speeds=tuple(speeds[rank] for rank in ranks_of(layer.group)) if isinstance(speeds, tuple) else (),
    )
    return Facts(cost, built.ep_topology, plan.blueprint.top_k, plan.candidate.accumulation)
