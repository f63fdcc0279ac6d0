"""The model of a run as it is trained on these ranks: built by a plan, and with all that a step needs but data.

plan -> model (FSDP x EP) -> where experts live, which choices count -> how tokens travel, how experts compute, what
runs beside what -> loss and optimizer

A run goes on from here (`carpool.train.run`). Measurements of a few layers before a run stop here (`policy_times.py`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from carpool.experts import Choices
from carpool.experts.host_experts import HostExperts
from carpool.hf import install, rides, set_activation_policies, set_experts, set_transport
from carpool.hf.build_model import build_model
from carpool.hf.context_parallel import ContextParallel
from carpool.hf.decoder_layers import compile_layers, offload_layers, recompute_layers
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.layer_matrices import layer_matrices
from carpool.hf.multi_token import untraced
from carpool.hf.ride_metrics import RideMetrics
from carpool.hf.routing.router_balance import BiasBalance, find_biases, router_scores
from carpool.hf.routing.router_limits import drop_choices, limit_routing, route_in_float32
from carpool.hf.seam.expert_rides import ExpertRides
from carpool.hf.seam.find_modules import experts_modules, freeze_experts, freeze_non_experts, name_layers
from carpool.hf.seam.moved_experts import check_layouts, set_layout
from carpool.hf.seam.shared import overlap_shared_experts
from carpool.hf.sharding import keep_experts, replicate_dense
from carpool.hf.step_graphs import StepGraphs
from carpool.hf.weights.stored_experts import StoredExperts
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.memory.next_experts import PREDICTORS
from carpool.metrics.counters import NSIGHT
from carpool.optim import OptimizerBase, OptimizerSettings
from carpool.optim.ema import WeightAverage
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel.meshes import Meshes
from carpool.parallel.ranks import gather
from carpool.parallel.replicated import replicated, sharded_parameters
from carpool.planner.decisions.chosen import Chosen
from carpool.ride.priority import RidesFirst
from carpool.ride.schedule import Schedule
from carpool.train.blueprint import meta_model, top_k_of
from carpool.train.build.measured_choices import choose_kernels, choose_schedule
from carpool.train.build.teacher import open_teacher
from carpool.train.config.fine_tuning import adapter_folder
from carpool.train.config.schema import Config, MemorySection, TrainingSection
from carpool.train.config.schema_moe import MoeSection
from carpool.train.extensions import Extension, extensions_in_use
from carpool.train.launch.machine import ranks_of
from carpool.train.lora import add_adapter
from carpool.train.plan.compile_and_capture import check_graphs, note_graphs, why_no_graphs
from carpool.train.plan.division import distributed_config
from carpool.train.plan.resolve import Plan, check_offload_layouts, disk_folder
from carpool.train.plan.transport_choice import choose_on_ranks
from carpool.train.records.run_folder import ADAPTER
from carpool.train.steps.distilling_objective import DistillingObjective
from carpool.train.steps.pipeline_objective import PipelineObjective
from carpool.train.steps.stage_graphs import StageGraphs
from carpool.train.steps.training_objective import Objective
from carpool.transport import TransportOptions, set_topology

# What a bias moves by in a step, if nobody says: DeepSeek-V3, arXiv 2412.19437, section 4.2.
DEEPSEEK_RATE = 0.001
FirstLayouts = Callable[[Config, dict[str, ExpertRides], dict[str, Any]], tuple[Layouts, str]]


@dataclass
class Built:
    """The model of a run on this rank, with its loss and optimizer.

    Attributes:
        load_seconds: until all ranks had the model.
        adapted: parameters of the adapter; 0: the model itself is trained.
        ep_topology: of this rank's expert-parallel group.
        layout_source: what says where experts live at the start.
        lossy: how routing and experts change the model's function, for the log.
        bias: moves the biases of routers; None: nothing does.
        rides: the layers with experts.
        transport, kernels, schedule: the decisions that need the model; kernels: None if its experts have none.
        parameters: what the optimizer and clipping see: this rank's shards, where the model is sharded.
        average: of the trained weights; None: there is none.
        consumed: uses gradients in the backward; None: they are kept until the optimizer's step.
        offloaded: keeps experts in host memory; None: they are on the device.
        extensions: of plug-in packages, those that are in use.
        no_graphs: why steps are not captured as CUDA graphs; None: they are.
    """

    device: torch.device
    meshes: Meshes
    model: PreTrainedModel
    load_seconds: float
    adapted: int
    ep_topology: Topology
    layout_source: str
    lossy: list[str]
    bias: BiasBalance | None
    rides: list[ExpertRides]
    transport: Chosen[str]
    options: TransportOptions
    kernels: Chosen[Choices] | None
    schedule: Chosen[Schedule]
    objective: Objective
    parameters: list[nn.Parameter]
    optimizer: OptimizerBase
    average: WeightAverage | None
    consumed: ConsumedGradients | None
    offloaded: HostExperts | None
    metrics: RideMetrics
    extensions: list[Extension]
    no_graphs: str | None = None


def build(plan: Plan, saved: dict[str, Any], layouts_of: FirstLayouts | None = None) -> Built:
    """Build what was planned. All ranks together. Raises ValueError for settings that this model cannot have.

    Args:
        saved: what the checkpoint that is resumed says beside weights; {}: there is none.
        layouts_of: where the experts of each layer are at the start, and what says so; None: `first_layouts`."""
    config, machine, device = plan.config, plan.machine, plan.machine.device
    assert device is not None, "a run has ranks"
    began = time.perf_counter()
    meshes = Meshes(plan.degrees, device.type)
    model = _load(plan, meshes)
    load_seconds = time.perf_counter() - began
    adapted = _set_trained(plan, model, saved)

    layers = rides(model)
    # Before slots are filled, and before there is a transport: both ask which ranks share a node.
    group = next(iter(layers.values())).group
    ep_topology = machine.topology.of(ranks_of(group))
    set_topology(group, ep_topology)
    starts = layouts_of or partial(first_layouts, optional=untraced(model, layers))
    layouts, layout_source = starts(config, layers, saved)
    set_layout(model, layouts)
    if config.moe.router_float32:
        route_in_float32(model)
    # Before a checkpoint is loaded: similarities are of what the run started from, also when it goes on.
    lossy = limit_routing(model, config.moe.limits(ep_topology))
    lossy += drop_choices(model, config.moe.drops, top_k_of(model))
    if (base := config.adapter.base["base_dtype"]) is not None:
        what = "experts" if plan.degrees.world_size > 1 or config.adapter.base_keep is None else "weights"
        lossy.append(f"the frozen {what} are stored in {base}")
    bias = _bias_balance(plan, model, meshes)

    experts_lossy = set_experts(model, config.moe.experts, **config.moe.expert_options)
    own, extensions = list(layers.values()), extensions_in_use(config)
    for extension in extensions:
        extension.prepare_layers(plan, model, own)
    transport, options, kernels, schedule = _set_rides(plan, model, own)
    two_batch = schedule.answer.name == "two-batch"
    objective = _objective(plan, model, meshes, two_batch)
    if (kept := replicated(model)) is not None:
        # Of two batches, or two stages, another thread or a later action may be the first to need them.
        kept.writes_late = plan.pipeline is None and not two_batch
    with sharded_parameters(model):
        parameters = list(model.parameters())
        on_disk = plan.candidate.optimizer_offload == "disk"
        optimizer = make_optimizer(model, config.training, disk_folder(config) if on_disk else None)
    decay = config.training.ema_decay
    average = None if decay is None else WeightAverage(optimizer, decay)
    consumed, offloaded = make_offload(plan, model, own, optimizer, two_batch)
    metrics = RideMetrics(model, None if plan.pipeline is None else plan.pipeline.moe_layers)
    built = Built(
        device=device, meshes=meshes, model=model, load_seconds=load_seconds, adapted=adapted, ep_topology=ep_topology,
        layout_source=layout_source, lossy=[*experts_lossy, *lossy], bias=bias, rides=own, transport=transport,
        options=options, kernels=kernels, schedule=schedule, objective=objective, parameters=parameters,
        optimizer=optimizer, average=average, consumed=consumed, offloaded=offloaded, metrics=metrics,
        extensions=extensions,
    )  # fmt: skip
    for extension in extensions:
        extension.prepare_run(plan, built)
    if plan.candidate.compiled:
        # So the first step has the graphs of all others, also where a run goes on.
        for ride in own:
            ride.settle()
    _set_graphs(plan, built)
    # Drop-out and the like differ between ranks with different tokens, and only between them.
    torch.manual_seed(config.training.seed + plan.degrees.dp_cp_rank(machine.rank))
    return built


def first_layouts(
    config: Config, layers: dict[str, ExpertRides], saved: dict[str, Any], optional: Sequence[str] = ()
) -> tuple[Layouts, str]:
    """Where experts start, and what says so: `moe.layout`, or, of a run that has moved them, its checkpoint.

    A checkpoint's layouts are left aside if they are for other ranks, or if `moe.layout` is no longer what it was.
    A file may not have the `optional` layers.

    Raises:
        ValueError: a file that is no layout, or not one for this model."""
    wanted = config.moe.layout
    placed = saved.get("placement") or {}
    if placed.get("layouts") and placed.get("moe_layout") == wanted:
        layouts = Layouts.from_dict(placed["layouts"], "the checkpoint's layouts")
        try:
            return check_layouts(layers, layouts), "checkpoint"
        except ValueError:
            pass  # it was written on other ranks
    if wanted != "contiguous":
        given = Layouts.load(wanted)
        own = {name: layers[name].layout for name in optional if name not in given}
        return check_layouts(layers, given.with_layers(own) if own else given), wanted
    return Layouts({name: one.layout for name, one in layers.items()}), wanted


def _load(plan: Plan, meshes: Meshes) -> PreTrainedModel:
    """The model with its weights, on these ranks."""
    config, training = plan.config, plan.config.training
    with loading_shown(plan.machine.rank == 0):
        model = build_model(
            plan.blueprint.source, distributed_config=distributed_config(plan.degrees, plan.bf16),
            dtype=getattr(torch, config.model.stored_dtype), seed=training.seed,
            attn_implementation=plan.attention, experts_implementation=config.model.experts_implementation,
            dense=plan.data_parallel.answer, **config.adapter.base, meshes=meshes,
            sequence_parallel=plan.sequence_parallel.answer, slices=plan.degrees.etp,
            parts=() if plan.pipeline is None else plan.pipeline.own, changes=plan.blueprint.changes,
        )  # fmt: skip
        dist.barrier()
    return model


def _set_trained(plan: Plan, model: PreTrainedModel, saved: dict[str, Any]) -> int:
    """Freeze what is not trained and add the adapter; how many parameters it has, 0 without one."""
    config, training, adapted = plan.config, plan.config.training, 0
    install(model)
    if training.freeze == "non_expert":
        freeze_non_experts(model)
    elif training.freeze == "experts":
        freeze_experts(model, rides(model))
    whole = plan.data_parallel.answer == "zero1"
    if config.adapter.is_used:
        start, own = config.adapter.path, training.folder / ADAPTER
        # What a run began with may be gone when it goes on, with the checkpoint's values.
        folder = own if start and saved and own.is_dir() else start and adapter_folder(start)
        adapted = add_adapter(model, config.adapter, training.seed, whole, folder or None)
    if whole:
        replicate_dense(model, plan.bf16)
    elif not adapted:
        # With adapters all else is frozen, and their gradients are averaged (`carpool.hf.adapters`), not
        # summed.
        keep_experts(model)
    return adapted


def make_optimizer(model: nn.Module, training: TrainingSection, folder: Path | None = None) -> OptimizerBase:
    """The optimizer that `training.optimizer` names, of all parameters that are trained.

    Args:
        folder: of its state, if that is on disk.

    Raises:
        ValueError: parameters are sharded, and it updates whole ones alone."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for _, parameter in named}
    # All parameters have one optimizer: bfloat16 ones among others decide it.
    cls = training.optimizer_class("bfloat16" if "bfloat16" in dtypes else "float32")
    if not cls.updates_shards:
        for name, parameter in named:
            if isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements):
                raise ValueError(
                    f"training.optimizer = {cls.name!r} updates whole parameters, and {name} is sharded over ranks: "
                    "take another optimizer, or fewer ranks"
                )
    settings = OptimizerSettings(
        learning_rate=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        epsilon=training.adam_epsilon,
        moments=training.optimizer_state_dtype,
        place=training.optimizer_offload,
        folder=folder,
        options=training.optimizer_options,
    )
    matrices, groups = layer_matrices(model), list[dict[str, Any]]()
    for ratio, some in _by_rate(named, training).items():
        groups += [{**group, "lr_ratio": ratio} for group in cls.groups(some, training.weight_decay, matrices)]
    return cls.make(groups, settings)


