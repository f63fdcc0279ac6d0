"""`carpool train --dry-run`: what a run will be and what it will need, as text that is a configuration file, too.

On this machine, or for the GPUs of another one, of which nothing need be here:

    carpool train --config sft.toml parallelism.num_ranks=64 --dry-run --gpu h100
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from carpool.planner.step.lengths import break_even_tokens
from carpool.plugins.counted import counted
from carpool.train.config.schema import Config, keys
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.compile_and_capture import describe_graphs
from carpool.train.plan.estimate import state_bytes
from carpool.train.plan.memory_fit import describe_fit
from carpool.train.plan.resolve import Plan
from carpool.train.plan.start_checks import check_choices, find_checkpoint, foresee
from carpool.train.plan.time_and_cost import describe_time

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
        plan = foresee(config, fixed, machine, checkpoint)
    except ValueError as error:
        if machine.cuda or config.parallelism.device == "cpu" or _on_gpus(config, fixed) == str(error):
            raise
        raise ValueError(
            f"{error} (if the run is meant for GPUs of another machine: --gpu h100, or what they are)"
        ) from None
    needed, verdict = _needed(plan)
    lines = [*_decided(plan), *describe_time(plan), *needed, *verdict]
    text = (
        plan.written.to_toml(sources={**sources, **_searched(plan)}) + "\n" + "\n".join(f"# {line}" for line in lines)
    )
    fits = plan.needs["total"] <= plan.memory
    return text, None if fits or not plan.config.training.check_memory else verdict[0].partition(". ")[0]


def _on_gpus(config: Config, fixed: list[str]) -> str | None:
    """What would be refused if the run were meant for GPUs."""
    try:
        foresee(config, fixed, imagine_machine(config, "h100"), None)
    except ValueError as error:
        return str(error)
    return None


def _searched(plan: Plan) -> Sources:
    """What the planner's search has set."""
    settings = {} if plan.searched is None else plan.searched.answer.taken.settings
    return {(section, key): "the plan" for section, _, key in (one.partition(".") for one in settings)}


def _decided(plan: Plan) -> list[str]:
    """Lines about what the run will be."""
    config, degrees = plan.config, plan.degrees
    training, length = config.training, plan.sequence_length
    sequences = training.rank_sequences
    policies = ", ".join(f"{item} {policy}" for item, policy in plan.policies.answer.items())
    return [
        *plan.describe(),
        f"{sequences * degrees.dp * length:,} tokens per step, {plan.flops_per_token:,} operations per token",
        f"{counted(sequences * degrees.dp, 'sequence')} per step: {counted(degrees.dp, 'data-parallel rank')} x "
        f"{counted(plan.candidate.accumulation, 'micro-batch')} x {training.per_device_train_batch_size}",
        f"transport {plan.transport.answer}: {plan.transport.why}",
        f"memory: {policies}: {plan.policies.why}",
        *([describe_graphs(plan.candidate.why_eager)] if plan.machine.cuda else []),
    ]


def _needed(plan: Plan) -> tuple[list[str], list[str]]:
    """Lines about memory, and the verdict."""
    room, cuda = plan.memory, plan.machine.cuda
    lines = [
        f"predicted memory of one rank, which computes {counted(max(plan.batch_sizes), 'sequence')} at a time:",
        *(f"  {name:<12} {_mib(value):>12}" for name, value in plan.needs.items()),
        *(f"  {line}" for line in textwrap.wrap(f"not counted: {NOT_COUNTED[cuda]}", 100)),
    ]
    if host := plan.estimate.host_bytes(plan.transport.answer):
        lines.append(f"host memory of one rank: {_mib(host)}")
    streams = "host" in plan.config.training.ablest_optimizer().places
    if cuda and streams and (state := plan.estimate.trained * state_bytes(plan.config)):
        tokens = break_even_tokens(state, plan.flops_per_token, plan.machine.hardware)
        lines.append(
            f"optimizer state of {state / 1e9:,.1f} GB in host memory would cost no time from {tokens:,.0f} tokens of "
            "a rank and step, if parameters are updated in the backward (modelled)"
        )
    name = f"{room / 2**30:,.0f} GiB" if cuda else f"{room / 2**30:,.1f} GiB, a rank's share of this machine"
    return lines, describe_fit(plan, name)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
