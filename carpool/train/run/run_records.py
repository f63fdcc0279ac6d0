"""What a run says of itself: run.json, config.toml and layout.json, and lines on the terminal."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.filesize import decimal

import carpool
from carpool.hf.decoder_layers import shards_inside
from carpool.hf.seam.find_modules import decoder_layers
from carpool.layout.layouts import Layouts
from carpool.metrics.host import environment
from carpool.parallel.ranks import from_rank_0, together
from carpool.planner.candidate import COMPILED_AGAIN, NOT_COMPILED_AGAIN
from carpool.train.blueprint import peak_flops
from carpool.train.build.measured_choices import describe_kernels
from carpool.train.checkpoints import requested_save
from carpool.train.checkpoints.checkpoint_files import AVERAGE
from carpool.train.checkpoints.run_source import keep_source
from carpool.train.config.fine_tuning import other_base, sample_weights
from carpool.train.plan.auto_plan import MEASURED, SKIPPED, Planned, describe, measured_beside
from carpool.train.plan.compile_and_capture import describe_graphs, note_graphs
from carpool.train.plan.time_and_cost import describe_left, describe_time
from carpool.train.records.display import Display
from carpool.train.records.metrics_writer import Recorder
from carpool.train.records.run_folder import CONFIG, DECISIONS, INFO, LAYOUT, read_info, replace_text
from carpool.train.run.best_model import due_times
from carpool.transport import TransportOptions
from carpool.transport.volume import uniform_ranks_per_token

if TYPE_CHECKING:
    from carpool.hf.ride_metrics import RideRecord
    from carpool.train.run.loop import Run

# Of the latest steps, from which the time that is left is told.
MOST_TIMED = 50


@dataclass
class Records:
    """Where a run writes and what it says.

    Attributes:
        steps: the record of each step of this process.
        unwritten: what could not be written so far and may be yet, by name.
        took: seconds of the latest evaluation and of the latest checkpoint.
        beyond_limit: it was said that ranks had more than moe.balance_limit.
    """

    folder: Path
    main: bool
    recorder: Recorder
    display: Display
    info: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    unwritten: dict[str, str] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    beyond_limit: bool = False

    def say(self, text: str) -> None:
        self.display.say(text)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        self.recorder.write(kind, step, **fields)

    def missed(self, name: str, error: Exception, when: str = "") -> None:
        """Note, and say, that something could not be written."""
        self.unwritten[name] = str(error)
        self.say(f"warning: {when}{error}")

    def write_info(self) -> None:
        """Write run.json again, on rank 0."""
        if self.main:
            with suppress(OSError):  # a full disk is told when what must be written is
                replace_text(self.folder / INFO, json.dumps(self.info, indent=1) + "\n")

    def close(self) -> None:
        self.recorder.close()
        self.display.close()


def open_records(run: Run, command: str, resume: Path | None) -> Records:
    """From here on, files are written."""
    training = run.config.training
    if run.main:
        run.folder.mkdir(parents=True, exist_ok=True)
        requested_save.forget(run.folder)
    dist.barrier()
    display = Display(run.main, run.last_step, run.step)
    with together(ValueError, ""):
        recorder = Recorder(
            run.folder, run.main, training.report_to, run.config.model_dump(mode="json"), training.steps,
            say=display.say, restore=lambda: write_files(run, records.info),
        )  # fmt: skip
    records = Records(run.folder, run.main, recorder, display)
    records.info = run_info(run, command, resume)
    with together(OSError, f"{run.folder} cannot be written: "):
        if run.main:
            write_files(run, records.info)
    records.write("layout", run.step, **run.layouts().to_dict())
    for line in hello(run, records.info, resume):
        records.say(line)
    return records


def run_info(run: Run, command: str, resume: Path | None) -> dict[str, Any]:
    """What run.json says. All ranks together."""
    plan, built, config = run.plan, run.built, run.config
    layer, blueprint, degrees, text = built.rides[0], plan.blueprint, plan.degrees, built.model.config.get_text_config()
    layouts, weights = run.layouts(), config.model.weights
    assert layer.transport is not None
    lossy = lossy_reasons(run)
    history = _earlier_starts(run.folder) if resume is not None or run.start else []
    started = datetime.now(UTC).isoformat(timespec="seconds")
    resumed_from = str(resume) if resume is not None else None
    history.append({"started": started, "from_step": run.start, "resumed_from": resumed_from})
    history[-1]["sequences_per_step"] = round(run.data.sequences.per_epoch / run.data.steps_per_epoch)
    peak, peak_source = peak_flops(built.device, config.training.peak_flops)
    unequal = {}
    if isinstance(speeds := config.parallelism.rank_speeds, tuple):
        unequal = {"rank_speeds": list(speeds), "sequences_per_micro_batch": list(plan.batch_sizes)}
    return {
        "carpool_version": carpool.__version__,
        "started": history[0]["started"],
        "command": command,
        "history": history,
        "environment": {"hostname": socket.gethostname(), **environment(built.device, plan.machine.ranks)},
        "model": {
            "architecture": blueprint.architecture,
            "attention": text._attn_implementation,
            "parameters": blueprint.size.total,
            "active_parameters": blueprint.size.active,
            "num_experts": layer.num_experts,
            "num_experts_per_tok": blueprint.top_k,
            "moe_layers": list(layouts),
            "hidden_size": text.hidden_size,
            "moe_intermediate_size": getattr(text, "moe_intermediate_size", None) or text.intermediate_size,
        },
        "base": sample_weights(weights) if weights and run.main and config.adapter.is_used else None,
        "topology": plan.machine.topology.to_dict(),
        "hardware": plan.machine.hardware.to_dict(),
        "parallelism": {
            **degrees.record(),
            "sequence_parallel": plan.sequence_parallel.answer,
            **unequal,
            "cp_attention": None if plan.cut is None else plan.cut.way,
            "pp_schedule": None if plan.pipeline is None else plan.pipeline.schedule,
            "backend": dist.get_backend(),
        },
        DECISIONS: plan.decisions.record(),
        "transport": {
            "name": layer.transport.name,
            "requested": config.moe.transport,
            "buffer_bytes": layer.transport.buffer_bytes(
                _options(run), layer.num_ranks, blueprint.row_size, plan.dtype.itemsize, blueprint.top_k
            ),
        },
        "metrics": {one.name: {"help": one.help, "unit": one.unit} for one in run.metrics},
        "experts": layer.compute.name if layer.compute is not None else "the model's own",
        "optimizer": built.optimizer.describe()[0],
        "layout": layout_record(layouts, built.layout_source),
        "bias_update_rate": built.bias.rate if built.bias is not None else 0.0,
        "exact": not lossy,
        "lossy_reasons": lossy,
        "predicted": {
            "memory_per_rank_bytes": plan.estimate(layer.transport.name, plan.data_parallel.answer),
            "copies_per_token_uniform": degrees.etp
            * layer.transport.ranks_per_token(layer.num_experts, blueprint.top_k, degrees.ep),
            "flops_per_token": plan.flops_per_token,
        },
        "peak_flops": peak,
        "peak_flops_source": peak_source,
        "seed": config.training.seed,
        "data": {
            "source": run.data.corpora.source,
            "train_tokens": sum(len(corpus.train) for corpus in run.data.corpora.sources),
            "eval_tokens": run.data.corpora.held_tokens,
            "tokenizer": run.tokenizer.name,
            **run.data.sequences.numbers(),
        },
    }


def lossy_reasons(run: Run) -> list[str]:
    """What in a run changes the model's function or its update."""
    built, training = run.built, run.config.training
    lossy = [*built.optimizer.describe()[1], *built.lossy, *built.options.lossy_reasons]
    halves = built.schedule.answer.name == "two-batch" and run.plan.candidate.accumulation == 1
    if halves and built.objective.aux_coef:
        lossy.append("schedule two-batch: the balance loss is of each half of a micro-batch")
    if training.grad_clipping == "delayed" and training.max_grad_norm:
        lossy.append("gradients are clipped by the norm of the step before")
    return lossy