def _by_rate(named: list[tuple[str, nn.Parameter]], training: TrainingSection) -> dict[float, list[Any]]:
    """Parameters by their learning rate, as a share of `training.learning_rate`. All ranks together, if there are
    patterns. ValueError: a pattern that fits nothing."""
    found: dict[float, list[Any]] = {}
    ratios, met = training.lr_ratios, set[str]()
    for name, parameter in named:
        pattern = next((one for one in ratios if fnmatchcase(name, one)), "")
        met.add(pattern)
        found.setdefault(ratios.get(pattern, 1.0), []).append((name, parameter))
    if ratios:
        everywhere = set[str]().union(*gather(met))  # a stage has some layers
        if missing := [one for one in ratios if one not in everywhere]:
            raise ValueError(
                f"training.learning_rates: {missing[0]!r} fits no parameter that is trained and that no pattern before "
                f"it fits; names are such as {named[0][0]}, and * stands for any part"
            )
    return found


def _bias_balance(plan: Plan, model: PreTrainedModel, meshes: Meshes) -> BiasBalance | None:
    """What moves the biases of the model's routers; None if nothing does."""
    rate = plan.config.moe.bias_update_rate
    if rate is None:
        # A fine-tune goes on as its checkpoint was left, unless somebody says otherwise.
        from_scratch = plan.config.model.from_scratch and bool(find_biases(model))
        rate = DEEPSEEK_RATE if from_scratch else 0.0
    return BiasBalance(model, rate, None if plan.pipeline is None else meshes.stage_group()) if rate else None


