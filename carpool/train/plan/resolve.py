"""What a run is, before there is a model: all that follows from its settings, its machine and its model's shapes.

settings, machine, blueprint -> the searched plan, if one was asked for -> degrees, and what each rank has -> the
expected transport -> what layers save, how non-expert parameters lie -> or an error that says what cannot be, with
nothing loaded

A run and its dry run (`dry_run.py`) come through here alike. The ranks of a run call it together and measure where
that is asked for; a dry run models the same. `carpool.train.build` chooses what needs a model (the transport that all
ranks can use, kernels of experts, the schedule) and notes it in the same `Plan.decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from carpool.activations.host_memory import check_host_memory
from carpool.hf.activation_sizes import lacking_packages
from carpool.hf.architecture_changes import changes_of
from carpool.hf.build_model import check_parallelism
from carpool.hf.multi_token import untraced
from carpool.hf.routing.router_balance import check_biases, find_biases, router_scores
from carpool.hf.seam.moved_experts import lies_logically
from carpool.hf.sharding import SlicedExperts
from carpool.hf.weights.mxfp4_files import is_packed
from carpool.kernels.packets import why_no_fp8
from carpool.layout import ExpertLayout
from carpool.layout.layouts import Layouts
from carpool.memory import TIERS
from carpool.metrics.host import device_name
from carpool.parallel.context import Cut
from carpool.parallel.degrees import Degrees
from carpool.parallel.ranks import gather
from carpool.planner.candidate import Candidate
from carpool.planner.decisions.chosen import Chosen, Decisions
from carpool.planner.decisions.rules import Policies
from carpool.plugins.counted import counted
from carpool.train.blueprint import Blueprint, attention_of, check_implementations, flops_per_token
from carpool.train.config.schema import Config
from carpool.train.data.formats import are_packed
from carpool.train.extensions import extensions_in_use
from carpool.train.launch.machine import Machine
from carpool.train.lora import check_adapter, trained_of
from carpool.train.plan.auto_plan import Planned, choose_plan, with_settings
from carpool.train.plan.compile_and_capture import COMPILE_KIND, choose_compile, with_compile
from carpool.train.plan.division import (
    SEQUENCE_KIND,
    CutModel,
    choose_data_parallel,
    context_cut,
    cut_into_stages,
    distributed_config,
    divides_tokens,
    with_speeds,
)
from carpool.train.plan.estimate import Memory, MemoryEstimate
from carpool.train.plan.memory_fit import Times, choose_memory
from carpool.train.plan.transport_choice import computed_dtype, expected_transport


@dataclass(frozen=True)
class Plan:
    """All that is decided of a run before there is a model, each choice with its reason.

    Attributes:
        config: the settings, with those that were left to a plan, to a budget or to a measurement.
        machine, blueprint: what it was made for.
        decisions: the record of all choices, in which those that need the model are noted, too.
        batch_sizes: sequences of each data-parallel rank in a micro-batch.
        attention: what computes it, as Transformers names it; None: its default.
        cut: the part of each sequence that this rank has; None: whole ones.
        pipeline: the stages of the model; None: it has one.
        memory: bytes that a rank may use, the budget included.
        estimate: of the memory that a rank needs.
        searched: what the planner's search has set; None: nothing was left to it.
        sequence_parallel: whether tensor-parallel ranks divide their tokens among themselves.
        transport: what the ranks are expected to choose.
        policies: what is saved for the backward.
        data_parallel: "fsdp" or "zero1", of non-expert parameters.
        compiled: whether decoder layers are compiled.
    """

    config: Config
    machine: Machine
    blueprint: Blueprint
    decisions: Decisions
    degrees: Degrees
    batch_sizes: tuple[int, ...]
    attention: str | None
    cut: Cut | None
    pipeline: CutModel | None
    memory: int
    estimate: MemoryEstimate
    searched: Chosen[Planned] | None
    sequence_parallel: Chosen[bool]
    transport: Chosen[str]
    policies: Chosen[Policies]
    data_parallel: Chosen[str]
    compiled: Chosen[bool]

    @property
    def written(self) -> Config:
        """The settings as files have them: compilation that was left to the run stays so, for another machine."""
        if self.compiled.how == "given":
            return self.config
        return self.config.changed("training", torch_compile="auto")

    @property
    def bf16(self) -> bool:
        """Whether the run computes in bfloat16."""
        return self.config.training.computes_in_bf16(self.machine.cuda)

    @property
    def dtype(self) -> torch.dtype:
        """In which experts compute, and tokens travel before a codec."""
        return computed_dtype(self.config, self.machine.cuda)

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Of a rank, in the forward of a micro-batch."""
        return self.degrees.tokens_per_rank(math.prod(self.config.micro_batch_shape))

    @property
    def candidate(self) -> Candidate:
        """The run in the planner's words."""
        return self.estimate.candidate(self.transport.answer, self.data_parallel.answer)

    @cached_property
    def needs(self) -> Memory:
        """Predicted bytes of a rank, by component."""
        return self.estimate(self.transport.answer, self.data_parallel.answer)

    @cached_property
    def flops_per_token(self) -> int:
        """Operations of one token's forward and backward; of frozen parameters, without their gradients."""
        return flops_per_token(self.blueprint.size, self.sequence_length, trained_of(self.blueprint, self.config))

    @property
    def balance_loss(self) -> tuple[float, str]:
        """The weight of the balance loss, and what says so."""
        return self.blueprint.balance_loss(self.config.moe.router_aux_loss_coef)

    def describe(self) -> list[str]:
        """Lines for people: what a run and its dry run say alike."""
        config, degrees, machine, size = self.config, self.degrees, self.machine, self.blueprint.size
        backend = "" if machine.device is None else f" ({dist.get_backend()})"
        experts = f"{max(self.blueprint.expert_counts.values())} experts, top-{self.blueprint.top_k}"
        lines = [
            f"{self.blueprint.architecture}: {size.total:,} parameters, {size.active:,} active per token, {experts}"
        ]
        if self.searched is not None:
            lines.append(f"plan: {self.searched.why}")
            if machine.device is None:
                lines += [f"  then {one.step_ms[1]:,.1f} ms: {one.label}" for one in self.searched.answer.others]
        where = "" if machine.here else f" on {machine.hardware.name}"
        lines.append(f"{counted(machine.ranks, 'rank')}{backend}{where}: {degrees}")
        if config.parallelism.rank_speeds == "measured":
            lines.append("speeds of ranks: measured when the run starts; here they are equal")
        elif (speeds := config.parallelism.rank_speeds) is not None:
            lines.append(
                f"speeds of ranks: {speeds}; sequences in a micro-batch: {', '.join(map(str, self.batch_sizes))}"
            )
        if degrees.tp > 1:
            on = "on" if self.sequence_parallel.answer else "off"
            lines.append(f"sequence parallelism: {on}: {self.sequence_parallel.why}")
        if self.cut is not None:
            lines.append(f"context: {self.cut}")
        lines.append(f"data parallelism: {self.data_parallel.answer}: {self.data_parallel.why}")
        if machine.cuda or self.compiled.answer:
            compiled = "compiled" if self.compiled.answer else "not compiled"
            lines.append(f"decoder layers: {compiled}: {self.compiled.why}")
        if machine.cuda and (lacking := lacking_packages(self.blueprint.model)):
            lines.append(f"install {' and '.join(lacking)}: PyTorch in their place takes longer and more memory")
        weight, why = self.balance_loss
        lines.append(f"balance loss: {f'weight {weight:g}' if weight else 'none'} ({why})")
        if (long := self.blueprint.why_long(config.data.sequence_length)) is not None:
            lines.append(long)
        lines += [one.describe() for one in changes_of(self.blueprint.model.config)]
        if left_out := self.blueprint.left_out:
            lines.append(left_out)
        return lines


