"""The model of a run as it is trained on these ranks: built, and with all that a step needs but data.

`Prepared` -> model (FSDP x EP) -> where experts live, which choices count -> how rows ride, how experts compute, what
runs beside what -> loss and optimizer

Setup goes on from here (`carpool.train.run.setup`). Measurements of a few layers before a run stop here
(`kept_times.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar
from carpool.experts import Choices
from carpool.hf import install, rides, set_experts, set_kept, set_transport
from carpool.hf.axes.context import ContextParallel
from carpool.hf.axes.dense import keep_experts, replicate_dense
from carpool.hf.axes.sequence_moves import MovingSequences
from carpool.hf.building.model import build_model
from carpool.hf.compute.compiled import compile_layers
from carpool.hf.finetune.freeze import freeze_dense, freeze_experts
from carpool.hf.memory.offload import offload_layers
from carpool.hf.memory.recompute import recompute_layers
from carpool.hf.observe.metrics import RideMetrics
from carpool.hf.routing.bias import BiasBalance, find_biases
from carpool.hf.routing.drops import drop_choices, route_in_float32
from carpool.hf.routing.limit import limit_routing
from carpool.hf.seam.layers import name_layers
from carpool.hf.seam.layouts import set_layout
from carpool.hf.seam.rides import ExpertRides
from carpool.hf.seam.shared import compute_shared_beside
from carpool.layout.layouts import Layouts
from carpool.layout.topology import Topology
from carpool.memory.host_experts import HostExperts
from carpool.observe.meter import NSIGHT
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel.meshes import Meshes
from carpool.parallel.replicated import sharded_parameters
from carpool.planner.decisions.chosen import Chosen
from carpool.schedule import Schedule
from carpool.train.build.offloaded import make_tiers
from carpool.train.config.fine_tuning import adapter_folder
from carpool.train.build.schedule_choice import choose_schedule, rides_first
from carpool.train.build.expert_kernels import choose_stages
from carpool.train.plan.transport_choice import TRANSPORT_KIND, choose_way
from carpool.train.launch.machine import ranks_of
from carpool.train.launch.ranks import gather
from carpool.train.lora import add_adapter
from carpool.train.plan.division import distributed_config
from carpool.train.blueprint import top_k_of
from carpool.train.moving.layouts import first_layouts
from carpool.train.plan.resolve import Prepared
from carpool.train.plan.offload_checks import disk_folder
from carpool.train.records.files import ADAPTER
from carpool.train.steps.graphs import StepGraphs, check_graphs, note_graphs, why_no_graphs
from carpool.train.steps.objective import Objective
from carpool.train.steps.optimizer import make_optimizer
from carpool.train.steps.pipeline import PipelineObjective
from carpool.train.steps.room import most_tokens, transport_options
from carpool.train.steps.stage_graphs import StageGraphs
from carpool.transport import TransportOptions, set_topology


# What a bias moves by in a step, if nobody says: DeepSeek-V3, arXiv 2412.19437, section 4.2.
DEEPSEEK_RATE = 0.001


class Assembled(Prepared):
    """What was prepared, and the model with its loss and optimizer. All ranks construct it alike.

    Args:
        saved: what the checkpoint that is resumed says beside weights; {}: there is none.

    Attributes:
        rank, world, main: this rank, their number, whether this is rank 0.
        load_seconds: until all ranks had the model.
        adapted: parameters of the adapter; 0: the model itself is trained.
        ep_topology: of this rank's expert-parallel group.
        layout_source: what says where experts live at the start.
        limits_lossy, experts_lossy: how these change the model's function, for the log.
        bias: moves the biases of routers; None: nothing does.
        rides: the layers that ride.
        options: of the transport.
        transport_choice, stages, schedule: of the decisions, those that need the model; stages: None if its experts
            have none.
        parameters: what the optimizer and clipping see: this rank's shards, where the model is sharded.
        consumed: uses gradients in the backward; None: they are kept until the optimizer's step.
        away: keeps experts in host memory; None: they are on the device.
        no_graphs: why steps are not captured as CUDA graphs; None: they are.

    Raises:
        ValueError: settings that this model cannot have.
    """

    rank: int
    world: int
    main: bool
    device: torch.device
    meshes: Meshes
    model: PreTrainedModel
    load_seconds: float
    adapted: int
    ep_topology: Topology
    layout_source: str
    limits_lossy: list[str]
    bias: BiasBalance | None
    experts_lossy: list[str]
    rides: list[ExpertRides]
    transport_choice: Chosen[str]
    options: TransportOptions
    stages: Chosen[Choices] | None
    schedule: Chosen[Schedule]
    objective: Objective
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    consumed: ConsumedGradients | None
    away: HostExperts | None
    metrics: RideMetrics
    no_graphs: str | None

    def __init__(self, prepared: Prepared, saved: dict[str, Any]) -> None:
        vars(self).update(vars(prepared))
        device = prepared.machine.device
        assert device is not None, "a run has ranks"
        self.rank, self.world, self.device = prepared.machine.rank, prepared.machine.ranks, device
        self.main = self.rank == 0
        self._build_model(saved)
        self._set_routing(saved)
        self._set_rides()
        self._set_objective()
        self._set_graphs()
        # Drop-out and the like differ between ranks with different tokens, and only between them.
        torch.manual_seed(self.config.training.seed + self.degrees.dp_cp_rank(self.rank))

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.config.training.computes_in_bf16(self.machine.cuda)

    @property
    def element_size(self) -> int:
        """Bytes of an element of a row that travels, before a codec."""
        return 2 if self.bf16 else self.model.dtype.itemsize

    def _build_model(self, saved: dict[str, Any]) -> None:
        config, training = self.config, self.config.training
        self.meshes = Meshes(self.degrees, self.device.type)
        with loading_shown(self.main):
            began = time.perf_counter()
            self.model = build_model(
                self.blueprint.source,
                distributed_config=distributed_config(self.degrees, self.bf16),
                dtype=getattr(torch, config.model.dtype or "float32"),
                seed=training.seed,
                attn_implementation=self.attention,
                experts_implementation=config.model.experts_implementation,
                dense=self.dense.answer,
                base_dtype=config.adapter.base_dtype,
                meshes=self.meshes,
                sequence_parallel=self.divides_tokens,
                slices=self.degrees.etp,
                parts=() if self.pipeline is None else self.pipeline.own,
            )
            dist.barrier()
            self.load_seconds = time.perf_counter() - began
        install(self.model)
        if training.freeze == "dense":
            freeze_dense(self.model)
        elif training.freeze == "experts":
            freeze_experts(self.model, rides(self.model))
        self.adapted = 0
        if config.adapter.kind is not None:
            start, own = config.adapter.path, Path(training.output_dir, ADAPTER)
            # What a run began with may be gone when it goes on, with the checkpoint's values.
            folder = own if start and saved and own.is_dir() else start and adapter_folder(start)
            whole = self.dense.answer == "replicate"
            self.adapted = add_adapter(self.model, config.adapter, training.seed, whole, folder or None)
        if self.dense.answer == "replicate":
            replicate_dense(self.model, self.bf16)
        elif not self.adapted:
            # With adapters all else is frozen, and their gradients are averaged (`carpool.hf.finetune.adapters`), not
            # summed.
            keep_experts(self.model)

    def _set_routing(self, saved: dict[str, Any]) -> None:
        """Where experts live, and which of a token's choices count."""
        moe = self.config.moe
        # Before slots are filled, and before there is a transport: both ask which ranks share a node.
        group = next(iter(rides(self.model).values())).group
        self.ep_topology = self.machine.topology.of(ranks_of(group))
        set_topology(group, self.ep_topology)
        layouts, self.layout_source = self.first_layouts(saved)
        set_layout(self.model, layouts)
        if moe.router_float32:
            route_in_float32(self.model)
        # Before a checkpoint is loaded: similarities are of what the run started from, also when it goes on.
        self.limits_lossy = limit_routing(self.model, moe.limits(self.ep_topology))
        self.limits_lossy += drop_choices(self.model, moe.drops, top_k_of(self.model))
        self.bias = self._bias_balance()

    def first_layouts(self, saved: dict[str, Any]) -> tuple[Layouts, str]:
        """Where the experts of each layer are at the start, and what says so."""
        return first_layouts(self.config, rides(self.model), saved)

    def _bias_balance(self) -> BiasBalance | None:
        """What moves the biases of the model's routers; None if nothing does."""
        rate = self.config.moe.bias_update_rate
        if rate is None:
            # A fine-tune goes on as its checkpoint was left, unless somebody says otherwise.
            from_scratch = self.config.model.from_scratch and bool(find_biases(self.model))
            rate = DEEPSEEK_RATE if from_scratch else 0.0
        group = None if self.pipeline is None else self.meshes.stage_group()
        return BiasBalance(self.model, rate, group) if rate else None

    def _set_rides(self) -> None:
        """How rows travel, how experts compute, and what runs beside what."""
        config, moe = self.config, self.config.moe
        self.experts_lossy = set_experts(self.model, moe.experts, **moe.expert_options)
        set_kept(self.model, config.memory.kept)
        if config.memory.dense == "recompute":
            recompute_layers(self.model, config.memory.sums == "recompute")
        self.rides = list(rides(self.model).values())
        name_layers(self.model)
        if (schedule := moe.asked_schedule()) is not None:
            # Before there are buffers: those of chunks are smaller.
            for own in self.rides:
                own.set_schedule(schedule)
        self.transport_choice, self.options = self._choose_transport()
        set_transport(self.model, self.transport_choice.answer, options=self.options)
        self._prepare_rides()
        self._choose_stages_and_schedule()
        compute_shared_beside(self.model, self.schedule.answer.name != "none")
        self._prepare_rides()
        if config.training.torch_compile:
            compile_layers(self.model, config.training.torch_compile_backend)
        if config.memory.dense == "offload":
            offload_layers(self.model)

    def _choose_transport(self) -> tuple[Chosen[str], TransportOptions]:
        """The transport of all layers, and its options as the ranks can have them."""
        config, layer = self.config, self.rides[0]
        hidden, top_k, size = self.blueprint.row_size, self.blueprint.top_k, self.element_size
        codecs = config.codec.codecs.for_rows_of(size)
        chosen = choose_way(
            config.moe.transport,
            layer,
            top_k,
            hidden,
            TransportOptions(most_tokens(config, self.degrees), codecs),
            self.device,
            self.decisions,
            element_size=size,
            hardware=self.machine.hardware,
        )
        options = replace(transport_options(config, self.degrees, chosen.answer), codecs=codecs)
        own_forward = any(own.compute is None for own in self.rides)
        settled, note = options.settled(layer.group, top_k, hidden, own_forward)
        if note:
            chosen = self.decisions.add(TRANSPORT_KIND, replace(chosen, why=f"{chosen.why}; {note}"))
        return chosen, settled

    def _choose_stages_and_schedule(self) -> None:
        """What may be measured of a layer's ride, for layers that have a transport."""
        config, training, moe = self.config, self.config.training, self.config.moe
        measured: dict[str, Any] = {
            "tokens": self.degrees.tokens_per_rank(training.per_device_train_batch_size * config.data.sequence_length),
            "top_k": self.blueprint.top_k,
            "dtype": torch.bfloat16 if self.bf16 else self.model.dtype,
            "device": self.device,
            "decisions": self.decisions,
        }
        self.stages = choose_stages(moe.expert_stages, self.rides, **measured)
        if self.stages is not None:
            set_experts(self.model, moe.experts, choices=self.stages.answer, **moe.expert_options)
        # What the CPU computes it computes of whole rides (`keep_experts_in_host_memory`).
        measured |= {"hidden": self.blueprint.row_size, "in_parts": not config.memory.few_tokens}
        self.schedule = choose_schedule(moe.asked_schedule(), self.rides, **measured)

    def _prepare_rides(self) -> None:
        """Make the buffers of all layers."""
        for own in self.rides:
            own.prepare(self.blueprint.top_k, self.blueprint.row_size)

    def _set_objective(self) -> None:
        training, moe = self.config.training, self.config.moe
        settings: dict[str, Any] = dict(
            top_k=self.blueprint.top_k,
            aux_coef=self.blueprint.balance_loss(moe.router_aux_loss_coef)[0],
            dp_size=self.degrees.dp_cp,
            autocast=torch.bfloat16 if self.bf16 and self.degrees.dp_cp == 1 else None,
            balance_layers=moe.balance == "layer",
            two_batch=self.schedule.answer.name == "two-batch",
            rides_first=rides_first(self.model, moe, self.degrees.fsdp * self.degrees.cp),
            loss_chunk=training.loss_chunk,
            context=self._context_parallel(),
        )
        if self.pipeline is None:
            self.objective = Objective(self.model, **settings, moving=self._moving_sequences())
        else:
            dtype = torch.bfloat16 if self.bf16 and settings["autocast"] is None else self.model.dtype
            self.objective = self.pipeline.objective(self.model, self.meshes, dtype, settings)
        with sharded_parameters(self.model):
            self.parameters = list(self.model.parameters())
            on_disk = training.optimizer_state == "disk"
            self.optimizer = make_optimizer(self.model, training, disk_folder(self.config) if on_disk else None)
        self.consumed, self.away = make_tiers(
            self.config,
            self.model,
            self.rides,
            self.optimizer,
            torch.bfloat16 if self.bf16 else self.model.dtype,
            self.schedule.answer.name == "two-batch",
            self.device,
            self.decisions,
        )
        self.metrics = RideMetrics(self.model, None if self.pipeline is None else self.pipeline.moe_layers)

    def _moving_sequences(self) -> MovingSequences | None:
        every = self.config.moe.move_sequences
        if every is None:
            return None
        return MovingSequences(self.model, every, self.blueprint.top_k, self.ep_topology, self.machine.hardware)

    def _context_parallel(self) -> ContextParallel | None:
        group = self.meshes.group("cp")
        if self.cut is None or group is None:
            return None
        return ContextParallel(self.model, self.cut, group)

    def _set_graphs(self) -> None:
        asked = self.config.training.cuda_graphs
        one = self.estimate.candidate(self.transport_choice.answer, self.dense.answer)
        one = replace(one, schedule=self.schedule.answer.name)
        why = why_no_graphs(self.config, one, self.model, self.rides)
        if why is None and NSIGHT:
            why = "Nsight watches, and a graph has no names of layers"
        # NCCL wants an operation captured by all ranks or by none. Nsight may watch one of them, and stages differ.
        self.no_graphs = next((found for found in gather(why) if found is not None), None)
        if self.no_graphs is None:
            known, required = self.note_graphs, asked == "on"
            if isinstance(self.objective, PipelineObjective):
                self.objective.graphs = StageGraphs(self.objective, self.rides, known, required)
            else:
                compute, at_once = self.objective.run_together, self.objective.at_once
                self.objective.graphs = StepGraphs(
                    self.model, self.rides, compute, known, required, self.consumed, at_once=at_once
                )
        elif asked == "on":
            check_graphs(self.no_graphs)
        note_graphs(self.decisions, None if self.no_graphs is None else False, self.no_graphs)

    def note_graphs(self, why_not: str | None) -> None:
        """Note whether steps are CUDA graphs, once the first one has been captured. `why_not`: None if they are."""
        self.no_graphs = why_not
        note_graphs(self.decisions, why_not is None, why_not)


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