def _set_rides(
    plan: Plan, model: PreTrainedModel, layers: list[ExpertRides]
) -> tuple[Chosen[str], TransportOptions, Chosen[Choices] | None, Chosen[Schedule]]:
    """Choose how tokens travel, which kernels compute experts, and what runs beside what, and let the layers do so."""
    config, moe = plan.config, plan.config.moe
    set_activation_policies(model, config.memory.activation_policies)
    if config.memory.layer_activations == "recompute":
        recompute_layers(model, config.memory.moe_outputs == "recompute")
    name_layers(model)
    if (asked := moe.asked_schedule()) is not None:
        # Before there are buffers: those of chunks are smaller.
        for own in layers:
            own.set_schedule(asked)
    for own in layers:
        own.set_spare_slots(moe.spare)
    transport, options = choose_on_ranks(plan, layers[0], any(own.compute is None for own in layers))
    set_transport(model, transport.answer, options=options)
    _make_buffers(plan, layers)
    kernels = choose_kernels(plan, layers)
    if kernels is not None:
        set_experts(model, moe.experts, choices=kernels.answer, **moe.expert_options)
    schedule = choose_schedule(plan, layers)
    overlap_shared_experts(model, schedule.answer.name != "none")
    _make_buffers(plan, layers)
    if plan.candidate.compiled:
        compile_layers(model, config.training.torch_compile_backend)
    if config.memory.layer_activations == "offload":
        offload_layers(model)
    return transport, options, kernels, schedule