def resolve(
    config: Config,
    machine: Machine,
    blueprint: Blueprint,
    decisions: Decisions,
    fixed: Collection[str] = (),
    measure_policies: Callable[[Config, Machine, Blueprint], Times] | None = None,
) -> Plan:
    """Decide it all. Where `decisions` are of several ranks, these call it together.

    Args:
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.
        measure_policies: what each policy of what is saved costs, for a budget. None: that is modelled.

    Raises:
        ValueError: settings that this model or this machine cannot have."""
    model, counts = blueprint.model, blueprint.expert_counts

    def divide(config: Config) -> tuple[Config, Chosen[Planned] | None, Degrees, Chosen[bool]]:
        searched = choose_plan(config, fixed, blueprint, machine, decisions)
        if searched is not None:
            config = with_settings(config, searched.answer.taken.settings)
        degrees = config.parallelism.resolve(machine.ranks, min(counts.values()))
        config.check_supported(degrees.sizes)
        return config, searched, degrees, choose_compile(config, degrees, blueprint, machine, decisions)

    left, (config, searched, degrees, compiled) = config, divide(config)
    if searched is not None and machine.cuda and not compiled.answer and left.training.torch_compile == "auto":
        # The search took layers to be compiled.
        config, searched, degrees, _ = divide(with_compile(left, False))
        decisions.add(COMPILE_KIND, compiled)
    config = with_compile(config, compiled.answer)
    optional = untraced(model, counts)
    layouts = check_layout_file(config, model.config.model_type, counts, degrees, optional)
    _check_whole_experts(config, blueprint, degrees)
    _check_model_has(config, blueprint, degrees)
    stored = config.model.stored_dtype
    if config.memory.experts != "device" and stored != "bfloat16" and config.training.computes_in_bf16(machine.cuda):
        raise ValueError(
            f'memory.experts = "{config.memory.experts}": experts are not cast on their way, and these are stored in '
            f"{stored} and computed in bfloat16; set model.dtype=bfloat16"
        )
    check_offload_layouts(config, layouts, config.moe.two_batch)
    if machine.device is not None:
        coded = (config.codec.dispatch, config.codec.combine, config.codec.dispatch_backward)
        if "fp8" in (config.moe.experts, *coded, config.codec.combine_backward) and (why := why_no_fp8(machine.device)):
            raise ValueError(f"moe.experts or codec is fp8: {why}")
        config = with_speeds(config, machine.device, gather(device_name(machine.device)), decisions)
    batch_sizes = config.batch_sizes(degrees)
    _check_halves(config, batch_sizes)
    sequence_parallel = divides_tokens(config, degrees, model)
    if degrees.tp > 1:
        decisions.add(SEQUENCE_KIND, sequence_parallel)
    cut = context_cut(config, degrees, model, machine.rank)
    pipeline = cut_into_stages(config, degrees, model, machine.rank)
    if machine.here:
        check_implementations(config.model, model)

    transport = expected_transport(config, degrees, blueprint, machine)
    packed = isinstance(blueprint.source, Path) and is_packed(blueprint.source)
    estimate, memory = MemoryEstimate(config, degrees, model, machine.cuda, packed=packed), machine.memory
    measure = None if measure_policies is None else lambda: measure_policies(config, machine, blueprint)
    per_node = machine.topology.node_size(0)
    policies = choose_memory(estimate, transport.answer, machine.hardware, decisions, measure, per_node)
    if (budget := config.memory.budget_bytes) is not None:
        # All that follows reads one configuration.
        config, memory = config.changed("memory", **policies.answer), min(memory, budget)
        estimate = estimate.changed(config)
    if machine.here:
        check_host_and_disk(config, machine, estimate.host_bytes(transport.answer), estimate.disk_bytes())
    data_parallel = choose_data_parallel(
        config, degrees, lambda one: estimate(transport.answer, one)["total"], memory, decisions
    )
    check_parallelism(model, distributed_config(degrees, estimate.bf16), data_parallel.answer, sequence_parallel.answer)
    check_adapter(config, degrees, data_parallel.answer, estimate.bf16)
    plan = Plan(
        config=config, machine=machine, blueprint=blueprint, decisions=decisions, degrees=degrees,
        batch_sizes=batch_sizes, attention=attention_of(config, degrees, model, machine.cuda), cut=cut,
        pipeline=pipeline, memory=memory, estimate=estimate, searched=searched, sequence_parallel=sequence_parallel,
        transport=transport, policies=policies, data_parallel=data_parallel, compiled=compiled,
    )  # fmt: skip
    for extension in extensions_in_use(config):
        extension.check_plan(plan)
    return plan


