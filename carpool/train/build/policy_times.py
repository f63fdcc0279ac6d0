"""What each policy of each kept item costs, measured: steps of a model of a few layers, under one policy after another.

    all kept              forward and backward of 3 layers            21.0 ms
    rows = resend                                                     22.8 ms     0.6 ms a layer
    hidden = recompute                                                23.1 ms     0.7 ms a layer
    dense = recompute                                                 26.4 ms     1.8 ms a layer

The layers are the run's own, with its widths, its micro-batch, its ranks and its transport, and random weights and
tokens. A difference to the time in which all is kept, by the number of layers, is what a policy costs. Costs are added:
copies of two items that are offloaded share a link, which is not measured.

Where steps of the run are CUDA graphs, these are, too: to ask for copies one by one may cost the host more than copies
cost such a run. What else a run adds is left out: the optimizer, compiled layers. It changes both times alike.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from transformers import PreTrainedConfig

from carpool.activations import ActivationPolicies
from carpool.hf import set_activation_policies
from carpool.hf.architecture_changes import row_size
from carpool.hf.decoder_layers import offload_layers, recompute_layers
from carpool.hf.seam.expert_rides import capacities_of_rides
from carpool.hf.seam.find_modules import decoder_layers
from carpool.hf.step_graphs import EAGER_STEPS
from carpool.metrics.host import timed
from carpool.parallel.replicated import replicated
from carpool.planner.candidate import POLICIES
from carpool.train.blueprint import Blueprint
from carpool.train.build.assemble import Built, build
from carpool.train.config.schema import Config
from carpool.train.launch.machine import Machine, rank_device
from carpool.train.plan.memory_fit import Times, open_items
from carpool.train.plan.resolve import Plan, resolve
from carpool.train.plan.start_checks import decisions_of
from carpool.train.steps.capacity import grow_if_short

WARM_UP, ROUNDS = 2, 3
LAYERS = 3
WORDS = 256


def measure_on_small_model(config: Config, machine: Machine, blueprint: Blueprint) -> Times:
    """What each policy of what is kept costs a run, by steps of a few of its layers. All ranks together."""
    device = rank_device()
    leave_groups = groups_before(device)
    layers = decoder_layers(blueprint.model)
    experts = blueprint.model.get_submodule(next(iter(blueprint.expert_counts)))
    first = next(n for n, layer in enumerate(layers) if any(one is experts for one in layer.modules()))
    model = Blueprint.of(small_model(blueprint.model.config, first))
    plan = resolve(small_config(config), machine, model, decisions_of([]))
    small = build(plan, {})
    times = measure_policies(plan, small, open_items(config), len(layers), len(blueprint.expert_counts))
    del small
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    leave_groups()
    return times


def small_config(config: Config) -> Config:
    """What is measured of a run: one micro-batch, with nothing around it."""
    alone = {
        "optimizer_in_backward": False, "grad_clipping": "exact", "optimizer_offload": "none",
        "gradient_accumulation_steps": 1, "torch_compile": "off", "resume_from_checkpoint": None,
        "cuda_graphs": "off" if config.training.cuda_graphs == "off" else "auto",
    }  # fmt: skip
    # Layouts and traces are of all layers.
    moe: dict[str, Any] = {"expert_kernels": "default", "layout": "contiguous"}
    if config.moe.schedule == "auto":
        moe["schedule"] = "none"
    memory = {"budget": None, "experts": "device", **dict.fromkeys(POLICIES)}
    changed: dict[str, Any] = {"training": alone, "moe": moe, "memory": memory}
    sections = {name: getattr(config, name).model_copy(update=one) for name, one in changed.items()}
    off = {"placement": type(config.placement)(), "distillation": type(config.distillation)()}
    return config.model_copy(update={**sections, **off})


def small_model(config: PreTrainedConfig, first: int) -> PreTrainedConfig:
    """A model of `LAYERS` layers with experts, and few words. `first`: of its layers, the first one with experts."""
    small: Any = copy.deepcopy(config)
    text = small.get_text_config()
    before, text.num_hidden_layers = text.num_hidden_layers, min(text.num_hidden_layers, first + LAYERS)
    for name, value in list(vars(text).items()):
        # Kinds of layers, one for each.
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[: text.num_hidden_layers])
    text.vocab_size = min(text.vocab_size, WORDS)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, name, None)
    return small


def measure_policies(plan: Plan, built: Built, given: Mapping[str, str | None], layers: int, moe_layers: int) -> Times:
    """Milliseconds that each open policy adds to a micro-batch of the whole model, on the slowest rank. All ranks
    together.

    Args:
        plan, built: of the small model, without a step so far. It cannot be used any more.
        given: policies that are no question, by item.
        layers, moe_layers: of the whole model."""
    device, model = built.device, built.model
    shape_BL = plan.config.micro_batch_shape
    generator = torch.Generator().manual_seed(plan.machine.rank)
    ids_BL = torch.randint(0, plan.blueprint.vocab_size, shape_BL, generator=generator)
    batch = {"input_ids": ids_BL.to(device), "labels": ids_BL.to(device)}
    tokens = batch["labels"][:, 1:].numel() * plan.degrees.dp_cp
    whole = replicated(model)
    capacities, graphs = capacities_of_rides(built.rides), built.objective.graphs

    def forget() -> None:
        if graphs is not None:
            graphs.forget()

    def take(policies: Mapping[str, str]) -> None:
        if graphs is not None:
            # Policies that cannot be captured cost what they cost eagerly, also in the run.
            graphs.try_again()
        _take(plan, built, policies)

    def micro_batch() -> None:
        while True:
            built.objective.accumulate([batch], tokens)
            if whole is not None:
                whole.finish()
            model.zero_grad(set_to_none=True)
            if not capacities or grow_if_short(capacities, device, forget) is None:
                return

    def least(count: int, warm_up: int = WARM_UP) -> float:
        """Milliseconds of the fastest micro-batch, on the slowest rank."""
        if graphs is not None:
            # The first replay comes with the capture.
            warm_up = EAGER_STEPS + 1
        return min([timed(micro_batch, device).ms for _ in range(warm_up + count)][warm_up:])

    base = {item: given.get(item) or "save" for item in POLICIES}
    if base["layer_activations"] == "offload":
        base["layer_activations"] = "save"
    ways = [base] + [base | one for one in _questions(given)]
    spent: dict[tuple[str, ...], float] = {}
    for number in range(ROUNDS):
        for way in ways:
            if way["layer_activations"] != "offload":
                take(way)
                key = tuple(way.values())
                spent[key] = min(spent.get(key, math.inf), least(1, 1 if number else WARM_UP))
    for way in ways:
        # Last: layers stay so.
        if way["layer_activations"] == "offload":
            take(way | {"layer_activations": "save"})
            offload_layers(model)
            spent[tuple(way.values())] = least(ROUNDS)
    # Graphs go before the process groups that they use (`groups_before`).
    forget()
    # Layers of the whole model over those that were measured.
    per_layer = layers / len(decoder_layers(model))
    found: Times = {item: {} for item in POLICIES}
    for way in ways[1:]:
        item = next(one for one in reversed(list(POLICIES)) if way[one] != base[one])
        without = base | ({"layer_activations": "recompute"} if item == "moe_outputs" else {})
        more = spent[tuple(way.values())] - spent[tuple(without.values())]
        found[item][way[item]] = max(0.0, more) * (
            per_layer if item == "layer_activations" else moe_layers / len(built.rides)
        )
    return found


def _questions(given: Mapping[str, str | None]) -> list[dict[str, str]]:
    """What is to be compared with all else kept."""
    asked = [
        {item: policy}
        for item in ("expert_inputs", "expert_activations", "layer_activations")
        for policy in POLICIES[item][1:]
        if given.get(item) is None
    ]
    repeats = given.get("moe_outputs") is None and given.get("layer_activations") in (None, "recompute")
    if repeats and "offload" not in (given.get("expert_inputs"), given.get("expert_activations")):
        asked.append({"layer_activations": "recompute", "moe_outputs": "recompute"})
    return asked


def _take(plan: Plan, built: Built, policies: Mapping[str, str]) -> None:
    """Let the next forward keep what these say. All ranks together."""
    kept: Any = policies["expert_inputs"], policies["expert_activations"]
    set_activation_policies(built.model, ActivationPolicies(*kept))
    if policies["layer_activations"] == "recompute":
        recompute_layers(built.model, policies["moe_outputs"] == "recompute")
    else:
        built.model.gradient_checkpointing_disable()
    hidden = row_size(built.model.config)
    for own in built.rides:
        own.prepare(plan.blueprint.top_k, hidden)


def groups_before(device: torch.device) -> Callable[[], None]:
    """What leaves all process groups that are made from now on: those of NCCL hold memory. All ranks together."""
    before = set(_world.pg_map)

    def leave() -> None:
        if device.type == "cuda":
            for group in [one for one in _world.pg_map if one not in before]:
                dist.destroy_process_group(group)

    return leave