def _make_buffers(plan: Plan, layers: list[ExpertRides]) -> None:
    for own in layers:
        own.prepare(plan.blueprint.top_k, plan.blueprint.row_size)


def _objective(plan: Plan, model: PreTrainedModel, meshes: Meshes, two_batch: bool) -> Objective:
    config, moe, degrees = plan.config, plan.config.moe, plan.degrees
    group = meshes.group("cp")
    autocast = torch.bfloat16 if plan.bf16 and degrees.dp_cp == 1 else None
    settings: dict[str, Any] = dict(
        top_k=plan.blueprint.top_k, aux_coef=plan.balance_loss[0], dp_size=degrees.dp_cp, autocast=autocast,
        balance_layers=moe.balance_scope == "layer", balance_step=moe.balance_batch == "global", two_batch=two_batch,
        z_coef=moe.router_z_loss_coef, sequence_coef=moe.sequence_aux_loss_coef,
        sigmoid=router_scores(model) == "sigmoid",
        rides_first=rides_first(model, moe, degrees.fsdp * degrees.cp),
        loss_chunk_size=config.training.loss_chunk_size,
        context=None if plan.cut is None or group is None else ContextParallel(model, plan.cut, group),
    )  # fmt: skip
    if plan.pipeline is not None:
        group = meshes.group("pp")
        assert group is not None
        return PipelineObjective(
            model, plan.pipeline.parts, schedule=plan.pipeline.schedule, group=group,
            stage_group=meshes.stage_group(), routers=plan.pipeline.routers,
            dtype=model.dtype if autocast is not None else plan.dtype, **settings,
        )  # fmt: skip
    if not (distillation := config.distillation).is_used:
        return Objective(model, **settings)
    teacher = None
    if distillation.teacher is not None:
        assert plan.machine.device is not None, "a run has ranks"
        with loading_shown(plan.machine.rank == 0):
            teacher = open_teacher(Path(distillation.teacher), plan.bf16, plan.machine.device, plan.cut, group)
    return DistillingObjective(model, distillation, teacher, **settings)