def _check_whole_experts(config: Config, blueprint: Blueprint, degrees: Degrees) -> None:
    uneven = any(number % degrees.ep for number in blueprint.expert_counts.values())
    if uneven and (config.adapter.is_used or config.memory.experts != "device"):
        raise ValueError(
            f"parallelism.ep_size = {degrees.ep} does not divide the experts, which neither adapters nor "
            "memory.experts = 'host' or 'disk' know: choose an ep_size that does"
        )


def _check_halves(config: Config, batch_sizes: tuple[int, ...]) -> None:
    if config.runs_halves and min(batch_sizes) == 1:
        one = "by parallelism.rank_speeds a rank has one sequence" if max(batch_sizes) > 1 else "it has one sequence"
        raise ValueError(
            f"moe.schedule = 'two-batch' cuts each rank's only micro-batch in two, but {one}: set "
            "training.gradient_accumulation_steps=2, whose micro-batches then run in pairs, or a larger "
            "training.per_device_train_batch_size"
        )


def _check_model_has(config: Config, blueprint: Blueprint, degrees: Degrees) -> None:
    """What settings of routing, of slices and of a teacher ask of a model."""
    model, counts = blueprint.model, blueprint.expert_counts
    config.moe.drops.check(blueprint.top_k)
    weight, why = blueprint.balance_loss(config.moe.router_aux_loss_coef)
    if config.moe.balance_batch == "global" and not weight:
        raise ValueError(
            f"moe.balance_batch = 'global' changes nothing, because there is no balance loss ({why}); set "
            "moe.router_aux_loss_coef above 0, or leave it out"
        )
    if config.moe.sequence_aux_loss_coef and (scores := router_scores(model)) not in ("softmax", "sigmoid"):
        raise ValueError(
            f"moe.sequence_aux_loss_coef = {config.moe.sequence_aux_loss_coef:g} is of softmax or sigmoid scores, and "
            f"the routers of {type(model).__name__} have {scores}: set it to 0; moe.bias_update_rate balances without"
        )
    flash = "flash" in (config.model.attn_implementation or "")
    if flash and config.distillation.teacher is not None and degrees.cp > 1 and are_packed(config.data):
        raise ValueError(
            f"model.attn_implementation = {config.model.attn_implementation!r}: ranks that share sequences take other "
            "tokens of packed rows than a teacher without flash attention; leave it out, or use distillation.logits"
        )
    if config.adapter.is_used and config.training.optimizer_in_backward and degrees.world_size > 1:
        raise ValueError(
            "training.optimizer_in_backward = true with adapters needs one rank: gradients of adapters are added up "
            "over ranks after the backward; set it to false, or parallelism.num_ranks=1"
        )
    if config.moe.bias_update_rate:
        check_biases(model, find_biases(model, counts))
    if isinstance(blueprint.source, Path) and is_packed(blueprint.source):
        _check_packed(config, blueprint.source, degrees)
    if degrees.etp > 1:
        SlicedExperts(model, counts, degrees.expert_ranks, degrees.etp)


