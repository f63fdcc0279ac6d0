"""What a run is, before there is a model: all that follows from its settings, its machine and its model's shapes.

settings, machine, blueprint -> the plan, if one was asked for -> degrees, and what each rank has -> the likely
transport -> what layers keep, how dense parameters lie -> or an error that says what cannot be, with nothing loaded

A run and its dry run (`dry_run.py`) come through here alike. The ranks of a run call it together, and measure where
that is asked for; a dry run has no ranks, and models the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from carpool.hf.axes.sequence_moves import check_moves
from carpool.hf.axes.slices import SlicedExperts
from carpool.hf.building.checks import check_parallelism
from carpool.hf.routing.bias import check_biases, find_biases
from carpool.parallel.context import Cut
from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.chosen import Chosen, Decisions
from carpool.planner.decisions.policies import Policies
from carpool.train.blueprint import Blueprint, attention_of, check_implementations
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine, device_name
from carpool.train.launch.ranks import gather
from carpool.train.lora import check_adapter
from carpool.train.moving.layouts import check_layout_file
from carpool.train.plan.auto_plan import Planned, choose_plan, with_settings
from carpool.train.plan.division import (
    SEQUENCE_KIND,
    choose_dense,
    context_cut,
    distributed_config,
    divides_tokens,
    with_speeds,
)
from carpool.train.plan.estimate import MemoryEstimate
from carpool.train.plan.memory_fit import Times, choose_memory, with_policies
from carpool.train.plan.offload_checks import check_experts_away, check_layouts_of_tiers, check_tiers
from carpool.train.plan.transport_choice import likely_transport
from carpool.train.steps.pipeline import CutModel, cut_into_stages


@dataclass
class Prepared:
    """All that is decided of a run before there is a model.

    Attributes:
        config: the settings, with those that were left to a plan, to a budget or to a measurement.
        machine, blueprint: what it was prepared for.
        decisions: all that was chosen (`carpool.planner.decisions.chosen`); of these, plan (None if nothing was left to
            it), kept and dense are asked for elsewhere.
        batch_sizes: sequences of each data-parallel rank in a micro-batch.
        attention: what computes it, as Transformers names it; None: its default.
        cut: the part of each sequence that this rank has; None: whole ones.
        pipeline: the stages of the model; None: it has one.
        divides_tokens: tensor-parallel ranks divide their tokens among themselves; why_divided: or why they do not.
        likely_transport: what the estimate takes the ranks to choose; why_likely: and why.
        rank_memory: bytes that a rank may use, the budget included.
    """

    config: Config
    machine: Machine
    blueprint: Blueprint
    decisions: Decisions
    plan: Chosen[Planned] | None
    degrees: Degrees
    batch_sizes: tuple[int, ...]
    attention: str | None
    cut: Cut | None
    pipeline: CutModel | None
    divides_tokens: bool
    why_divided: str
    likely_transport: str
    why_likely: str
    rank_memory: int
    estimate: MemoryEstimate
    kept: Chosen[Policies]
    dense: Chosen[str]


def prepare(
    config: Config,
    machine: Machine,
    blueprint: Blueprint,
    decisions: Decisions,
    fixed: Collection[str] = (),
    measure_policies: Callable[[Config, Machine, Blueprint], Times] | None = None,
) -> Prepared:
    """Decide it all. Where `decisions` are of several ranks, these call it together.

    Args:
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.
        measure_policies: what each policy of what is kept costs, for a budget. None: that is modelled.

    Raises:
        ValueError: settings that this model or this machine cannot have."""
    model, counts = blueprint.model, blueprint.expert_counts
    plan = choose_plan(config, fixed, blueprint, machine, decisions)
    if plan is not None:
        config = with_settings(config, plan.answer.taken.settings)
    degrees = config.parallelism.resolve(machine.ranks, min(counts.values()))
    config.check_supported(degrees.sizes)
    layouts = check_layout_file(config, model.config.model_type, counts, degrees)
    _check_whole_experts(config, blueprint, degrees)
    _check_model_has(config, blueprint, degrees)
    check_experts_away(config, config.training.computes_in_bf16(machine.cuda))
    check_layouts_of_tiers(config, layouts, config.moe.schedule == "two-batch")
    if config.moe.move_sequences is not None:
        check_moves(config.moe.move_sequences, len(counts), degrees.ep)
    if machine.device is not None:
        config = with_speeds(config, machine.device, gather(device_name(machine.device)), decisions)
    batch_sizes = config.parallelism.batch_sizes(config.training.per_device_train_batch_size, degrees)
    _check_halves(config, batch_sizes)
    divided, why_divided = divides_tokens(config, degrees, model)
    if degrees.tp > 1:
        how = "default" if config.parallelism.sequence_parallel == "auto" else "given"
        decisions.add(SEQUENCE_KIND, Chosen(divided, {}, how, why_divided))
    cut = context_cut(config, degrees, model, machine.rank)
    pipeline = cut_into_stages(config, degrees, model, machine.rank)
    attention = attention_of(config, degrees, model, machine.cuda)
    if machine.here:
        check_implementations(config.model, model)

    transport, why_transport = likely_transport(config, degrees, blueprint, machine)
    nodes = machine.topology.of(degrees.ranks_along(0, "ep", "etp")).num_nodes
    estimate, memory = MemoryEstimate(config, degrees, model, machine.cuda, nodes), machine.memory
    measure = None if measure_policies is None else lambda: measure_policies(config, machine, blueprint)
    per_node = machine.topology.ranks_beside(0)
    kept = choose_memory(estimate, transport, machine.hardware, decisions, measure, per_node)
    if (budget := config.memory.budget_bytes) is not None:
        # All that follows reads one configuration.
        config, memory = with_policies(config, kept.answer), min(memory, budget)
        estimate = estimate.changed(config)
    if machine.here:
        check_tiers(config, machine, estimate.host_bytes(transport), estimate.disk_bytes())
    dense = choose_dense(config, degrees, lambda one: estimate(transport, one)["total"], memory, decisions)
    check_parallelism(model, distributed_config(degrees, estimate.bf16), dense.answer, divided)
    check_adapter(config, degrees, dense.answer, estimate.bf16)
    return Prepared(
        config=config,
        machine=machine,
        blueprint=blueprint,
        decisions=decisions,
        plan=plan,
        degrees=degrees,
        batch_sizes=batch_sizes,
        attention=attention,
        cut=cut,
        pipeline=pipeline,
        divides_tokens=divided,
        why_divided=why_divided,
        likely_transport=transport,
        why_likely=why_transport,
        rank_memory=memory,
        estimate=estimate,
        kept=kept,
        dense=dense,
    )


def _check_whole_experts(config: Config, blueprint: Blueprint, degrees: Degrees) -> None:
    uneven = any(number % degrees.ep for number in blueprint.expert_counts.values())
    if uneven and (config.adapter.kind is not None or config.memory.experts != "device"):
        raise ValueError(
            f"parallelism.ep_size = {degrees.ep} does not divide the experts, which neither adapters nor "
            "memory.experts = 'host' or 'disk' know: choose an ep_size that does"
        )


def _check_halves(config: Config, batch_sizes: tuple[int, ...]) -> None:
    halves = config.moe.schedule == "two-batch" and config.training.gradient_accumulation_steps == 1
    if halves and min(batch_sizes) == 1:
        one = "by parallelism.rank_speeds a rank has one sequence" if max(batch_sizes) > 1 else "it has one sequence"
        raise ValueError(
            f"moe.schedule = 'two-batch' cuts each rank's only micro-batch in two, but {one}: set "
            "training.gradient_accumulation_steps=2, whose micro-batches then run in pairs, or a larger "
            "training.per_device_train_batch_size"
        )


def _check_model_has(config: Config, blueprint: Blueprint, degrees: Degrees) -> None:
    """What settings of routing and of slices ask of a model."""
    model, counts = blueprint.model, blueprint.expert_counts
    config.moe.drops.check(blueprint.top_k)
    if config.moe.bias_update_rate:
        check_biases(model, find_biases(model, counts))
    if degrees.etp > 1:
        SlicedExperts(model, counts, degrees.expert_ranks, degrees.etp)