def _options(run: Run) -> TransportOptions:
    """Of the transport, under the schedule that the run has."""
    return run.built.options.under(
        run.built.schedule.answer, run.config.memory.activation_policies.expert_inputs == "resend"
    )


def write_files(run: Run, info: dict[str, Any]) -> None:
    """What a run directory says of its run, on rank 0."""
    replace_text(run.folder / INFO, json.dumps(info, indent=1) + "\n")
    replace_text(run.folder / CONFIG, run.plan.written.to_toml())
    replace_text(run.folder / LAYOUT, json.dumps(run.layouts().to_dict()) + "\n")
    data = run.config.data
    end = None if data.eos_token is None else run.tokenizer.eos_id
    keep_source(run.folder, run.config.model.weights, run.tokenizer.name, data.chat_template, end)


def record_graphs(run: Run, why_not: str | None) -> None:
    """Write into run.json whether steps are CUDA graphs, once that is known. `why_not`: None if they are."""
    run.built.no_graphs = why_not
    note_graphs(run.plan.decisions, why_not is None, why_not)
    run.records.info[DECISIONS] = run.plan.decisions.record()
    if why_not is not None:
        run.records.say(f"steps are not captured as CUDA graphs: {why_not}")
    run.records.write_info()


def record_recovery(run: Run) -> None:
    """Say what it took an elastic run to go on in a new group, after its first step."""
    times, run.recovery = {**(run.recovery or {}), "first_step": time.time()}, None
    seconds = {key: times[key] - before for (key, before) in zip([*times][1:], times.values(), strict=False)}
    run.records.write("recovery", run.step, ranks=run.plan.machine.ranks, from_step=run.start, **seconds)
    text = ", ".join(f"{key.replace('_', ' ')} {one:.1f} s" for key, one in seconds.items())
    text += f" ({seconds['regroup'] + seconds['first_step']:.1f} s beyond imports and loading)"
    run.records.say(f"recovered on {run.plan.machine.ranks} ranks, from step {run.start}: {text}")


