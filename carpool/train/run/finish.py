"""What interrupts the steps of a run, and its end: held-out loss and a sample, checkpoints, the comparison with another
transport, the summary.

A checkpoint that cannot be written (a full disk, a folder that became read-only) ends no run: it is said, training goes
on, and the next one may succeed. What is still unwritten at the end makes the run fail with the list of it.

The comparison alternates a few probe steps, forward and backward on one batch, between the two transports, so that a
noisy machine is noisy for both. Nothing is updated: gradients are thrown away and the random state is put back.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from carpool.hf import transport
from carpool.hf.architecture_changes import why_not_in_transformers
from carpool.hf.decoder_layers import eagerly
from carpool.hf.documents import attention_of_any_length
from carpool.hf.generation import Sampling, generate
from carpool.hf.ride_metrics import RideMetrics
from carpool.hf.seam.expert_rides import buffers_of_rides, capacities_of_rides
from carpool.metrics.host import timed
from carpool.parallel.ranks import gather, patiently
from carpool.report import text_block
from carpool.report.read import read_run
from carpool.report.record_types import Compare, Train, summarise_steps
from carpool.train.build.run_data import loader_state
from carpool.train.checkpoints import requested_save
from carpool.train.checkpoints.adapter_files import save_adapter
from carpool.train.checkpoints.checkpoint_files import CheckpointError, CheckpointWriteError
from carpool.train.checkpoints.export import export_checkpoint
from carpool.train.checkpoints.hub import write_card
from carpool.train.checkpoints.manager import checkpoint_name
from carpool.train.checkpoints.pending_save import SavedCheckpoint
from carpool.train.checkpoints.reading import load
from carpool.train.data.loader import EvalLoader, count_targets
from carpool.train.data.tokenizer import Tokenizer, framed
from carpool.train.launch.stopping import Stopped
from carpool.train.plan.transport_choice import transport_options
from carpool.train.records.run_folder import ADAPTER, SUMMARY, replace_text
from carpool.train.run.best_model import due_times, is_due, metric
from carpool.train.run.run_records import say_time_left
from carpool.train.steps.capacity import full_capacity
from carpool.train.steps.training_objective import Losses
from carpool.transport import TransportOptions

if TYPE_CHECKING:
    from carpool.train.run.loop import Run


def compares_models(run: Run) -> bool:
    """Whether held-out losses decide something."""
    training = run.config.training
    return training.load_best_model_at_end or training.early_stopping_patience is not None


def evaluate(run: Run) -> bool:
    """Held-out loss, if text is held out, and a sample, if there is a prompt; said and recorded. Collective.
    Whether the loss is the lowest so far, where models are compared by it."""
    training, built, better, began = run.config.training, run.built, False, time.perf_counter()
    with full_capacity(capacities_of_rides(built.rides)), run.averaged():
        if any(map(len, run.data.held_out.values())):
            of_sets = {name: _held_out(run, batches) for name, batches in run.data.held_out.items() if len(batches)}
            tokens = sum(count for _, count in of_sets.values())
            loss = sum(total for total, _ in of_sets.values()) / tokens
            # Several sets have names; their mean over tokens is the run's.
            sets = {} if len(of_sets) == 1 else {name: total / count for name, (total, count) in of_sets.items()}
            run.records.write("eval", run.step, loss=loss, tokens=tokens, **({"sets": sets} if sets else {}))
            if run.losses["first_eval_loss"] is None:
                run.losses["first_eval_loss"] = loss
            run.losses["final_eval_loss"] = loss
            # Where a part of a run ends, the whole run would not have evaluated.
            due = is_due(training.eval_strategy, training.eval_steps, run.step, run.data.steps_per_epoch)
            if compares_models(run) and run.step > 0 and (due or run.step == training.steps):
                better = run.best.add(run.step, metric(training, loss, sets), training.early_stopping_threshold)
                if training.load_best_model_at_end:
                    # What is being written removes old ones, but not the best before, until this one is saved.
                    collect(run)
                    run.checkpoints.best = run.best.step
            of_each = f" ({', '.join(f'{name} {one:.4f}' for name, one in sets.items())})" if sets else ""
            run.records.say(f"step {run.step}: held-out loss {loss:.4f} over {tokens:,} tokens{of_each}")
        # The stages of a pipeline do not generate.
        if training.sample_prompt is not None and run.plan.pipeline is None:
            context = built.objective.context
            with eagerly(), built.objective.cast(built.device), nullcontext() if context is None else context.off():
                text = sample(
                    built.model, run.tokenizer, training.sample_prompt, max_new_tokens=training.sample_tokens,
                    seed=training.seed, context=run.plan.sequence_length,
                )  # fmt: skip
            run.records.write("sample", run.step, prompt=training.sample_prompt, text=text)
    run.records.took["evaluation"] = time.perf_counter() - began
    return better


def _held_out(run: Run, batches: EvalLoader) -> tuple[float, int]:
    """The sum of losses over all tokens of a held-out set, and their number."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.built.device)
    run.built.model.eval()
    with torch.no_grad(), run.weights_unchanged():
        for batch in batches:
            # Counted before it goes to the device, for which nobody waits until the end.
            sums[1] += count_targets(batch["labels"])
            ce, _ = run.with_capacity(partial(run.built.objective.forward, run.to_device(batch)))
            sums[0] += ce
    run.built.model.train()
    dist.all_reduce(sums)
    total, tokens = sums.tolist()
    run.check_rides()
    # Ranks that share sequences have each counted all of their tokens, and compute the loss of all or of some.
    tokens /= run.built.objective.ranks_per_sequence
    return total / run.built.objective.cross_entropy.copies, int(tokens)


