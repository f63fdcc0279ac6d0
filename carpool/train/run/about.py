"""What a run is, said before its first step: run.json, config.toml and layout.json, and a few lines on the terminal."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.filesize import decimal

import carpool
from carpool.hf.compute.compiled import shards_inside
from carpool.hf.seam.layers import decoder_layers
from carpool.layout.layouts import Layouts
from carpool.layout.uniform import uniform_copies
from carpool.train.build.expert_kernels import describe_ways
from carpool.train.build.offloaded import FEW_KIND
from carpool.train.checkpoints.source import keep_source
from carpool.train.launch.ranks import from_rank_0, together
from carpool.train.plan.auto_plan import Planned, describe, measured_beside
from carpool.train.records.environment import environment
from carpool.train.records.files import CONFIG, DECISIONS, INFO, LAYOUT, read_info, replace_text
from carpool.train.run.state import RunState
from carpool.train.steps.graphs import describe_graphs, note_graphs
from carpool.train.steps.optimizer import describe_optimizer


def write_run(run: RunState, command: str, resume: Path | None) -> dict[str, Any]:
    """run.json and its neighbours, on rank 0; returns what run.json says."""
    layer = run.rides[0]
    config = run.model.config.get_text_config()
    layouts = run.layouts()
    assert layer.transport is not None
    name = layer.transport.name
    kept = run.config.memory.kept
    options = run.options.under(run.schedule.answer, kept.rows == "resend")
    row, top_k = run.blueprint.row_size, run.blueprint.top_k
    buffer_bytes = layer.transport.buffer_bytes(options, layer.num_ranks, row, run.element_size, top_k)
    optimizer, optimizer_lossy = describe_optimizer(run.optimizer)
    lossy = [*optimizer_lossy, *run.experts_lossy, *run.limits_lossy, *run.options.lossy_reasons]
    halves = run.schedule.answer.name == "two-batch" and run.config.training.gradient_accumulation_steps == 1
    if halves and run.objective.aux_coef:
        lossy.append("schedule two-batch: the balance loss is of each half of a micro-batch")
    if run.config.training.clip_by == "previous" and run.config.training.max_grad_norm:
        lossy.append("gradients are clipped by the norm of the step before")
    if run.config.adapter.base_dtype is not None:
        lossy.append(f"the frozen experts are kept in {run.config.adapter.base_dtype}")
    history = _earlier_starts(run.folder) if resume is not None else []
    started = datetime.now(UTC).isoformat(timespec="seconds")
    history.append(
        {"started": started, "from_step": run.start, "resumed_from": str(resume) if resume is not None else None}
    )
    info = {
        "carpool_version": carpool.__version__,
        "started": history[0]["started"],
        "command": command,
        "history": history,
        "environment": {"hostname": socket.gethostname(), **environment(run.device, run.world)},
        "model": {
            "architecture": run.blueprint.architecture,
            "attention": run.model.config.get_text_config()._attn_implementation,
            "parameters": run.blueprint.size.total,
            "active_parameters": run.blueprint.size.active,
            "num_experts": layer.num_experts,
            "num_experts_per_tok": top_k,
            "moe_layers": list(layouts),
            "hidden_size": config.hidden_size,
            "moe_intermediate_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        },
        "topology": run.machine.topology.to_dict(),
        "hardware": run.machine.hardware.to_dict(),
        "parallelism": {
            **run.degrees.record(),
            "sequence_parallel": run.divides_tokens,
            **_unequal(run),
            "cp_attention": None if run.cut is None else run.cut.way,
            "pp_schedule": None if run.pipeline is None else run.pipeline.schedule,
            "backend": dist.get_backend(),
        },
        DECISIONS: run.decisions.record(),
        "transport": {"name": name, "requested": run.config.moe.transport, "buffer_bytes": buffer_bytes},
        "experts": layer.compute.name if layer.compute is not None else "the model's own",
        "optimizer": optimizer,
        "layout": layout_record(layouts, run.layout_source),
        "bias_update_rate": run.bias.rate if run.bias is not None else 0.0,
        "exact": not lossy,
        "lossy_reasons": lossy,
        "predicted": {
            "memory_per_rank_bytes": run.estimate(name, run.dense.answer),
            "copies_per_token_uniform": run.degrees.etp
            * layer.transport.copies_per_token(layer.num_experts, top_k, run.degrees.ep),
            "flops_per_token": run.flops,
        },
        "peak_flops": run.peak,
        "peak_flops_source": run.peak_source,
        "seed": run.config.training.seed,
        "data": {
            "source": run.data.corpus.source,
            "train_tokens": len(run.data.corpus.train),
            "eval_tokens": len(run.data.corpus.eval),
            "tokenizer": run.tokenizer.name,
            **run.data.sequences.numbers(),
        },
    }
    with together(OSError, f"{run.folder} cannot be written: "):
        if run.main:
            write_files(run, info)
    return info


def write_files(run: RunState, info: dict[str, Any]) -> None:
    """What a run directory says of its run, on rank 0."""
    replace_text(run.folder / INFO, json.dumps(info, indent=1) + "\n")
    replace_text(run.folder / CONFIG, run.config.to_toml())
    replace_text(run.folder / LAYOUT, json.dumps(run.layouts().to_dict()) + "\n")
    path = None if run.config.model.from_scratch else run.config.model.path
    data = run.config.data
    end = None if data.eos_token is None else run.tokenizer.eos_id
    keep_source(run.folder, None if path is None else Path(path), run.tokenizer.name, data.chat_template, end)


def record_graphs(run: RunState, why_not: str | None) -> None:
    """Write into run.json whether steps are CUDA graphs, once that is known. `why_not`: None if they are."""
    run.no_graphs = why_not
    note_graphs(run.decisions, why_not is None, why_not)
    run.info[DECISIONS] = run.decisions.record()
    if why_not is not None:
        run.display.say(f"steps are not captured as CUDA graphs: {why_not}")
    _write_info(run)


def record_plan(run: RunState, plan: Planned) -> None:
    """Say what the first steps measured beside what was predicted, and write it into run.json."""
    measured = measured_beside(plan, run.step_records)
    if measured is None:
        return
    taken = plan.taken
    predicted = {
        "step_ms": taken.step_ms,
        "memory_bytes": taken.tensor_bytes,
        "exposed_share": taken.exposed_share,
        "kinds_ms": taken.kinds_ms,
    }
    run.info["plan"] = {"predicted": predicted, "measured": measured}
    for line in describe(plan, measured):
        run.display.say(line)
    _write_info(run)


def _write_info(run: RunState) -> None:
    if run.main:
        with suppress(OSError):  # a full disk is told when what must be written is
            replace_text(run.folder / INFO, json.dumps(run.info, indent=1) + "\n")


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
        "replicas": sum(layout.num_replicas for layout in layouts.values()),
        "source": source,
    }


def _unequal(run: RunState) -> dict[str, Any]:
    """Speeds of ranks and their shares of a micro-batch, if they differ."""
    speeds = run.config.parallelism.rank_speeds
    if not isinstance(speeds, tuple):
        return {}
    return {"rank_speeds": list(speeds), "sequences_per_micro_batch": list(run.batch_sizes)}


def say_hello(run: RunState, resume: Path | None) -> None:
    """The first lines on the terminal."""
    info, say, blueprint = run.info, run.display.say, run.blueprint
    say(
        f"{blueprint.architecture}: {blueprint.size.total:,} parameters, {blueprint.size.active:,} active per token, "
        f"{info['model']['num_experts']} experts, top-{blueprint.top_k}"
    )
    if run.config.model.path is not None and run.config.model.from_scratch:
        say(f"from scratch: {run.config.model.path} has a config.json and no weights")
    if (narrow := run.config.model.travel_size) is not None:
        say(f"ANOTHER MODEL: rows are projected to {narrow} elements before they travel (model.travel_size)")
    if (every := run.config.moe.move_sequences) is not None:
        often = "each layer with experts" if every == 1 else f"every {every} layers with experts"
        say(f"sequences may move to other ranks before {often} but the first")
    if run.plan is not None:
        say(f"plan: {run.plan.why}")
    say(f"{run.world} ranks ({info['parallelism']['backend']}): {run.degrees}")
    if (speeds := run.config.parallelism.rank_speeds) is not None:
        say(f"speeds of ranks: {speeds}; sequences in a micro-batch: {', '.join(map(str, run.batch_sizes))}")
    if run.degrees.tp > 1:
        say(f"sequence parallelism: {'on' if run.divides_tokens else 'off'}: {run.why_divided}")
    if run.cut is not None:
        say(f"context: {run.cut}")
    if run.degrees.dp_cp > 1:
        say(f"dense parameters: {run.dense.answer}: {run.dense.why}")
    say(blueprint.describe_balance_loss(run.config.moe.router_aux_loss_coef))
    if run.adapted:
        adapter = run.config.adapter
        say(
            f"adapter: {adapter.kind} of rank {adapter.rank} on {', '.join(adapter.targets)}"
            f"{f', from {adapter.path}' if adapter.path else ''}: trains {run.adapted:,} "
            f"parameters, {run.adapted / blueprint.size.total:.2%} of the model's"
        )
    sequences, held_out = run.data.sequences.describe(), len(run.data.corpus.eval)
    say(f"data: {info['data']['source']}, {sequences}; {held_out:,} tokens held out")
    if (long := blueprint.why_long(run.config.data.sequence_length)) is not None:
        say(long)
    if isinstance(blueprint.source, Path):
        size = sum(path.stat().st_size for path in blueprint.source.glob("*.safetensors"))
        rate = decimal(int(size / run.load_seconds))
        say(f"weights: {decimal(size)} loaded in {run.load_seconds:.1f} s by all ranks together, {rate}/s")
    copies = info["predicted"]["copies_per_token_uniform"]
    say(f"transport {info['transport']['name']}: {run.transport_choice.why}")
    sizes = info["model"]["num_experts"], blueprint.top_k, run.degrees.ep
    visits, plan = run.degrees.etp * uniform_copies(*sizes), "if its experts are chosen uniformly and stay in order"
    say(f"a token visits {visits:.2f} of {run.degrees.expert_ranks} ranks, {plan}")
    if copies > visits + 0.005:
        say(f"transport {info['transport']['name']} makes {copies:.2f} copies of it, and not one for each of these")
    if size := info["transport"]["buffer_bytes"]:
        tokens = run.options.under(run.schedule.answer, run.config.memory.kept.rows == "resend").max_tokens
        say(f"buffers: {size / 1e6:,.1f} MB on each rank for a ride of {tokens:,} tokens")
    compiles_again = run.config.training.torch_compile and run.config.memory.dense == "recompute"
    if compiles_again and any(shards_inside(layer) for layer in decoder_layers(run.model)):
        say("layers are computed again eagerly, and not compiled: FSDP shards their experts by themselves")
    if run.config.memory.budget is not None:
        policies = ", ".join(f"{item} {policy}" for item, policy in run.kept.answer.items())
        say(f"memory: {policies}: {run.kept.why}")
    if run.stages is not None:
        ways = describe_ways(run.stages.answer)
        say(f"experts {info['experts']}, stages {ways}: {run.stages.why}")
    elif run.config.moe.expert_stages != "default":
        say("experts: these are the model's own, which have no stages; moe.expert_stages means nothing here")
    if run.schedule.answer.name != "none" or run.schedule.times:
        say(f"schedule {run.schedule.answer}: {run.schedule.why}")
    if run.device.type == "cuda":
        say(describe_graphs(run.no_graphs))
    if why := run.objective.cross_entropy.why_whole:
        say(f"loss: logits of a whole micro-batch at once, because {why}")
    if (optimizer := info["optimizer"])["name"] != "torch":
        masters = "float32 masters of bfloat16 parameters, " if optimizer["masters"] else ""
        where = {"device": "", "host": ", in host memory", "disk": ", on disk"}[optimizer["state"]]
        when = "; gradients are consumed in the backward" if run.consumed is not None else ""
        say(f"optimizer {optimizer['name']}: {masters}moments in {optimizer['moments']}{where}{when}")
    if run.away is not None:
        where = "in host memory" if run.config.memory.experts == "host" else "on disk"
        how = "layer by layer"
        if run.config.memory.expert_loading == "popular":
            how = "when they are chosen; popular ones ahead"
        say(f"experts are {where}, and come to the device {how}")
        if (few := run.decisions.record().get(FEW_KIND.key)) is not None:
            say(f"the CPU computes experts with up to {few['tokens']} tokens: {few['why']}")
    if run.layout_source != "contiguous":
        say(f"layout: {info['layout']['kind']}, {info['layout']['replicas']} replicas, from {run.layout_source}")
    if run.placement.on:
        section = run.config.placement
        what = section.solver if section.policy == "migrate" else "the predicted load"
        say(f"placement: {section.policy} by {what}, every {section.every} steps, {section.replicas} replicas a rank")
    if info["lossy_reasons"]:
        say(f"LOSSY: {'; '.join(info['lossy_reasons'])}")
    else:
        say("EXACT: nothing in this run changes the model's function")
    if resume is not None:
        say(f"resumed from {resume}, step {run.start}")
