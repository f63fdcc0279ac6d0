"""A run before its first step: all that it is made of; or an error that says what cannot be, with nothing written.

prepare.py -> data -> model (FSDP x EP) -> where experts live, which choices count -> how rows ride, how experts
compute, what runs beside what -> loss and optimizer -> the checkpoint that is resumed -> records
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from carpool.hf import install, rides, set_experts, set_kept, set_transport
from carpool.hf.bias import BiasBalance, find_biases
from carpool.hf.build import build_model
from carpool.hf.compiled import check_backend, compile_layers, decoder_layers
from carpool.hf.context import ContextParallel
from carpool.hf.dense import replicate_dense
from carpool.hf.drops import drop_choices, route_in_float32
from carpool.hf.expert_parallel import buffers_of_rides
from carpool.hf.freeze import freeze_dense, freeze_experts
from carpool.hf.layouts import is_logical, logical_like, physical_order, set_layout
from carpool.hf.limit import limit_routing
from carpool.hf.metrics import RideMetrics
from carpool.hf.names import name_layers
from carpool.hf.offload import offload_layers
from carpool.hf.packed import why_not_packed
from carpool.hf.recompute import recompute_layers
from carpool.hf.sequence_moves import MovingSequences
from carpool.hf.shared import compute_shared_beside
from carpool.observe.meter import NSIGHT
from carpool.parallel.meshes import Meshes
from carpool.parallel.replicated import sharded_parameters
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.ranks import from_rank_0, gather
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.resume import checkpoint_to_resume, read_run_state
from carpool.train.config.schema import Config
from carpool.train.data import corpus
from carpool.train.data.corpus import Corpus
from carpool.train.data.loader import EvalLoader, TrainLoader
from carpool.train.data.prefetch import Prefetch
from carpool.train.data.sequences import eval_sequences, train_sequences
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.launch.stopping import StopRequest
from carpool.train.launch.watchdog import Watchdog
from carpool.train.moving.cost import Facts
from carpool.train.moving.layouts import first_layouts
from carpool.train.moving.runtime import Placement
from carpool.train.run.about import record_graphs, say_hello, write_files, write_run
from carpool.train.run.adapter import add_adapter
from carpool.train.run.blueprint import Blueprint
from carpool.train.run.display import Display
from carpool.train.run.environment import peak_memory
from carpool.train.run.files import decisions_of, why_not_writable
from carpool.train.run.fit import check_fits
from carpool.train.run.flops import flops_per_token, peak_flops
from carpool.train.run.graphs import StepGraphs, note_graphs, why_no_graphs
from carpool.train.run.kept_times import Times, groups_before, measure_policies, small_config, small_model
from carpool.train.run.machine import Machine, find_machine, rank_device, ranks_of
from carpool.train.run.memory import open_items
from carpool.train.run.model import distributed_config, loading_shown, top_k_of
from carpool.train.run.prepare import prepare
from carpool.train.run.record import Recorder, check_trackers
from carpool.train.run.room import most_tokens, transport_options
from carpool.train.run.schedules import choose_schedule, rides_first
from carpool.train.run.stages import choose_stages
from carpool.train.run.state import RunState
from carpool.train.run.step import Objective, make_optimizer
from carpool.train.run.tiers import disk_folder, make_tiers
from carpool.train.run.transports import TRANSPORT_KIND, choose_way
from carpool.transport import TransportOptions, check_codecs, check_transport, set_topology

# What a bias moves by in a step, if nobody says: DeepSeek-V3, arXiv 2412.19437, section 4.2.
DEEPSEEK_RATE = 0.001


class Setup(RunState):
    """Makes a run's state. All ranks construct it alike.

    Args:
        compare_with: a transport whose step times are compared at the end.
        command: what the user typed, for the record.
        fixed: settings that the user has said, by SECTION.KEY; a plan leaves them.

    Raises:
        ValueError: a configuration, data or checkpoint that cannot be used.
    """

    def __init__(
        self, config: Config, compare_with: str | None, command: str, fixed: Collection[str] = frozenset()
    ) -> None:
        resume, saved = self._prepare(config, compare_with, fixed)
        self._read_data()
        self._build_model()
        self._set_routing(saved)
        self._set_rides()
        self._set_objective()
        self._resume(resume)
        self.placement = Placement(
            self.config,
            self.model,
            self.optimizer,
            self._facts(),
            self.folder,
            lambda text: self.display.say(text),
            lambda *args, **fields: self.recorder.write(*args, **fields),
            saved,
            resume,
        )
        self._open_records(command, resume)

    def _prepare(
        self, config: Config, compare_with: str | None, fixed: Collection[str] = (), resumes: bool = True
    ) -> tuple[Path | None, dict[str, Any]]:
        """(the checkpoint to go on from, what it says beside weights); all else is the state so far.

        Args:
            resumes: it may go on from a checkpoint."""
        device, training = rank_device(), config.training
        self.memory_before, self.compare_with = peak_memory(device), compare_with
        self.folder = Path(training.output_dir)
        if why := gather(why_not_writable(self.folder) if dist.get_rank() == 0 else None)[0]:
            raise ValueError(f"training.output_dir = {self.folder}: {why}; choose another folder")
        self.checkpoints = CheckpointManager(self.folder, training.save_total_limit)
        check_trackers(training.report_to)
        if training.torch_compile:
            check_backend(training.torch_compile_backend)
        # As far as one rank can tell alone; together they look again when the model is there.
        for name in (config.moe.transport, compare_with or "auto"):
            check_transport(name, None)
        machine = find_machine(config.parallelism, device)

        def find_checkpoint() -> tuple[Path | None, dict[str, Any]]:
            found = checkpoint_to_resume(training.resume_from_checkpoint, self.folder, self.checkpoints)
            return found, read_run_state(found) if found is not None else {}

        resume, saved = from_rank_0(find_checkpoint) if resumes else (None, {})
        decisions = decisions_of([resume.parent.parent, self.folder] if resume is not None else [])
        self.tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
        blueprint = Blueprint.of_config(config, self.tokenizer)
        super().__init__(prepare(config, machine, blueprint, decisions, fixed, measure_on_small_model))
        # Advice takes a while, and the answer is the same.
        from_rank_0(lambda: check_fits(self.estimate, self.likely_transport, self.dense.answer, self.rank_memory))
        return resume, saved

    def _read_data(self) -> None:
        config, training = self.config, self.config.training
        self.corpus = self._make_corpus()
        self._check_vocabulary()
        train, held_out = train_sequences(self.corpus, config.data), eval_sequences(self.corpus, config.data)
        if train.packed and (why := why_not_packed(self.blueprint.model)) is not None:
            raise ValueError(f'{why}, so examples cannot be packed: set data.packing="off" (one in a sequence)')
        if config.moe.move_sequences is not None and (train.packed or config.data.packing == "off"):
            raise ValueError(
                "moe.move_sequences moves sequences of running text (data.packing = 'stream'), not of examples, whose "
                "masks and padding would have to move, too: leave one of them out"
            )
        self.sequences = train
        dp_rank = self.degrees.dp_rank(self.rank)
        share = {"dp_size": self.degrees.dp, "dp_rank": dp_rank, "pad_id": self.tokenizer.eos_id}
        loader = TrainLoader(
            train,
            batch_size=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            seed=training.seed,
            shares=self.batch_sizes,
            **share,
        )
        steps_per_epoch = loader.num_sequences / loader.global_batch_size
        self.config = config.model_copy(update={"training": training.in_steps(steps_per_epoch)})
        self.loader = Prefetch(loader, self.device)
        self.eval_loader = EvalLoader(
            held_out,
            batch_size=training.per_device_eval_batch_size,
            max_sequences=config.data.eval_max_sequences,
            **share,
        )

    def _check_vocabulary(self) -> None:
        """Chat templates may write tokens that were added to a tokenizer, and not to the model."""
        if self.corpus.train_marks is None:
            return
        largest = max(int(tokens.max()) for tokens in (self.corpus.train, self.corpus.eval) if len(tokens))
        if largest >= (vocabulary := self.blueprint.vocab_size):
            raise ValueError(
                f"the tokenizer makes token {largest} of data.train, but the model has {vocabulary} tokens; take the "
                "model's own tokenizer and chat template"
            )

    def _make_corpus(self) -> Corpus:
        config = self.config
        return corpus.prepare(
            config.data,
            self.tokenizer,
            config.model.path,
            build=int(os.environ.get("LOCAL_RANK", "0")) == 0,
            barrier=dist.barrier,
        )

    def _build_model(self) -> None:
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
            self.adapted = add_adapter(self.model, config.adapter, training.seed, self.dense.answer == "replicate")
        if self.dense.answer == "replicate":
            replicate_dense(self.model, self.bf16)

    def _set_routing(self, saved: dict[str, Any]) -> None:
        """Where experts live, and which of a token's choices count. `saved`: state of the checkpoint."""
        moe = self.config.moe
        # Before slots are filled, and before there is a transport: both ask which ranks share a node.
        group = next(iter(rides(self.model).values())).group
        self.ep_topology = self.machine.topology.of(ranks_of(group))
        set_topology(group, self.ep_topology)
        layouts, self.layout_source = first_layouts(self.config, rides(self.model), saved)
        set_layout(self.model, layouts)
        if moe.router_float32:
            route_in_float32(self.model)
        # Before a checkpoint is loaded: similarities are of what the run started from, also when it goes on.
        self.limits_lossy = limit_routing(self.model, moe.limits(self.ep_topology))
        self.limits_lossy += drop_choices(self.model, moe.drops, top_k_of(self.model))
        self.bias = self._bias_balance()

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
        config, training, moe = self.config, self.config.training, self.config.moe
        self.most_tokens = most_tokens(config, self.degrees)
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
        hidden, top_k = self.blueprint.row_size, self.blueprint.top_k
        codecs = config.codec.codecs.for_rows_of(self.element_size)
        layer, options, device = self.rides[0], TransportOptions(self.most_tokens, codecs), self.device
        self.transport_choice = choose_way(
            moe.transport,
            layer,
            top_k,
            hidden,
            options,
            device,
            self.decisions,
            element_size=self.element_size,
            hardware=self.machine.hardware,
        )
        options = replace(transport_options(config, self.degrees, self.transport_choice.answer), codecs=codecs)
        own_forward = any(own.compute is None for own in self.rides)
        self.options, note = options.settled(layer.group, top_k, hidden, own_forward)
        if note:
            noted = replace(self.transport_choice, why=f"{self.transport_choice.why}; {note}")
            self.transport_choice = self.decisions.add(TRANSPORT_KIND, noted)
        set_transport(self.model, self.transport_choice.answer, options=self.options)
        for own in self.rides:
            own.prepare(top_k, hidden)
        if self.compare_with is not None:
            check_transport(self.compare_with, self.rides[0].group)
            if self.compare_with != "auto":
                check_codecs(self.compare_with, codecs)
        measured: dict[str, Any] = {
            "tokens": self.degrees.tokens_per_rank(training.per_device_train_batch_size * config.data.sequence_length),
            "top_k": top_k,
            "dtype": torch.bfloat16 if self.bf16 else self.model.dtype,
            "device": self.device,
            "decisions": self.decisions,
        }
        self.stages = choose_stages(moe.expert_stages, self.rides, **measured)
        if self.stages is not None:
            set_experts(self.model, moe.experts, choices=self.stages.answer, **moe.expert_options)
        self.schedule = choose_schedule(moe.asked_schedule(), self.rides, hidden=hidden, **measured)
        compute_shared_beside(self.model, self.schedule.answer.name != "none")
        for own in self.rides:
            own.prepare(top_k, hidden)
        if training.torch_compile:
            compile_layers(self.model, training.torch_compile_backend)
        if config.memory.dense == "offload":
            offload_layers(self.model)
        self.watchdog = Watchdog(lambda: buffers_of_rides(self.rides))

    def _set_objective(self) -> None:
        training, moe = self.config.training, self.config.moe
        coef = moe.router_aux_loss_coef
        settings: dict[str, Any] = dict(
            top_k=self.blueprint.top_k,
            aux_coef=getattr(self.model.config, "router_aux_loss_coef", 0.0) or 0.0 if coef is None else coef,
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
        self.consumed, self.away = make_tiers(self)
        self.metrics = RideMetrics(self.model, None if self.pipeline is None else self.pipeline.moe_layers)
        self._set_graphs()
        # Drop-out and the like differ between ranks with different tokens, and only between them.
        torch.manual_seed(training.seed + self.degrees.dp_cp_rank(self.rank))

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
        asked, self.no_graphs = self.config.training.cuda_graphs, "training.cuda_graphs = 'off'"
        if asked == "off":
            note_graphs(self.decisions, False, self.no_graphs)
            return
        self.no_graphs = why_no_graphs(self.config, self.model, self.rides, self.schedule.answer.name)
        if self.pipeline is not None:
            self.no_graphs = self.no_graphs or "stages of a pipeline wait for each other"
        # NCCL wants an operation captured by all ranks or by none, and Nsight may watch one of them.
        if any(gather(NSIGHT)):
            self.no_graphs = self.no_graphs or "Nsight watches, and a graph has no names of layers"
        if self.no_graphs is None:
            self.objective.graphs = StepGraphs(
                self.model, self.rides, self.objective.micro_batch, partial(record_graphs, self), asked == "on"
            )
        elif asked == "on":
            raise ValueError(f"training.cuda_graphs = 'on', but steps cannot be captured: {self.no_graphs}; use 'auto'")
        note_graphs(self.decisions, None if self.no_graphs is None else False, self.no_graphs)

    def _resume(self, resume: Path | None) -> None:
        """What changes from step to step: from the start, or as the checkpoint has it."""
        training = self.config.training
        self.step = 0
        # Both go into checkpoints: a resumed run's summary is of the whole run.
        self.totals = {"tokens": 0, "bytes_remote": 0, "bytes_remote_alltoall": 0}
        self.losses = {"final_loss": None, "first_eval_loss": None, "final_eval_loss": None}
        if resume is not None:
            hooks: dict[str, Any] = {}
            if not is_logical(self.model):
                hooks = {
                    "from_logical": partial(physical_order, self.model),
                    "logical_like": partial(logical_like, self.model),
                }
            state = load(resume, self.model, self.optimizer, **hooks)
            self.step, self.totals, self.losses = state["step"], state["totals"], state["losses"]
            self.loader.load_state_dict(state["loader"])
            if self.consumed is not None and state.get("norm") is not None:
                self.consumed.norm.fill_(state["norm"])
        self.start = self.saved_at = self.step
        self.last_step = min(training.steps, training.stop_at_step or training.steps)
        if self.step >= self.last_step:
            raise ValueError(
                f"{resume} is at step {self.step} already, and this run ends at step {self.last_step}: nothing to do; "
                "raise training.max_steps (or training.stop_at_step) to go on"
            )

    def _facts(self) -> Facts:
        """What the cost of a layout depends on in this run."""
        layer, training = self.rides[0], self.config.training
        speeds = self.config.parallelism.rank_speeds
        tokens = training.per_device_train_batch_size * self.config.data.sequence_length
        return Facts(
            transport=self.transport_choice.answer,
            topology=self.ep_topology,
            tokens=self.degrees.tokens_per_rank(tokens),
            micro_batches=training.gradient_accumulation_steps,
            top_k=self.blueprint.top_k,
            hidden=self.blueprint.row_size,
            element_size=self.element_size,
            codecs=self.options.codecs,
            expert_elements=layer.layout.slices
            * sum(math.prod(parameter.shape[1:]) for parameter in layer.experts.parameters()),
            hardware=self.machine.hardware,
            speeds=tuple(speeds[rank] for rank in ranks_of(layer.group)) if isinstance(speeds, tuple) else (),
        )

    def _open_records(self, command: str, resume: Path | None) -> None:
        """From here on, files are written."""
        config, training = self.config, self.config.training
        self.flops = flops_per_token(self.blueprint.size, config.data.sequence_length)
        self.peak, self.peak_source = peak_flops(self.device, training.peak_flops)
        self.step_records = []
        self.stop = StopRequest()
        # What could not be written so far and may be yet, by name.
        self.unwritten = {}

        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        settings = config.model_dump(mode="json")
        self.recorder = Recorder(
            self.folder,
            self.main,
            training.report_to,
            settings,
            training.steps,
            say=lambda text: self.display.say(text),
            restore=lambda: write_files(self, self.info),
        )
        self.display = Display(self.main, self.last_step, self.step)
        self.info = write_run(self, command, resume)
        self.recorder.write("layout", self.step, **self.layouts().to_dict())
        say_hello(self, resume)
        self.watchdog.start()


class _SmallSetup(Setup):
    """A model of a few layers, in the places of a run, for measurements before it. Nothing is written."""

    def __init__(self, config: Config, machine: Machine, model: PreTrainedConfig) -> None:
        self.compare_with = None
        RunState.__init__(self, prepare(config, machine, Blueprint.of(model), decisions_of([])))
        self._build_model()
        self._set_routing({})
        self._set_rides()
        self._set_objective()


def measure_on_small_model(config: Config, machine: Machine, blueprint: Blueprint) -> Times:
    """What each policy of what is kept costs a run, by steps of a few of its layers. All ranks together."""
    device = rank_device()
    leave_groups = groups_before(device)
    layers = decoder_layers(blueprint.model)
    experts = blueprint.model.get_submodule(next(iter(blueprint.expert_counts)))
    first = next(n for n, layer in enumerate(layers) if any(one is experts for one in layer.modules()))
    small = _SmallSetup(small_config(config), machine, small_model(blueprint.model.config, first))
    times = measure_policies(small, open_items(config), len(layers), len(blueprint.expert_counts))
    del small
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    leave_groups()
    return times