def sample(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
    context: int | None = None,
) -> str:
    """The prompt and what the model writes after it, up to the first end-of-text token: all ranks continue it together.
    Greedy at temperature 0; leaves the global random state alone.

    Args:
        context: tokens of the prompt that the model sees at most, the last ones; None: all.

    Raises:
        ValueError: a negative temperature or no new tokens."""
    # As documents begin, and as `carpool generate` begins.
    tokens = framed(tokenizer.encode(prompt), tokenizer.frame[0], ()).tolist() or [tokenizer.eos_id]
    with attention_of_any_length(model):
        made = generate(
            model,
            [tokens if context is None else tokens[-context:]],
            Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed),
            end=[tokenizer.eos_id],
            pad=tokenizer.eos_id,
            # A vocabulary padded to a round size has places that mean nothing.
            vocabulary=tokenizer.vocab_size,
        )
    return prompt + tokenizer.decode(made.tokens[0])


class UnwrittenError(OSError):
    """A run came to its end, but some of it is not on the disk."""


def save(run: Run, wait: bool = True) -> Path | None:
    """Write a checkpoint of the step; None, on all ranks, if it could not be written, or is being written. Collective.

    Args:
        wait: until it is written, also where checkpoints are written beside training."""
    collect(run)
    state = run_state(run)
    cuda, experts = run.built.device.type == "cuda", run.config.memory.experts
    beside = not wait and run.config.training.saves_async(cuda, experts)
    try:
        saved = run.checkpoints.save(
            run.step, run.built.model, run.built.optimizer, state, average=run.built.average,
            write_files=run.placement.write_files, beside=beside,
        )  # fmt: skip
    except CheckpointWriteError as error:
        _record_missed(run, run.step, error)
        return None
    if run.built.adapted:
        _save_adapter(run)
    if saved is None:
        return None
    _record_saved(run, saved)
    return saved.path


def prepare(run: Run) -> None:
    """Before the first checkpoint that is written beside training. Collective."""
    training, built = run.config.training, run.built
    epoch = run.data.steps_per_epoch
    on_the_way = due_times(training.save_strategy, training.save_steps, run.step, run.last_step, epoch) - 1
    if on_the_way > 0 and training.saves_async(built.device.type == "cuda", run.config.memory.experts):
        try:
            run.checkpoints.prepare(built.model, built.optimizer, average=built.average)
        except CheckpointWriteError as error:  # the first save reserves it, then
            run.records.say(f"warning: {error}")