def say_time_left(run: Run) -> None:
    """How long the run goes on, and what that costs, by what it has taken so far."""
    training, epoch, timed = run.config.training, run.data.steps_per_epoch, run.records.steps[SKIPPED:]
    if not run.main or run.step >= run.last_step or len(timed) < MEASURED:
        return
    dues = {
        "evaluation": (training.eval_strategy, training.eval_steps),
        "checkpoint": (training.save_strategy, training.save_steps),
    }
    pauses = {
        name: (due_times(strategy, every, run.step, run.last_step, epoch), run.records.took.get(name))
        for name, (strategy, every) in dues.items()
    }
    step_ms = median(one["step_ms"] for one in timed[-MOST_TIMED:])
    left, price = run.last_step - run.step, run.config.parallelism.price_per_device_hour
    run.records.say(describe_left(left, step_ms / 1e3, pauses, run.plan.machine.ranks, price))


def warn_of_load(run: Run, step: int, rode: RideRecord) -> None:
    """Say once in a process that spare slots do not keep ranks to the limit."""
    beyond, rides = (sum(getattr(load, name) for load in rode.spare_L) for name in ("beyond", "rides"))
    if not beyond or run.records.beyond_limit:
        return
    run.records.beyond_limit = True
    moe, name, load = run.config.moe, *max(zip(run.layouts(), rode.spare_L, strict=True), key=lambda one: one[1].after)
    run.records.say(
        f"warning: step {step}: moe.spare_slots={moe.spare_slots} do not keep every rank to moe.balance_limit="
        f"{moe.balance_limit:g} times the mean: {beyond} of {rides} rides are beyond it. In {name} the largest load "
        f"is {load.after:.2f} times the mean ({load.before:.2f} without spare slots). Nothing is dropped; a "
        "rank with more takes more memory and time, and more spare slots help"
    )


def record_plan(records: Records, plan: Planned) -> None:
    """Say what the first steps measured beside what was predicted, and write it into run.json."""
    measured = measured_beside(plan, records.steps)
    if measured is None:
        return
    taken = plan.taken
    predicted = {
        "step_ms": taken.step_ms,
        "memory_bytes": taken.tensor_bytes,
        "exposed_share": taken.exposed_share,
        "kinds_ms": taken.kinds_ms,
    }
    records.info["plan"] = {"predicted": predicted, "measured": measured}
    for line in describe(plan, measured):
        records.say(line)
    records.write_info()


def _earlier_starts(folder: Path) -> list[dict[str, Any]]:
    """`history` of the run.json that a resumed run replaces. Rank 0 reads and tells the others, because it also writes
    that file, and may do so before they look."""

    def read() -> list[dict[str, Any]]:
        found = (read_info(folder) or {}).get("history", [])
        if not isinstance(found, list) or not all(isinstance(one, dict) and "started" in one for one in found):
            raise ValueError(f"{folder / INFO} is damaged (its history is no list of starts); delete it to go on")
        return found

    return from_rank_0(read)


def layout_record(layouts: Layouts, source: str) -> dict[str, Any]:
    """Where experts live at the start, as in run.json. `source`: what says so."""
    kinds = sorted({layout.kind for layout in layouts.values()})
    first = next(iter(layouts.values()))
    return {
        "kind": kinds[0] if len(kinds) == 1 else "mixed",
        "per_layer": len(set(layouts.values())) > 1,
        "experts_per_rank": [len(rank) for rank in first.homes],
        "source": source,
    }


