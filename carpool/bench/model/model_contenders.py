"""Who takes a training step in `carpool bench model`: from the same weights, on the same tokens, to the same loss.

    carpool                 the trainer itself (`carpool.train.run.loop.Run`), with a configuration as users write it
    carpool-compiled        the same with training.torch_compile
    transformers            transformers' own expert parallelism (`all_to_all`) with its grouped experts, FSDP2 through
                            its `DistributedConfig`, its loss, and what its Trainer does then: the norm over all meshes,
                            clipping, fused AdamW. With [adapter], peft on Transformers' model, on one rank
    transformers-compiled   the same with each decoder layer's forward compiled

A step is data, forward, loss over the whole vocabulary (and the balance loss, if the configuration has one), backward,
norm and clipping, AdamW. Tokens are drawn at random; what they are changes nothing about the time of a step, once
choices of experts are given.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.profiler import record_function
from transformers import PreTrainedModel

from carpool.hf.build_model import build_model
from carpool.hf.routing.router_answers import balanced_choices, force_choices
from carpool.hf.seam.expert_rides import buffers_of_rides
from carpool.hf.seam.find_modules import decoder_layers, experts_modules
from carpool.parallel.ranks import from_rank_0
from carpool.placement.trace import Trace
from carpool.planner.decisions.chosen import Decisions
from carpool.profile.kinds import LOSS, OPTIMIZER
from carpool.train.blueprint import Blueprint
from carpool.train.build.run_data import MakeCorpus, read_data
from carpool.train.config import Config
from carpool.train.data.corpus import Corpus
from carpool.train.data.tokenizer import Tokenizer, tokenizer_of
from carpool.train.launch.machine import find_machine, rank_device
from carpool.train.lora import add_adapter
from carpool.train.plan.division import distributed_config
from carpool.train.plan.resolve import Plan, resolve
from carpool.train.records.run_folder import CONFIG, INFO, LAYOUT, METRICS
from carpool.train.run.loop import record, step_numbers, update
from carpool.train.run.run import start_run

# Steps' worth of different tokens, which are then taken again.
DIFFERENT_STEPS = 8
# The step after which a run that moves experts first looks at the routing.
LOOK_AT = 2


class Contender(ABC):
    """One that takes steps."""

    config: Config

    @abstractmethod
    def take_step(self) -> tuple[float, float]:
        """(loss, norm of the gradient) of one step of all ranks."""

    @abstractmethod
    def state(self) -> State:
        """What it is, and what is known of its latest step."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model."""


@dataclasses.dataclass(frozen=True)
class State:
    """Attributes:
    what: it is, for people.
    load: of the fullest expert of a layer, over the mean, in the latest step; None if nobody counts.
    bytes_remote: that rides and copies of experts sent between ranks in the latest step; None if nobody counts.
    lossy: how it changes the model's function, as far as it knows.
    buffer_bytes: that it has allocated beside PyTorch's own memory.
    captured: its steps are CUDA graphs.
    """

    what: str
    load: float | None = None
    bytes_remote: int | None = None
    lossy: Sequence[str] = ()
    buffer_bytes: int = 0
    captured: bool = False


def random_corpus(plan: Plan, tokenizer: Tokenizer) -> Corpus:
    """Tokens drawn at random, from the whole vocabulary of the model."""
    training, length = plan.config.training, plan.sequence_length
    sequences = training.rank_sequences * plan.degrees.dp
    count = DIFFERENT_STEPS * sequences * (length - 1) + 1
    vocabulary = plan.blueprint.vocab_size
    tokens = np.random.default_rng(training.seed).integers(vocabulary, size=count, dtype=np.uint32)
    return Corpus(tokens, tokens[:0], 1, 0, f"random-{training.seed}-{vocabulary}-{count}", "random tokens")


def force_routing(model: nn.Module, plan: Plan, routing: str) -> None:
    """Force the choices of experts on this rank (`carpool.bench.model.model_contenders`)."""
    config, degrees, blueprint = plan.config, plan.degrees, plan.blueprint
    tokens = math.prod(config.micro_batch_shape) // degrees.cp
    rank = degrees.dp_cp_rank(plan.machine.rank)
    route(model, blueprint.expert_counts, blueprint.top_k, tokens, routing, rank, degrees.dp_cp)