def run_state(run: Run) -> dict[str, Any]:
    """What a run needs to go on after its last step, beside weights and the optimizer's state, as JSON can hold it."""
    return {
        "totals": run.totals,
        "losses": run.losses,
        "best": asdict(run.best),
        "loader": loader_state(run.data.train),
        "placement": run.placement.state(),
        "norm": None if run.built.consumed is None else run.built.consumed.norm.item(),
    }


def collect(run: Run) -> None:
    """Wait for the checkpoint that is being written, if there is one. Collective."""
    pending = run.checkpoints.pending
    try:
        saved = run.checkpoints.collect()
    except CheckpointWriteError as error:
        assert pending is not None
        if not pending.announced:
            _record_missed(run, pending.opened.step, error)
        return
    if saved is not None and pending is not None:
        run.saved_at = saved.step
        if not pending.announced:
            _record_saved(run, saved)


def announce(run: Run) -> None:
    """Record, on rank 0, what has become of the checkpoint that is being written, as soon as that is known."""
    pending = run.checkpoints.pending
    if pending is None or pending.announced or not run.main or not pending.done:
        return
    pending.announced = True
    if pending.error:
        error = CheckpointWriteError(pending.opened.doing + pending.error)
        _record_missed(run, pending.opened.step, error)
    else:
        _record_saved(run, pending.saved())


def _record_missed(run: Run, step: int, error: CheckpointWriteError) -> None:
    run.records.missed("checkpoint", error, f"step {step}: ")
    if run.main:
        requested_save.answer(run.folder, None, str(error))


def _record_saved(run: Run, saved: SavedCheckpoint) -> None:
    run.records.unwritten.pop("checkpoint", None)
    run.saved_at = saved.step
    first = "checkpoint" not in run.records.took
    run.records.took["checkpoint"] = saved.seconds
    path = str(saved.path.relative_to(run.folder))
    beside = {} if saved.copied is None else {"copied_seconds": saved.copied, "written_seconds": saved.written}
    run.records.write("checkpoint", saved.step, path=path, bytes=saved.bytes, seconds=saved.seconds, **beside)
    took = ""
    if saved.copied is not None:
        took = (
            f" (training waited {saved.seconds:.2f} s; copied in {saved.copied:.2f} s, there in {saved.written:.1f} s)"
        )
    run.records.say(f"step {saved.step}: checkpoint {saved.path}{took}")
    if first:
        say_time_left(run)
    if run.main:
        requested_save.answer(run.folder, saved.path)
    hub = run.hub if run.config.training.hub_strategy == "checkpoint" and run.step < run.last_step else None
    if hub is not None and (text := hub.push_checkpoint(saved.path)) is not None:
        run.records.say(text)


def leave(run: Run, signum: int) -> None:
    """End the run after this step, because a rank was asked to by a signal. Collective. Raises Stopped if there is a
    checkpoint of this step, and UnwrittenError if there is none."""
    name = signal.Signals(signum).name
    run.records.say(f"step {run.step}: {name}: writing a checkpoint, then leaving")
    collect(run)
    path = save(run) if run.saved_at != run.step else run.checkpoints.latest()
    check_written(run)
    for extension in run.built.extensions:
        extension.finish(run)
    run.records.display.close()
    raise Stopped(
        f"stopped by {name} after step {run.step} of {run.config.training.steps}; continue from {path} with the "
        "same command and training.resume_from_checkpoint=last",
        name,
    )