def hello(run: Run, info: dict[str, Any], resume: Path | None) -> list[str]:
    """The first lines on the terminal."""
    plan, built, config = run.plan, run.built, run.config
    blueprint, degrees, adapter = plan.blueprint, plan.degrees, config.adapter
    transport, placement = info["transport"], config.placement
    lines = plan.describe()
    say = lines.append
    if (folder := config.model.bare_folder) is not None:
        say(f"from scratch: {folder} has a config.json and no weights")
    if built.adapted:
        say(
            f"adapter: {adapter.kind} of rank {adapter.rank} on {', '.join(adapter.targets)}"
            f"{f', from {adapter.path}' if adapter.path else ''}: trains {built.adapted:,} "
            f"parameters, {built.adapted / blueprint.size.total:.2%} of the model's"
        )
        if adapter.path and (other := other_base(adapter.path, config.model.path, adapter.base["base_dtype"])):
            say(f"OTHER MODEL: {other}")
        if config.model.from_scratch:
            say("RANDOM WEIGHTS under the adapter (model.config, not model.path): good to measure speed and memory")
    sequences, held_out = run.data.sequences.describe(), run.data.corpora.held_tokens
    say(f"data: {info['data']['source']}, {sequences}; {held_out:,} tokens held out")
    if isinstance(blueprint.source, Path):
        size = sum(path.stat().st_size for path in blueprint.source.glob("*.safetensors"))
        rate = decimal(int(size / built.load_seconds))
        say(f"weights: {decimal(size)} loaded in {built.load_seconds:.1f} s by all ranks together, {rate}/s")
    say(f"transport {transport['name']}: {built.transport.why}")
    visits = degrees.etp * uniform_ranks_per_token(info["model"]["num_experts"], blueprint.top_k, degrees.ep)
    expected = "if its experts are chosen uniformly and stay in order"
    say(f"a token visits {visits:.2f} of {degrees.expert_ranks} ranks, {expected}")
    if (copies := info["predicted"]["copies_per_token_uniform"]) > visits + 0.005:
        say(f"transport {transport['name']} sends it {copies:.2f} times, and not once to each of these")
    if size := transport["buffer_bytes"]:
        say(f"buffers: {size / 1e6:,.1f} MB on each rank for a ride of {_options(run).max_tokens:,} tokens")
    compiles_again = plan.candidate.compiled and config.memory.layer_activations == "recompute"
    if compiles_again and not COMPILED_AGAIN and any(map(shards_inside, decoder_layers(built.model))):
        say(f"decoder layers: not compiled: {NOT_COMPILED_AGAIN}")
    if config.memory.budget is not None:
        policies = ", ".join(f"{item} {policy}" for item, policy in plan.policies.answer.items())
        say(f"memory: {policies}: {plan.policies.why}")
    if built.kernels is not None:
        say(f"experts {info['experts']}, kernels {describe_kernels(built.kernels.answer)}: {built.kernels.why}")
    elif config.moe.expert_kernels != "default":
        say("experts: the model computes its own; moe.expert_kernels has no effect here")
    if built.schedule.answer.name != "none" or built.schedule.times:
        say(f"schedule {built.schedule.answer}: {built.schedule.why}")
    if built.device.type == "cuda":
        say(describe_graphs(built.no_graphs))
    if why := built.objective.cross_entropy.why_whole:
        say(f"loss: logits of a whole micro-batch at once, because {why}")
    if (whose := config.distillation.teacher or config.distillation.logits) is not None:
        say(f"distillation: {config.distillation.weight:g} of the loss is the divergence from {whose}")
    if (optimizer := info["optimizer"])["name"] != "torch":
        masters = "float32 masters of bfloat16 parameters, " if optimizer["masters"] else ""
        where = {"device": "", "host": ", in host memory", "disk": ", on disk"}[optimizer["state"]]
        when = "; parameters are updated in the backward" if built.consumed is not None else ""
        say(f"optimizer {optimizer['name']}: {masters}moments in {optimizer['moments']}{where}{when}")
    there = resume is not None and (resume / AVERAGE).is_dir()
    if (decay := config.training.ema_decay) is not None:
        begins = "" if there or resume is None else ", which begin with those of the checkpoint"
        say(f"evaluations, samples and exports are of averaged weights (EMA, decay {decay:g}){begins}")
    elif there:
        say("warning: the checkpoint has averaged weights, which are left aside without training.ema_decay")
    if built.offloaded is not None:
        where = "in host memory" if config.memory.experts == "host" else "on disk"
        how = "layer by layer"
        if config.memory.expert_loading == "popular":
            how = "when they are chosen, popular ones ahead"
        say(f"experts are {where}, and are loaded to the device {how}")
    lines.extend(line for extension in built.extensions if (line := extension.describe()))
    if built.layout_source != "contiguous":
        say(f"layout: {info['layout']['kind']}, from {built.layout_source}")
    if run.placement.on:
        what = placement.solver if placement.policy == "migrate" else "the predicted load"
        say(f"placement: {placement.policy} by {what}, every {placement.every} steps")
    if info["lossy_reasons"]:
        say(f"LOSSY: {'; '.join(info['lossy_reasons'])}")
    else:
        say("EXACT: nothing in this run changes the model's function")
    if run.main:
        lines += describe_time(plan, run.start)
    if resume is not None:
        say(f"resumed from {resume}, step {run.start}")
        *_, before, now = (one.get("sequences_per_step") for one in [{}, *info["history"]])
        if before not in (None, now):
            say(f"warning: a step takes {now} sequences, and took {before}: gradient_accumulation_steps can keep that")
    return lines