class CarpoolContender(Contender):
    """The trainer, step by step.

    Raises:
        ValueError: a configuration that cannot be."""

    def __init__(self, config: Config, routing: str, command: str, make_corpus: MakeCorpus = random_corpus) -> None:
        self.run = run = start_run(config, None, command, make_corpus=make_corpus)
        self.config = run.config
        # What it says of its steps; the benchmark says more.
        run.records.display.close()
        run.records.display.console.quiet = True
        force_routing(run.built.model, run.plan, routing)
        if run.built.objective.graphs is not None:
            # The step that is profiled is one of those that are timed. Kinds of kernels are known by their names.
            run.built.objective.graphs.replays_watched = True
        if run.placement.on and run.placement.section.every is not None:
            # So that experts are placed while it warms up, and then as often as it says.
            run.step = max(0, run.placement.section.every - LOOK_AT)

    def take_step(self) -> tuple[float, float]:
        """As the trainer's loop takes it, its record included."""
        run, begin = self.run, time.perf_counter()
        run.step += 1
        losses, norm, _ = update(run)
        run.unrecorded = step_numbers(run, losses, norm, begin)
        if run.placement.decides(run.step):
            record(run)
        run.placement.after_step(run.step)
        return losses.loss, norm

    def state(self) -> State:
        record(self.run)
        run, built, plan = self.run, self.run.built, self.run.plan
        step, captured = run.records.steps[-1] if run.records.steps else {}, built.no_graphs is None
        graphs = 0 if built.objective.graphs is None else built.objective.graphs.bytes
        parts = [f"{plan.degrees}", f"data-parallel {plan.data_parallel.answer}", f"transport {built.transport.answer}"]
        parts += [f"schedule {built.schedule.answer}"]
        parts += ["layers compiled" if plan.candidate.compiled else "eager"]
        parts += ["CUDA graphs" if captured else f"no CUDA graphs ({built.no_graphs})"]
        return State(
            ", ".join(parts),
            float(step["load_max_over_mean"]) if step else None,
            int(step["bytes_remote"] + step["bytes_replicas"]) if step else None,
            list(run.records.info["lossy_reasons"]),
            sum(buffers.symmetric for buffers in buffers_of_rides(built.rides)) + graphs,
            captured,
        )

    def close(self) -> None:
        self.run.close()


