"""What a run will need, before it runs: memory per rank, parameters, operations. All of it is predicted.

Parameters, gradients and the optimizer's state are exact sums of what each rank holds. The rest follows from shapes,
with these assumptions, which are where an estimate goes wrong:

    gathered      one layer's experts of a rank in full beside the shards, and the next layer's, which is prefetched;
                  the gradients of one layer's experts in full, before they are reduced
    activations   a decoder layer keeps 8 tensors of T x H (norms, residuals) and 8 of T x heads * head size: 4 of
                  queries and outputs, 4 of keys and values, which may have fewer heads; its experts keep the received
                  rows and the pre-activation; one layer's products and their gradients pass.
                  Policies of [memory] change what is kept (`carpool.planner.kept`)
    logits        of the tokens that go at once (training.loss_chunk), and the gradient of the output layer's weight in
                  float32; on a CPU their gradient in float32. Where all go at once: softmax and gradient in float32
    transport     nvlink: one lease of buffers (schedules that overlap rides take more). Others: of one layer's ride,
                  rows packed, arrived, summed and sent back
    process       on a CPU: 60 MiB of code, threads and buffers that every rank takes once it trains
    allocator     on a CPU: 0.6 of what a step takes and frees (gradients, activations, logits, transport), which the C
                  library keeps in pieces of the wrong sizes

The last two were measured with models of 2 to 28 M parameters on 1 and 2 ranks, whose peaks are then predicted within
20 %. They are for CPUs, where `memory_peak_bytes` is the resident set; on GPUs it is PyTorch's own count.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping
from functools import partial

import torch
from transformers import PreTrainedModel

from carpool.hf.build import experts_modules
from carpool.hf.head import why_whole
from carpool.hf.sizes import head_sizes
from carpool.kernels.cross_entropy import piece_size
from carpool.memory.optimizer.streamed import TILE_BYTES
from carpool.parallel.degrees import Degrees
from carpool.planner.kept import LayerSizes, kept_bytes
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import load_tokenizer
from carpool.train.launch.start import local_ranks, use_cuda
from carpool.train.launch.world import find_world
from carpool.train.moving.layouts import check_layout_file
from carpool.train.run.dense import decide_dense, rank_memory
from carpool.train.run.flops import ModelSize, flops_per_token, model_size
from carpool.train.run.model import expert_counts, meta_model, model_source, top_k_of
from carpool.train.run.room import transport_options
from carpool.transport import TRANSPORTS, check_transport, choose_transport, find_transport

Memory = dict[str, int]
STORED = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a rank on a CPU; see above.
PROCESS_BYTES, FREED_SHARE = 60 * 2**20, 0.6
# Libraries: smaps_rollup of 1, 2 and 4 processes after the imports of a run (torch 2.13, transformers 5.23).
NOT_COUNTED = {
    True: "the CUDA context, NCCL's buffers and compiled kernels (assumed: 1 to 2 GB a GPU), what PyTorch's allocator "
    "reserves beyond its tensors, evaluation with larger batches than training",
    False: "libraries loaded before the run (measured: 270 MiB a rank, and 150 MiB that the ranks of a machine share), "
    "the corpus in memory, evaluation with larger batches than training",
}


def estimate_memory(
    size: ModelSize,
    degrees: Degrees,
    config: Config,
    model: PreTrainedModel,
    num_experts: int,
    bf16: bool,
    transport: str = "dedup",
    cuda: bool = False,
    dense: str = "fsdp",
) -> Memory:
    """Predicted bytes of each component on one rank, and their total.

    Args:
        model: for its shapes only; may be on the meta device.
        num_experts: E.
        transport: the one that is used, not "auto".
        cuda: on a GPU, where `NOT_COUNTED` comes on top.
        dense: "fsdp" or "replicate", as `parallelism.dense`.

    Returns:
        parameters, gradients, optimizer, activations, logits, transport; on a CPU process and allocator; total.
    """
    text = model.config.get_text_config()
    stored = STORED[config.model.dtype or "float32"]
    computed = 2 if bf16 else stored
    dense_own = math.ceil((size.total - size.experts) / degrees.dense_shards)
    experts_own = math.ceil(size.experts / degrees.expert_shards)
    own = dense_own + experts_own
    # Whole parameters and the sums of their gradients, beside the shards.
    whole = 0 if dense == "fsdp" else size.total - (size.experts if degrees.ep > 1 else 0)
    reduced = 4 if bf16 else stored
    moe_layers = len(experts_modules(model))
    layer_experts = math.ceil(size.experts / degrees.ep / moe_layers)
    # Two layers' experts in full beside the shards, if FSDP shards or casts them at all.
    gathered = 0
    if degrees.efsdp > 1 or computed != stored:
        gathered = 2 * layer_experts * computed

    tokens = config.training.per_device_train_batch_size * config.data.sequence_length
    hidden, top_k = text.hidden_size, top_k_of(model)
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    way = find_transport(transport)
    copies = way.copies_per_token(num_experts, top_k, degrees.ep)
    rows, pairs = tokens * copies, tokens * top_k
    heads = getattr(text, "num_attention_heads", 0)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    sizes = LayerSizes(
        text.num_hidden_layers, moe_layers, hidden, width, top_k, heads, key_heads, max(head_sizes(text)), computed,
        copies,
    )  # fmt: skip
    # Products and gradients of a layer's pairs come and go.
    passing = pairs * (hidden + 3 * width) * computed
    kept = kept_bytes(sizes, tokens, policies_of(config))
    activations = sum(size for item, size in kept.items() if item != "host") + passing
    if config.moe.schedule == "two-batch" and config.training.gradient_accumulation_steps > 1:
        # Two micro-batches are in the model at the same time.
        activations = 2 * activations - passing
    words, chunk = text.vocab_size, config.training.loss_chunk
    if chunk == 0 or degrees.tp > 1 or why_whole(model) is not None:
        logits = (computed + 2 * 4) * tokens * words
    else:
        at_once = min(tokens, chunk or piece_size(tokens, words))
        logits = (computed + (0 if cuda else 4)) * at_once * words + (4 + computed) * words * hidden
    # Where gradients are consumed, those of experts go layer by layer.
    kept_gradients = own if config.training.gradients == "kept" else dense_own
    state = int(own * state_bytes(config))
    rides = int(4 * rows * hidden * computed)
    if buffers := way.buffer_bytes(transport_options(config, degrees, transport), degrees.ep, hidden, computed, top_k):
        rides = buffers
    # Of experts in host memory, three layers' are here at most.
    stored_own = own if config.memory.experts == "device" else dense_own + min(experts_own, 3 * layer_experts)
    memory = {
        "parameters": stored_own * stored + gathered + whole * computed,
        "gradients": kept_gradients * stored + layer_experts * computed + whole * reduced,
        "optimizer": state if config.training.optimizer_state == "device" else min(state, 2 * TILE_BYTES),
        "activations": activations,
        "logits": logits,
        # All layers share it.
        "transport": rides,
    }
    if not cuda:
        freed = memory["gradients"] + memory["activations"] + logits + rides
        memory |= {"process": PROCESS_BYTES, "allocator": int(FREED_SHARE * freed)}
    return {**memory, "total": sum(memory.values())}


def policies_of(config: Config) -> dict[str, str]:
    """The policy of each item of `carpool.planner.kept`."""
    training, memory = config.training, config.memory
    return {
        "rows": memory.rows,
        "hidden": memory.hidden,
        "dense": "recompute" if training.gradient_checkpointing else "keep",
        "sums": "recompute" if training.checkpoint_rides == "repeat" else "keep",
    }


def host_bytes(size: ModelSize, degrees: Degrees, config: Config) -> int:
    """What a rank keeps in host memory, but for activations."""
    dense_own = math.ceil((size.total - size.experts) / degrees.dense_shards)
    experts_own = math.ceil(size.experts / degrees.expert_shards)
    found = 0.0
    if config.training.optimizer_state == "host":
        found += (dense_own + experts_own) * state_bytes(config)
    if config.memory.experts == "host":
        found += experts_own * STORED[config.model.dtype or "float32"]
    return int(found)


def state_bytes(config: Config) -> float:
    """What the optimizer keeps of a parameter; see `carpool.memory.optimizer.adamw`."""
    dtype, training = config.model.dtype or "float32", config.training
    if not training.one_pass(dtype):
        return 2 * STORED[dtype]
    moments = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}[training.optimizer_moments]
    return 2 * moments + (2 if dtype == "bfloat16" else 0)


def dry_run(config: Config, sources: Mapping[tuple[str, str], str] | None = None) -> str:
    """The resolved configuration and what it will need, as text. Reads no data and no weights, starts no ranks.

    Args:
        sources: as `carpool.train.config.load.Resolved` has them.

    Raises:
        ValueError: whatever would stop the run before its first step, as far as this machine can tell.
    """
    world = find_world(os.environ)
    ranks = world.world_size if world is not None else local_ranks(config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.eos_token)
    source = model_source(config, tokenizer)
    model = meta_model(source)
    counts = expert_counts(model)
    degrees = config.parallelism.resolve(ranks, min(counts.values()))
    check_layout_file(config, model.config.model_type, counts, degrees.ep)
    size = model_size(model, counts, top_k_of(model))
    bf16 = use_cuda(config) if config.training.bf16 is None else config.training.bf16
    cuda = use_cuda(config)
    transport, why = likely_transport(config, degrees, model)
    predict = partial(estimate_memory, size, degrees, config, model, max(counts.values()), bf16, transport, cuda)
    room = rank_memory(cuda, ranks)
    dense, why_dense = decide_dense(config, degrees, lambda one: predict(one)["total"], room)
    memory = predict(dense)
    tokens = (
        config.training.per_device_train_batch_size
        * config.training.gradient_accumulation_steps
        * degrees.dp
        * config.data.sequence_length
    )
    lines = [
        config.to_toml(sources=sources),
        f"# {type(model).__name__}: {size.total:,} parameters, {size.active:,} active per token",
        f"# {ranks} ranks: {degrees}",
        f"# {tokens:,} tokens per step, {flops_per_token(size, config.data.sequence_length):,} operations per token",
        f"# dense parameters: {dense}: {why_dense}",
        f"# transport {transport}: {why}",
        "# predicted memory of one rank:",
        *(f"#   {name:<12} {_mib(value):>12}" for name, value in memory.items()),
        *(f"#   {line}" for line in textwrap.wrap(f"not counted: {NOT_COUNTED[cuda]}", 100)),
    ]
    return "\n".join(lines)


def likely_transport(config: Config, degrees: Degrees, model: PreTrainedModel) -> tuple[str, str]:
    """What the ranks will choose, and why, as far as this process can tell without them."""
    name, hidden = config.moe.transport, model.config.get_text_config().hidden_size
    check_transport(name, None)
    unfit: dict[str, str] | None = None
    if use_cuda(config) and degrees.ep > 1:
        several = "its ranks are on several hosts" if degrees.ep > torch.cuda.device_count() else None
        reasons = {
            cls.name: several
            or cls.why_not_automatic(transport_options(config, degrees, cls.name))
            or cls.why_no_rows(hidden, 2)
            or cls.why_not(None)
            for cls in (TRANSPORTS[one] for one in TRANSPORTS)
            if cls.automatic and not cls.anywhere
        }
        unfit = {one: reason for one, reason in reasons.items() if reason is not None}
    return choose_transport(name, degrees.ep, top_k_of(model), unfit)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