def _check_packed(config: Config, folder: Path, degrees: Degrees) -> None:
    plain = config.moe.in_order and config.memory.experts == "device" and config.moe.experts != "fp8"
    if config.adapter.is_used and degrees.world_size == 1 and plain and config.placement.every is None:
        return
    raise ValueError(
        f"the experts in {folder} are in MXFP4: they are frozen, and stay on one GPU, in order, under adapters; set "
        "adapter.kind=lora and parallelism.num_ranks=1, or save the model dequantised (Mxfp4Config(dequantize=True) of "
        "Transformers)"
    )


def check_layout_file(
    config: Config, model_type: str, experts: Mapping[str, int], degrees: Degrees, optional: Collection[str] = ()
) -> list[ExpertLayout]:
    """The layouts of a run's layers if `moe.layout` is a file; else none. Needs neither weights nor data.

    Raises ValueError unless the file is of this model on these ranks, and, for placement.policy = "place", `carpool
    place` made it with placement.solver.

    Args:
        model_type: transformers' name of the model's kind.
        experts: number of experts of each MoE layer, by name.
        optional: layers that the file may not have.
    """
    file, ranks = config.moe.layout, degrees.expert_ranks
    if file == "contiguous":
        return []
    layouts = Layouts.load(file)
    if unknown := sorted(set(layouts) - experts.keys()):
        raise ValueError(
            f"{file}: there is a layout for {unknown[0]!r}, but this model's layers are {', '.join(experts)}"
        )
    experts = {name: count for name, count in experts.items() if name in layouts or name not in optional}
    for name, count in experts.items():
        if (here := (layouts[name].num_experts, layouts[name].num_ranks)) != (count, ranks):
            raise ValueError(
                f"{file}: layer {name}: the layout is for {here[0]} experts on {here[1]} ranks, but the model has "
                f"{count} experts there, on {ranks} ranks"
            )
        if layouts[name].slices != degrees.etp:
            raise ValueError(
                f"{file}: layer {name}: the layout cuts each expert into {layouts[name].slices} slices, but "
                f"parallelism.etp_size = {degrees.etp}"
            )
        optimizer = config.training.optimizer_class(config.model.stored_dtype)
        if optimizer.whole_matrices and not layouts[name].slices_together:
            raise ValueError(
                f"{file}: layer {name}: training.optimizer = {optimizer.name!r} needs whole experts, so ranks of an "
                "expert hold the same experts in the same order, and each rank one slice of them"
            )
    found = [layouts[name] for name in experts]
    if config.placement.policy != "place":
        return found
    solver, about = config.placement.solver, layouts.about
    again = f"write it again with `carpool place TRACE --ranks {ranks} --solvers {solver}`"
    other = f"or leave placement.policy out: moe.layout={file} alone puts experts where the file says"
    solved_by = about.get("solver")
    if not isinstance(solved_by, Mapping):
        raise ValueError(f"{file}: placement.policy = 'place', but the file does not say which solver made it; {again}")
    for name in experts:
        if (by := solved_by.get(name)) != solver:
            raise ValueError(
                f"{file}: placement.solver = {solver!r}, but layer {name} was placed by {by!r}; {again}, {other}"
            )
    traced = (about.get("trace_meta") or {}).get("model_type", model_type)
    if traced != model_type:
        raise ValueError(
            f"{file} was made from a trace of the model type {traced!r}, but this model's is {model_type!r}; {again}"
        )
    return found


