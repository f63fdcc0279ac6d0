"""`carpool train --dry-run`: what a run will be and what it will need, as text that is a configuration file, too.

On this machine, or for the GPUs of another one, of which nothing need be here:

    carpool train --config sft.toml parallelism.num_ranks=64 --dry-run --gpu h100
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from carpool.hf.narrow import row_size
from carpool.hf.sequence_moves import check_moves
from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.parallel.pipeline import check_micro_batches
from carpool.planner.hardware import HARDWARE, Hardware, find_hardware, hardware_of
from carpool.planner.streaming import break_even_tokens
from carpool.plugins.nearest import nearest
from carpool.train.config.schema import Config, keys
from carpool.train.data.corpus import check_encoder
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.launch.start import local_ranks, use_cuda
from carpool.train.launch.world import find_world
from carpool.train.moving.layouts import check_layout_file
from carpool.train.run.dense import decide_dense, rank_memory
from carpool.train.run.estimate import MemoryEstimate, state_bytes
from carpool.train.run.fit import describe_fit
from carpool.train.run.flops import flops_per_token, model_size
from carpool.train.run.memory import decide_memory, with_policies
from carpool.train.run.model import (
    context_cut,
    divides_tokens,
    expert_counts,
    meta_model,
    model_source,
    top_k_of,
)
from carpool.train.run.plan import make_plan, planned_sections, with_settings
from carpool.train.run.transports import likely_transport

# GPUs of a node, where nobody says how many there are.
NODE = 8
NOT_COUNTED = {
    True: "evaluation with larger batches than training",
    False: "libraries loaded before the run (measured: 270 MiB a rank, and 150 MiB that the ranks of a machine share), "
    "the corpus in memory, evaluation with larger batches than training",
}


def dry_run(config: Config, sources: Mapping[tuple[str, str], str] | None = None, gpu: str | None = None) -> str:
    """The resolved configuration and what it will need, as text. Reads no weights, and of the data the first row
    alone; starts no ranks.

    Args:
        sources: as `carpool.train.config.load.Resolved` has them.
        gpu: the name of a GPU for which the run is meant; None: it is meant for this machine.

    Raises:
        ValueError: whatever would stop the run before its first step, as far as this machine can tell.
    """
    hardware = find_gpu(gpu) if gpu is not None else None
    cuda = hardware is not None or use_cuda(config)
    ranks = _ranks(config, hardware)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
    check_encoder(config.data, tokenizer, config.model.path)
    model = meta_model(model_source(config, tokenizer))
    counts = expert_counts(model)
    room = rank_memory(cuda, ranks) if hardware is None else int(hardware.capacity or 0)
    named = config.parallelism.hardware
    own = hardware or hardware_of(torch.cuda.get_device_name() if cuda else "cpu")
    rates = own if named is None else find_hardware(named)
    config, sources, planned = _planned(config, sources or {}, model, rates, ranks, hardware is not None, room)
    degrees = config.parallelism.resolve(ranks, min(counts.values()))
    config.check_supported(degrees.sizes)
    if degrees.pp > 1:
        check_micro_batches(config.parallelism.pp_schedule, degrees.pp, config.training.gradient_accumulation_steps)
    if config.moe.move_sequences is not None:
        check_moves(config.moe.move_sequences, len(counts), degrees.ep)
    check_layout_file(config, model.config.model_type, counts, degrees)
    divided, why_divided = divides_tokens(config, degrees, model)
    cut = context_cut(config, degrees, model)
    size = model_size(model, counts, top_k_of(model))
    bf16 = cuda if config.training.bf16 is None else config.training.bf16
    hidden = row_size(model.config)
    per_node = _per_node(config, ranks, hardware is not None)
    # The last node may have fewer.
    node_of = tuple(rank // per_node for rank in range(ranks))
    topology = Topology(node_of, node_of if rates.nvlink is not None else tuple(range(ranks)), "the settings")
    transport, why = likely_transport(
        config, degrees, hidden, top_k_of(model), cuda=cuda, topology=topology, hardware=rates, here=hardware is None
    )
    estimate = MemoryEstimate(config, degrees, model, bf16, cuda)
    policies, why_policies = decide_memory(estimate, transport, rates)
    estimate = estimate.changed(with_policies(config, policies))
    room = min(room, config.memory.budget_bytes or room)
    dense, why_dense = decide_dense(config, degrees, lambda one: estimate(transport, one)["total"], room)
    memory = estimate(transport, dense)
    training = config.training
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    tokens = sequences * degrees.dp * config.data.sequence_length
    flops = flops_per_token(size, config.data.sequence_length)
    lines = [
        f"{type(model).__name__}: {size.total:,} parameters, {size.active:,} active per token",
        *planned,
        f"{ranks} ranks{f' on {hardware.name}' if hardware is not None else ''}: {degrees}",
        *([f"sequence parallelism: {'on' if divided else 'off'}: {why_divided}"] if degrees.tp > 1 else []),
        *([f"context: {cut}"] if cut is not None else []),
        *_speeds(config, degrees),
        f"{tokens:,} tokens per step, {flops:,} operations per token",
        f"dense parameters: {dense}: {why_dense}",
        f"transport {transport}: {why}",
        f"memory: {', '.join(f'{item} {policy}' for item, policy in policies.items())}: {why_policies}",
        "predicted memory of one rank:",
        *(f"  {name:<12} {_mib(value):>12}" for name, value in memory.items()),
        *(f"  {line}" for line in textwrap.wrap(f"not counted: {NOT_COUNTED[cuda]}", 100)),
    ]
    if host := estimate.host_bytes(transport):
        lines.append(f"host memory of one rank: {_mib(host)}")
    if cuda:
        lines += _streaming(config, degrees, estimate, flops, rates)
    name = f"{room / 1e9:,.0f} GB" if cuda else f"{room / 1e9:,.1f} GB, a rank's share of this machine"
    lines += describe_fit(estimate, transport, dense, room, name)
    return config.to_toml(sources=sources) + "\n" + "\n".join(f"# {line}" for line in lines)


def _per_node(config: Config, ranks: int, elsewhere: bool) -> int:
    """Ranks of a node, as the settings say; otherwise 8 elsewhere, and this machine is one node."""
    return config.parallelism.ranks_per_node or (min(NODE, ranks) if elsewhere else ranks)


def _planned(
    config: Config,
    sources: Mapping[tuple[str, str], str],
    model: PreTrainedModel,
    rates: Hardware,
    ranks: int,
    elsewhere: bool,
    room: int,
) -> tuple[Config, Mapping[tuple[str, str], str], list[str]]:
    """The configuration with what its plan says, where its values are from, and lines about it; as they are if nothing
    is left to a plan."""
    if not planned_sections(config):
        return config, sources, []
    fixed = [f"{section}.{key}" for section, _, key in keys() if (section, key) not in sources]
    per_node = _per_node(config, ranks, elsewhere)
    plan, why = make_plan(config, fixed, model, rates, world=ranks, per_node=per_node, memory=room)
    others = [f"  then {one.step_ms[1]:,.1f} ms: {one.label}" for one in plan.others]
    own = {(section, key): "the plan" for section, _, key in (one.partition(".") for one in plan.taken.settings)}
    return with_settings(config, plan.taken.settings), {**sources, **own}, [f"plan: {why}", *others]


def find_gpu(name: str) -> Hardware:
    """The profile of a GPU by its name, such as "h100" or "A100 PCIe".

    Raises:
        ValueError: none has this name, or its memory is not known."""
    known = {one.lower(): profile for one, profile in HARDWARE.items() if profile.capacity is not None}
    if name.lower() not in known:
        close = nearest(name.lower(), list(known))
        raise ValueError(
            f"--gpu {name} is not known{f'; did you mean {close}?' if close else ''}; known are {', '.join(known)}"
        )
    return known[name.lower()]


def _ranks(config: Config, hardware: Hardware | None) -> int:
    if hardware is not None:
        return config.parallelism.num_ranks or NODE
    world = find_world(os.environ)
    return world.world_size if world is not None else local_ranks(config)


def _speeds(config: Config, degrees: Degrees) -> list[str]:
    speeds = config.parallelism.rank_speeds
    if speeds is None:
        return []
    if not isinstance(speeds, tuple):
        return ["speeds of ranks: measured when the run starts; here they are equal"]
    sizes = config.parallelism.batch_sizes(config.training.per_device_train_batch_size, degrees)
    return [f"sequences in a micro-batch of each data-parallel rank, by speed: {', '.join(map(str, sizes))}"]


def _streaming(config: Config, degrees: Degrees, estimate: MemoryEstimate, flops: int, hardware: Hardware) -> list[str]:
    """From how many tokens the optimizer's state may lie in host memory for nothing."""
    state = estimate.trained * state_bytes(config)
    if not state:
        return []
    tokens = break_even_tokens(state, flops, hardware, "in the backward")
    return [
        f"optimizer state of {state / 1e9:,.1f} GB in host memory would cost no time from {tokens:,.0f} tokens of a "
        "rank and step, if parameters are updated in the backward (modelled)"
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