class TransformersContender(Contender):
    """Transformers by itself, in the places of the same run.

    Raises:
        ValueError: a configuration that cannot be."""

    def __init__(self, config: Config, routing: str) -> None:
        self.device = rank_device()
        tokenizer = tokenizer_of(config)
        machine, blueprint = find_machine(config.parallelism, self.device), Blueprint.of_config(config, tokenizer)
        plan = resolve(config, machine, blueprint, Decisions(from_rank_0=from_rank_0))
        if plan.cut is not None:
            raise ValueError("transformers has no context parallelism (parallelism.cp_size)")
        self.plan, self.config, self.degrees = plan, plan.config, plan.degrees
        self.loader = read_data(plan, tokenizer, self.device, random_corpus).train
        self.model = self._build_model()
        force_routing(self.model, plan, routing)
        self.balance = self._balance()
        # Its own loss, in a range by which a profile knows it.
        self.model.loss_function = _InRange(self.model.loss_function)
        if plan.candidate.compiled:
            for layer in decoder_layers(self.model):
                layer.forward = torch.compile(layer.forward, backend=config.training.torch_compile_backend)
        self.optimizer = _their_optimizer(self.model, config)

    def _build_model(self) -> PreTrainedModel:
        config, training = self.config, self.config.training
        bf16 = training.computes_in_bf16(self.device.type == "cuda")
        parallel = dataclasses.replace(distributed_config(self.degrees, bf16), ep_implementation="all_to_all")
        if config.adapter.is_used and self.degrees.world_size > 1:
            raise ValueError("peft does not adapt the sharded experts of Transformers: use one rank")
        if config.adapter.base["base_dtype"] is not None:
            raise ValueError("Transformers does not store experts in adapter.base_dtype")
        model = build_model(
            self.plan.blueprint.source,
            distributed_config=None if config.adapter.is_used else parallel,
            dtype=getattr(torch, config.model.stored_dtype),
            seed=training.seed,
            attn_implementation=self.plan.attention,
            experts_implementation=config.model.experts_implementation,
        )
        if config.memory.layer_activations == "recompute":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.adapter.is_used:
            add_adapter(model, config.adapter, training.seed, replicate=False)
        return model

    def _balance(self) -> float:
        """What the model's balance loss is weighed with; 0: it has none."""
        coef, _ = self.plan.balance_loss
        if not coef or "output_router_logits" not in inspect.signature(self.model.forward).parameters:
            return 0.0
        self.model.router_aux_loss_coef = coef
        return float(coef)

    def take_step(self) -> tuple[float, float]:
        training = self.config.training
        batches = [
            {name: one.to(self.device, non_blocking=True) for name, one in batch.items()} for batch in next(self.loader)
        ]
        extra = {"output_router_logits": True} if self.balance else {}
        total = torch.zeros((), device=self.device)
        for batch in batches:
            out = self.model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False, **extra)
            (out.loss / len(batches)).backward()
            loss = out.loss.detach() - self.balance * out.aux_loss.detach() if self.balance else out.loss.detach()
            total += loss / len(batches)
        with record_function(OPTIMIZER):
            norm = _clip(self.model, training.max_grad_norm or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size(), float(norm)

    def state(self) -> State:
        names = {type(self.model.get_submodule(name)).__name__ for name in experts_modules(self.model)}
        experts = getattr(self.model.config, "_experts_implementation", None) or "eager"
        how = "peft" if self.config.adapter.is_used else "all_to_all"
        parts = [f"{self.degrees}", how, f"{experts} experts ({', '.join(sorted(names))})"]
        return State(", ".join([*parts, "layers compiled" if self.plan.candidate.compiled else "eager"]))

    def close(self) -> None:
        self.loader.close()


def make_contender(theirs: bool, config: Config, routing: str, command: str) -> Contender:
    """Build the trainer, or `theirs`. Collective."""
    if not theirs:
        if dist.get_rank() == 0:
            for file in (METRICS, INFO, CONFIG, LAYOUT):
                # Of an earlier benchmark, which would be taken for a run to be kept.
                (config.training.folder / file).unlink(missing_ok=True)
        dist.barrier()
        return CarpoolContender(config, routing, command)
    return TransformersContender(config, routing)


def free_memory(device: torch.device) -> None:
    """After the last reference to a contender is gone: give back what it held."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _InRange:
    """A loss function, in the range of the loss."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with record_function(LOSS):
            return self.function(*args, **kwargs)


def _meshes(model: nn.Module) -> dict[Any, list[nn.Parameter]]:
    """Parameters by mesh: neither one fused update nor one norm goes over several."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in (one for one in model.parameters() if one.requires_grad):
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return groups


def _their_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    training = config.training
    return torch.optim.AdamW(
        [{"params": parameters} for parameters in _meshes(model).values()],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        weight_decay=training.weight_decay,
        fused=True,
    )


def _clip(model: nn.Module, max_norm: float) -> torch.Tensor:
    """The norm before clipping, as transformers' Trainer takes it over several meshes (`_mixed_mesh_grad_norm`)."""
    groups = [[p for p in parameters if p.grad is not None] for parameters in _meshes(model).values()]
    norms = [get_total_norm([p.grad for p in parameters if p.grad is not None]) for parameters in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    if max_norm != math.inf:
        for parameters in groups:
            clip_grads_with_norm_(parameters, max_norm, total)
    return total


def check_routing(experts: dict[str, int], top_k: int, routing: str, world: int) -> None:
    """Raise ValueError if the routers of a model cannot be made to choose so; arguments as of `route`."""
    if routing == "learned":
        return
    if len(set(experts.values())) > 1:
        raise ValueError(f"--routing {routing}: this model's layers have different numbers of experts; use learned")
    if routing != "balanced":
        trace, num_experts = Trace.load(routing), next(iter(experts.values()))
        for rank in range(world):
            recorded_choices(trace, 0, 1, num_experts, top_k, rank, world)


def route(
    model: nn.Module, experts: dict[str, int], top_k: int, tokens: int, routing: str, rank: int, world: int
) -> None:
    """Force the choices of a model's routers, the same for all contenders.

    balanced   every expert serves equally many tokens of each rank, and choices differ from token to token and from
               layer to layer. Published speeds are measured so. Weights are the router's own
    learned    what the routers choose. Those of random weights are skewed as they come; nobody has balanced them
    TRACE      what a recording says (`carpool place` reads the same files). Its layers are taken in their order, again
               from the first where the model has more, and rank r takes the tokens of the sequences that the recording
               deals to it

    Args:
        experts: E by the name of the experts module, of the whole model.
        tokens: T, of one forward of this rank.
        routing: "balanced", "learned", or the file of a trace.
        rank, world: of all ranks; each has choices of its own.

    Raises:
        ValueError: as of `check_routing`, or a router that is not known.
    """
    check_routing(experts, top_k, routing, world)
    if routing == "learned":
        return
    trace = None if routing == "balanced" else Trace.load(routing)
    choices, num_experts = {}, next(iter(experts.values()))
    here = dict(model.named_modules())
    for number, name in enumerate(experts):
        if name not in here:  # another pipeline stage has the layer
            continue
        if trace is None:
            seed = 1_000_003 * (number + 1) + rank
            choices[name] = balanced_choices(tokens, num_experts, top_k, seed)
        else:
            choices[name] = recorded_choices(trace, number, tokens, num_experts, top_k, rank, world)
    device = next(model.parameters()).device
    force_choices(model, {name: expert_TK.to(device) for name, expert_TK in choices.items()}, num_experts)


def recorded_choices(
    trace: Trace, number: int, tokens: int, num_experts: int, top_k: int, rank: int, world: int
) -> torch.Tensor:
    """expert_TK (T, K) int64 of a layer of the model on a rank; tokens are taken again from the first if there are not
    enough.

    Raises:
        ValueError: the trace is of other sizes, or has nothing for this rank."""
    layer = trace.layer(number % trace.num_layers)
    if (layer.num_experts, layer.top_k) != (num_experts, top_k):
        raise ValueError(
            f"the trace chooses {layer.top_k} of {layer.num_experts} experts, and the model {top_k} of {num_experts}; "
            "give a trace of such a model, or --routing balanced"
        )
    expert_TK = torch.from_numpy(layer.expert_TK[layer.source_T(world) == rank].astype("int64"))
    if not len(expert_TK):
        raise ValueError(f"the trace has fewer sequences than there are ranks ({world}); record more of them")
    return expert_TK[torch.arange(tokens) % len(expert_TK)]