def check_host_and_disk(config: Config, machine: Machine, host: int, disk: int) -> None:
    """Raise ValueError, on all ranks, if a machine has not the host memory, or not the disk, for what its ranks will
    keep there. Collective over the ranks, if there are any.

    Args:
        host, disk: bytes of each rank."""
    if not host and not disk:
        return
    ranks = machine.topology.node_size(machine.rank)
    what = "what this run keeps there (training.optimizer_offload, [memory])"
    problem = None
    try:
        if host:
            if config.memory.expert_host_memory is None:
                check_host_memory(host, what, ranks)
            else:
                check_host_memory(host, what, ranks, advice="Lower memory.expert_host_memory, or use more machines")
        if disk:
            TIERS["disk"].check(disk, what, disk_folder(config), ranks)
    except ValueError as error:
        problem = f"rank {machine.rank}: {error}"
    if found := [text for text in gather(problem) if text]:
        raise ValueError(found[0])


def check_offload_layouts(config: Config, layouts: Sequence[ExpertLayout], halves: bool) -> None:
    """Raise ValueError for layouts that keep state or experts from being elsewhere, or gradients from being consumed.

    Args:
        layouts: of the layers with experts.
        halves: two batches run at a time."""
    training, moved = config.training, not all(map(lies_logically, layouts))
    if training.optimizer_offload != "none" and moved:
        raise ValueError(
            f'training.optimizer_offload = "{training.optimizer_offload}" cannot be used with experts in another order '
            '(moe.layout): their state in checkpoints would travel between GPUs. Use moe.layout="contiguous"'
        )
    if training.optimizer_in_backward and halves:
        raise ValueError(
            "training.optimizer_in_backward = true uses each gradient once it is there, but two batches at a time "
            "(moe.schedule) add several to one: choose another schedule, or keep gradients "
            "(training.optimizer_in_backward = false)"
        )
    if config.memory.experts != "device" and moved:
        raise ValueError(
            f'memory.experts = "{config.memory.experts}": experts that are loaded layer by layer cannot move between '
            'ranks; use moe.layout="contiguous"'
        )


def disk_folder(config: Config) -> Path:
    """Where files of a run are made that nobody else sees: a folder that exists."""
    if config.memory.disk_folder is not None:
        folder = Path(config.memory.disk_folder)
        if not folder.is_dir():
            raise ValueError(f"memory.disk_folder = {folder}: there is no such folder; make it, or name another one")
        return folder
    folder = config.training.folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())