def rides_first(model: nn.Module, moe: MoeSection, fsdp_size: int) -> RidesFirst | None:
    """What waits for rides in the backward, as `moe.priority` asks; None: nothing.

    Raises:
        ValueError: it cannot: there are no reductions to wait, or rides that would not say where they are."""
    if not moe.priority:
        return None
    layers = rides(model)
    if all(own.compute is None for own in layers.values()):
        raise ValueError("moe.priority: the experts run their own forward, whose rides nothing waits for: leave it out")
    if fsdp_size == 1:
        raise ValueError(
            "moe.priority: with parallelism.fsdp_size = 1 no gradients are reduced during the backward, so nothing can "
            "keep off the links: leave it out"
        )
    return RidesFirst(model, layers)


def make_offload(
    plan: Plan, model: PreTrainedModel, layers: Sequence[ExpertRides], optimizer: OptimizerBase, halves: bool
) -> tuple[ConsumedGradients | None, HostExperts | None]:
    """(what uses gradients in the backward, what keeps experts in host memory or on disk), of a model that has its
    optimizer; None: nothing does. All ranks together. `halves`: two batches run at a time.

    Raises:
        ValueError: what is asked for cannot be with this model, layout or schedule."""
    config, training, memory, away = plan.config, plan.config.training, plan.config.memory, None
    check_offload_layouts(config, [own.layout for own in layers], halves)
    if memory.experts != "device":
        on_disk = _on_disk(config, layers) if memory.experts == "disk" else {}
        away = keep_experts_in_host_memory(model, **on_disk, **loading_of(memory))
    if not plan.candidate.optimizer_in_backward:
        return None, away
    assert optimizer.in_backward
    return ConsumedGradients(model, optimizer, away, training.max_grad_norm or math.inf), away


def _on_disk(config: Config, layers: Sequence[ExpertRides]) -> dict[str, Any]:
    """Where the experts of a run are on disk: in the files of its checkpoint, or, if they are trained or from scratch,
    in files of their own."""
    frozen = not any(parameter.requires_grad for own in layers for parameter in own.experts.parameters())
    if not frozen or (path := config.model.weights) is None:
        return {"folder": disk_folder(config)}
    blueprint = meta_model(path)
    modules = set(experts_modules(blueprint))
    ordered = [name for name, _ in blueprint.named_modules() if name in modules]
    first = layers[0].layout.homes[layers[0].rank][0]
    return {"files": StoredExperts(path, blueprint, ordered, first)}


def loading_of(memory: MemorySection) -> dict[str, Any]:
    """Which experts come, and which stay, as `keep_experts_in_host_memory` takes it."""
    device, host = memory.experts_bytes
    if memory.expert_loading == "layers":
        return {"host_bytes": host}
    return {"predictor": PREDICTORS["popular"], "cache_bytes": device, "host_bytes": host}


def _set_graphs(plan: Plan, built: Built) -> None:
    """Let steps be CUDA graphs, where they can be."""
    asked, objective, layers = plan.config.training.cuda_graphs, built.objective, built.rides
    one = plan.estimate.candidate(built.transport.answer, plan.data_parallel.answer)
    one = replace(one, schedule=built.schedule.answer.name)
    why = built.no_graphs or why_no_graphs(plan.config, one, built.model, layers)
    if why is None and NSIGHT:
        why = "Nsight watches, and a graph has no names of layers"
    # NCCL wants an operation captured by all ranks or by none. Nsight may watch one of them, and stages differ.
    built.no_graphs = next((found for found in gather(why) if found is not None), None)

    def known(why_not: str | None) -> None:
        built.no_graphs = why_not
        note_graphs(plan.decisions, why_not is None, why_not)

    if built.no_graphs is not None:
        if asked == "on":
            check_graphs(built.no_graphs)
    elif isinstance(objective, PipelineObjective):
        objective.graphs = StageGraphs(objective, layers, known, asked == "on")
    else:
        compute, at_once = objective.run_together, objective.at_once
        objective.graphs = StepGraphs(
            built.model,
            layers,
            compute,
            known,
            asked == "on",
            built.consumed,
            at_once=at_once,
            sums=objective.sums,
        )
    note_graphs(plan.decisions, None if built.no_graphs is None else False, built.no_graphs)


@contextmanager
def loading_shown(main: bool) -> Iterator[None]:
    """Inside, rank 0 of a terminal shows Transformers' progress bar of loading weights."""
    if not (main and sys.stderr.isatty()):
        yield
        return
    enable_progress_bar()
    try:
        yield
    finally:
        disable_progress_bar()
