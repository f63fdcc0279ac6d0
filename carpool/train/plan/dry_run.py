"""`carpool train --dry-run`: what a run will be and what it will need, as text that is a configuration file, too.

On this machine, or for the GPUs of another one, of which nothing need be here:

    carpool train --config sft.toml parallelism.num_ranks=64 --dry-run --gpu h100
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from carpool.planner.decisions.configured import candidate_of
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.prediction import predict
from carpool.planner.step.streaming import break_even_tokens
from carpool.train.blueprint import planned_attention
from carpool.train.config.schema import Config, keys
from carpool.train.flops import flops_per_token
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.estimate import state_bytes
from carpool.train.plan.memory_fit import describe_fit
from carpool.train.plan.resolve import Prepared
from carpool.train.plan.start_checks import check_choices, find_checkpoint, foresee
from carpool.train.steps.graphs import describe_graphs

NOT_COUNTED = {
    True: "evaluation with larger batches than training",
    False: "libraries loaded before the run (measured: 270 MiB a rank, and 150 MiB that the ranks of a machine share), "
    "the corpus in memory, evaluation with larger batches than training",
}
Sources = Mapping[tuple[str, str], str]


def dry_run(config: Config, sources: Sources | None = None, gpu: str | None = None) -> str:
    """The text of `dry_run_with_fit`."""
    return dry_run_with_fit(config, sources, gpu)[0]


def dry_run_with_fit(config: Config, sources: Sources | None = None, gpu: str | None = None) -> tuple[str, str | None]:
    """The resolved configuration and what it will need, as text; and why the run does not fit into memory, None if it
    does. Reads no weights, and of the data the first row alone, or all of it where that is little; starts no ranks.

    Args:
        sources: as `carpool.train.config.load.Resolved` has them.
        gpu: the name of a GPU for which the run is meant; None: it is meant for this machine.

    Raises:
        ValueError: whatever would stop the run before its first step, as far as this machine can tell.
    """
    sources, machine = sources or {}, imagine_machine(config, gpu)
    checkpoint = None
    fixed = [f"{section}.{key}" for section, _, key in keys() if (section, key) not in sources]
    try:
        if machine.here:
            check_choices(config, None)
            if config.training.resume_from_checkpoint is not None:
                checkpoint, _ = find_checkpoint(config)
        run = foresee(config, fixed, machine, checkpoint)
    except ValueError as error:
        if machine.cuda or config.parallelism.device == "cpu" or _on_gpus(config, fixed) == str(error):
            raise
        raise ValueError(
            f"{error} (if the run is meant for GPUs of another machine: --gpu h100, or what they are)"
        ) from None
    needed, verdict = _needed(run)
    lines = [*_decided(run), *_time(run), *needed, *verdict]
    text = run.config.to_toml(sources={**sources, **_planned(run)}) + "\n" + "\n".join(f"# {line}" for line in lines)
    fits = run.estimate(run.likely_transport, run.dense.answer)["total"] <= run.rank_memory
    return text, None if fits or not run.config.training.check_memory else verdict[0].partition(". ")[0]


def _on_gpus(config: Config, fixed: list[str]) -> str | None:
    """What would be refused if the run were meant for GPUs."""
    try:
        foresee(config, fixed, imagine_machine(config, "h100"), None)
    except ValueError as error:
        return str(error)
    return None


def _planned(run: Prepared) -> Sources:
    """What the plan has set."""
    settings = {} if run.plan is None else run.plan.answer.taken.settings
    return {(section, key): "the plan" for section, _, key in (one.partition(".") for one in settings)}


def _decided(run: Prepared) -> list[str]:
    """Lines about what the run will be."""
    config, degrees, blueprint, machine = run.config, run.degrees, run.blueprint, run.machine
    training, size, lines = config.training, blueprint.size, []
    lines.append(f"{blueprint.architecture}: {size.total:,} parameters, {size.active:,} active per token")
    if run.plan is not None:
        lines.append(f"plan: {run.plan.why}")
        lines += [f"  then {one.step_ms[1]:,.1f} ms: {one.label}" for one in run.plan.answer.others]
    lines.append(f"{machine.ranks} ranks{'' if machine.here else f' on {machine.hardware.name}'}: {degrees}")
    if degrees.tp > 1:
        lines.append(f"sequence parallelism: {'on' if run.divides_tokens else 'off'}: {run.why_divided}")
    if run.cut is not None:
        lines.append(f"context: {run.cut}")
    if config.parallelism.rank_speeds == "measured":
        lines.append("speeds of ranks: measured when the run starts; here they are equal")
    elif config.parallelism.rank_speeds is not None:
        sizes = ", ".join(map(str, run.batch_sizes))
        lines.append(f"sequences in a micro-batch of each data-parallel rank, by speed: {sizes}")
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    tokens = sequences * degrees.dp * config.data.sequence_length
    flops = flops_per_token(size, config.data.sequence_length)
    candidate = run.estimate.candidate(run.likely_transport, run.dense.answer)
    long = blueprint.why_long(config.data.sequence_length)
    return [
        *lines,
        f"{tokens:,} tokens per step, {flops:,} operations per token",
        f"{sequences * degrees.dp:,} sequences per step: {degrees.dp} data-parallel ranks x "
        f"{training.gradient_accumulation_steps} micro-batches x {training.per_device_train_batch_size}",
        *([] if long is None else [long]),
        blueprint.describe_balance_loss(config.moe.router_aux_loss_coef),
        f"dense parameters: {run.dense.answer}: {run.dense.why}",
        f"transport {run.likely_transport}: {run.why_likely}",
        f"memory: {', '.join(f'{item} {policy}' for item, policy in run.kept.answer.items())}: {run.kept.why}",
        *([describe_graphs(candidate.why_eager)] if machine.cuda else []),
    ]


def _time(run: Prepared) -> list[str]:
    """A line about how long a step takes, by the planner's model of costs. None on CPUs, and where not the whole model
    is trained, of which that knows nothing."""
    config, machine, dense = run.config, run.machine, run.dense.answer
    if not machine.cuda or config.adapter.kind is not None or config.training.freeze is not None:
        return []
    settings = config.model_dump()
    settings["moe"]["transport"], settings["parallelism"]["dense"] = run.likely_transport, dense
    settings["memory"] |= run.kept.answer
    per_node = machine.topology.ranks_beside(0)
    try:
        model = run.blueprint.model
        attention = planned_attention(config, run.degrees, model, machine.cuda)
        shape = ModelShape.read(model.config.to_dict(), attention)
        candidate, _ = candidate_of(settings, run.degrees, shape, machine.hardware, per_node)
        found = predict(shape, machine.hardware, candidate, per_node)
    except ValueError as error:
        return [f"time of a step: not predicted: {error}"]
    low, middle, high = (1e3 * one for one in found.seconds)
    mfu = "" if found.mfu is None else f", MFU {found.mfu.middle:.0%}"
    return [
        f"time of a step: {middle:,.0f} ms ({low:,.0f} to {high:,.0f}), {found.tokens_per_second():,.0f} tokens/s per "
        f"GPU{mfu} (modelled, with balanced routing)"
    ]


def _needed(run: Prepared) -> tuple[list[str], list[str]]:
    """Lines about memory, and the verdict."""
    transport, dense, room, cuda = run.likely_transport, run.dense.answer, run.rank_memory, run.machine.cuda
    lines = [
        f"predicted memory of one rank, which computes {max(run.batch_sizes)} sequences at a time:",
        *(f"  {name:<12} {_mib(value):>12}" for name, value in run.estimate(transport, dense).items()),
        *(f"  {line}" for line in textwrap.wrap(f"not counted: {NOT_COUNTED[cuda]}", 100)),
    ]
    if host := run.estimate.host_bytes(transport):
        lines.append(f"host memory of one rank: {_mib(host)}")
    if cuda and (state := run.estimate.trained * state_bytes(run.config)):
        flops = flops_per_token(run.blueprint.size, run.config.data.sequence_length)
        tokens = break_even_tokens(state, flops, run.machine.hardware, "in the backward")
        lines.append(
            f"optimizer state of {state / 1e9:,.1f} GB in host memory would cost no time from {tokens:,.0f} tokens of "
            "a rank and step, if parameters are updated in the backward (modelled)"
        )
    name = f"{room / 2**30:,.0f} GiB" if cuda else f"{room / 2**30:,.1f} GiB, a rank's share of this machine"
    return lines, describe_fit(run.estimate, transport, dense, room, name)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