def finish(run: Run) -> None:
    """What comes after the last step. Collective. Raises UnwrittenError if something could not be written; all that
    could be is."""
    training = run.config.training
    collect(run)
    run.placement.finish(run.step)
    before = run.best.step, run.best.loss
    if run.best.evaluated != run.step:  # else the run has stopped early, and was evaluated before
        evaluate(run)
    if run.saved_at != run.step:
        if save(run) is None and run.best.step == run.step and training.load_best_model_at_end:
            # The best model that is on the disk.
            run.best.step, run.best.loss = before
    elif run.built.adapted and run.start == run.step:
        _save_adapter(run)  # whoever took the last step may have ended between the two
    for extension in run.built.extensions:
        extension.finish(run)
    ended = run.step == training.steps or run.best.patience_is_over(training)
    if ended and training.load_best_model_at_end and run.best.step not in (None, run.step):
        _load_best(run)
    loadable = not run.built.adapted and not why_not_in_transformers(run.built.model.config)
    if training.save_pretrained and loadable and ended:
        _export(run)
    comparison = _compare(run)
    if run.built.offloaded is not None:
        run.records.say(f"experts: on a rank {run.built.offloaded.what_moved()}")
    run.records.display.close()
    summary = _summary(run, comparison)
    if run.main:
        try:
            replace_text(run.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            run.records.unwritten["summary"] = f"{run.folder / SUMMARY} was not written: {error.strerror}"
        run.records.say("")
        run.records.say(text_block(summary, run.records.info, run.records.steps))
    if training.push_to_hub:
        _push(run, ended)
    check_written(run)
    if run.built.adapted and not run.config.model.from_scratch:
        run.records.say(f"adapter for peft: {run.folder / ADAPTER}   merged: carpool merge {run.folder} --out DIR")
    run.records.say(f"\nrun directory: {run.folder}   report: carpool report {run.folder}")


def check_written(run: Run) -> None:
    """Raise UnwrittenError, on all ranks alike, if something of the run is not on the disk. Collective."""
    missing = gather([*run.records.unwritten.values(), *run.records.recorder.lost()])[0]
    if missing:
        raise UnwrittenError(f"the run came to step {run.step}, but not all of it was written: {'; '.join(missing)}")


def _save_adapter(run: Run) -> None:
    """The adapter as it is now, in peft's format."""
    # An error that left the context would leave the averages in the model.
    with run.averaged():
        try:
            save_adapter(run.built.model, run.folder / ADAPTER)
            run.records.unwritten.pop("adapter", None)
        except CheckpointWriteError as error:
            run.records.missed("adapter", error)


def _load_best(run: Run) -> None:
    """The weights of the best step, for what the run writes last."""
    folder = run.checkpoints.folder / checkpoint_name(run.best.step or 0)
    try:
        load(folder, run.built.model, average=run.built.average, restore_rng=False)
    except CheckpointError as error:
        run.records.missed("best model", error)
        return
    run.records.say(f"the best model is that of step {run.best.step}: held-out loss {run.best.loss:.4f}")
    if run.built.adapted:
        _save_adapter(run)


def _export(run: Run) -> None:
    target, step = run.folder / "model", run.step
    if run.config.training.load_best_model_at_end and run.best.step is not None:
        step = run.best.step
    try:
        if step == run.step and run.saved_at != run.step:
            raise CheckpointWriteError(f"{target} was not written: there is no checkpoint of step {run.step}")
        checkpoint = run.checkpoints.folder / checkpoint_name(step)
        run.records.say(f"model for transformers: {export_checkpoint(run.folder, checkpoint, target, replace=True)}")
    except (CheckpointError, CheckpointWriteError) as error:
        run.records.missed("model", error)


def _push(run: Run, ended: bool) -> None:
    """Upload the newest checkpoint, if these are uploaded, and at the end of the whole run (`ended`) what it has
    written: by rank 0, for which the others wait. Collective."""
    training, written = run.config.training, run.folder / (ADAPTER if run.built.adapted else "model")
    with patiently():
        if run.hub is None:
            return
        newest = run.checkpoints.latest()
        if training.hub_strategy == "checkpoint" and newest is not None:
            for said in (run.hub.wait(), run.hub.push_checkpoint(newest), run.hub.wait()):
                if said is not None:
                    run.records.say(said)
        if not ended or {"model", "adapter"} & run.records.unwritten.keys():
            return
        run.records.say(f"uploading {written} to {run.hub.address}")
        loss = run.best.loss if training.load_best_model_at_end else run.losses["final_eval_loss"]
        base = run.plan.blueprint.source if run.built.adapted else None
        try:
            write_card(
                written, run.hub.name, run.step, run.totals["tokens"], loss, base, run.records.info["lossy_reasons"]
            )
            run.hub.push(written, f"{run.step} steps of Carpool")
            run.records.say(f"uploaded: {run.hub.address}")
        except OSError as error:
            run.records.missed("upload", error)


def _compare(run: Run) -> dict[str, Any] | None:
    """Step times of this run's transport beside another's, if one was asked for."""
    if run.compare_with is None:
        return None
    layer = run.built.rides[0]
    ours = layer.transport.name if layer.transport is not None else layer.requested
    batches = [run.to_device(batch) for batch in next(run.data.train)]
    # Graphs hold this run's transport.
    run.built.objective.graphs = None
    run.records.say(f"comparing {ours} with {run.compare_with} in interleaved probe steps")
    ways = {name: transport_options(run.config, run.plan.degrees, name) for name in (ours, run.compare_with)}

    def step() -> Losses:
        return run.built.objective.backward(batches, run.data.train.targets)

    result = compare(run.built.model, ways, step, run.built.metrics, run.built.device)
    for name, values in result.items():
        run.records.write("probe", run.step, transport=name, **values)
    times = {name: values["step_ms"] for name, values in result.items()}
    return Compare.of_times(times, ours, run.compare_with).model_dump()


def _summary(run: Run, comparison: dict[str, Any] | None) -> dict[str, Any]:
    start = run.start
    if start == run.step:
        start = max((one["from_step"] for one in run.records.info["history"] if one["from_step"] < run.step), default=0)
        run.records.steps = _recorded_after(run, start)
    return {
        "steps": run.step,
        **run.totals,
        **run.losses,
        **({"best_step": run.best.step, "best_eval_loss": run.best.loss} if run.best.step is not None else {}),
        **summarise_steps([Train.model_validate(r) for r in run.records.steps], {start + 1}),
        "num_experts_per_tok": run.plan.blueprint.top_k,
        "compare": comparison,
        "exact": run.records.info["exact"],
        "lossy_reasons": run.records.info["lossy_reasons"],
        "buffer_bytes": sum(buffers.size for buffers in buffers_of_rides(run.built.rides)),
    }


def _recorded_after(run: Run, step: int) -> list[dict[str, Any]]:
    """Records of later steps, on rank 0: of a run that was cut short at its end, whose steps another process took."""
    if not run.main:
        return []
    with suppress(ValueError):
        return [one.model_dump() for one in read_run(run.folder).train if one.step > step]
    return []


REPETITIONS = 5


def compare(
    model: nn.Module, ways: Mapping[str, TransportOptions], step: Callable[[], Any], metrics: RideMetrics,
    device: torch.device,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Time `step` (a forward and backward) under two transports with their options. Collective. For each name:
    `step_ms`, milliseconds of each repetition on the slowest rank, and `bytes_remote` of one step."""
    result: dict[str, dict[str, Any]] = {name: {"step_ms": [], "bytes_remote": 0} for name in ways}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for repetition in range(-1, REPETITIONS):
            # Whoever goes first in one round goes second in the next.
            for name in ways if repetition % 2 else reversed(tuple(ways)):
                with transport(model, name, ways[name]):
                    metrics.reset()
                    took = timed(step, device)
                    model.zero_grad(set_to_none=True)
                    moved = metrics.collect(device).record["bytes_remote"]
                if repetition >= 0:  # the first round warms up
                    result[name]["step_ms"].append(took.ms)
                    result[name]["bytes_remote"] = moved
    return result
