"""The memory that a rank will need, before anything is built. All of it is predicted.

Parameters, optimizer state and the gradients of shards are exact sums of what each rank holds, and what decoder layers
keep is measured by the model's own forward without memory (`carpool.hf.activations`). The rest follows from shapes. A
step has three moments at which memory can be highest, and the estimate is of the highest:

    loss              all layers' activations; logits, or a piece of them and what stays of their gradients
    backward begins   all layers' activations; the gradients of the output layer; the work of one layer
    backward ends     one layer's activations; all gradients; the work of one layer

Assumptions, which are where an estimate goes wrong:

    balance       each rank gets the mean number of rows, each expert the mean number of tokens. Not temporaries of
                  transport nvlink, which are for the worst case, nor its arena, which has a quarter more than was kept
    one layer     of rides, backward: products, their gradients, rows, and the gradients of one layer's experts.
                  Under FSDP: a layer in full and the next one, which is gathered ahead; a layer's gradients as they are
                  computed and as they are reduced. With gradient checkpointing: the layer that is computed again
    transport     nvlink: one lease (schedules that overlap rides take more). Others: rows packed, arrived, summed, sent
    context       on GPUs: 0.5 GiB of CUDA context and kernels; NCCL: 0.3 GiB, and 0.2 for each further kind of group
    fragments     on GPUs: 3 % of what PyTorch's tensors take, which its allocator cannot use
    graphs        CUDA graphs of a step keep all that it takes, also between steps. What is computed eagerly beside them
                  takes memory of its own: the evaluation, of which one layer and a piece of the logits are there
    loading       experts that are to be in host memory are on the device first, before there is any step
    process       on CPUs: 60 MiB of code, threads and buffers that every rank takes once it trains
    allocator     on CPUs: 0.35 of what a step takes and frees, which the C library keeps in pieces of the wrong sizes

`memory_peak_bytes` of a run is PyTorch's own count on GPUs, hence without context, NCCL and fragments (`tensors_of`),
and the growth of the resident set on CPUs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from carpool.kernels.cross_entropy import piece_size
from carpool.memory.disk import BUFFERS
from carpool.memory.optimizer.streamed import TILE_BYTES, TILES
from carpool.parallel.consumed import HELD
from carpool.parallel.replicated import BUCKET_BYTES
from carpool.planner.held import (
    ARENA_ROOM,
    BESIDE_TENSORS,
    INDEX_BYTES,
    alone_bytes,
    beside_tensors,
    gradient_buffers,
    products_bytes,
)
from carpool.planner.kept import LayerSizes, kept_bytes
from carpool.train.config.schema import Config
from carpool.train.run.graphs import why_not_captured
from carpool.train.run.rank_sizes import STORED, RankSizes
from carpool.train.run.room import transport_options
from carpool.transport import find_transport

Memory = dict[str, int]
MiB, GiB = 2**20, 2**30
# On CPUs, beside PyTorch's tensors; see above.
PROCESS_BYTES, FREED_SHARE = 60 * MiB, 0.35


class _Moment(NamedTuple):
    """Bytes that are there at one moment of a step besides what always is."""

    gradients: float
    activations: float
    logits: float


class MemoryEstimate(RankSizes):
    """Predicts the memory of one rank of a run. Its arguments are those of `RankSizes`."""

    def changed(self, config: Config) -> MemoryEstimate:
        """The same of a run with other settings, on the same ranks."""
        return MemoryEstimate(config, self.degrees, self.model, self.cuda, self.nodes, self)

    def __call__(self, transport: str, dense: str) -> Memory:
        """Predicted bytes of each component on one rank when memory is highest, and their total.

        Args:
            transport: the one that is used, not "auto".
            dense: "fsdp" or "replicate", as `parallelism.dense`.

        Returns:
            parameters, gradients, optimizer, activations, logits, transport, copies (of experts that came from other
            ranks) if there are any, and loading where that is more; on GPUs context, nccl and fragments, and graphs if
            steps are captured; on CPUs process and allocator; total.
        """
        degrees, training = self.degrees, self.config.training
        dense_own = math.ceil(self.dense.total / degrees.dense_shards)
        dense_trained = math.ceil(self.dense.trained / degrees.dense_shards)
        experts_trained = math.ceil(self.experts.trained / degrees.expert_shards)
        replicated = dense == "replicate" and degrees.dp_cp > 1
        # With ep = 1 experts lie as dense parameters do.
        whole = (self.dense.total + (self.experts.total if degrees.expert_ranks == 1 else 0)) if replicated else 0
        whole_trained = (
            (self.dense.trained + (self.experts.trained if degrees.expert_ranks == 1 else 0)) if replicated else 0
        )

        gathered, reducing = self._in_full(replicated)
        reducing += min(BUCKET_BYTES, whole_trained * self.reduced)
        # Of experts in host memory or on disk, three layers' are here at most.
        here = experts_own = math.ceil(self.expert_bytes / degrees.expert_shards)
        if self.config.memory.experts != "device":
            stays = self.config.memory.experts_bytes[0]
            here = min(here, stays + 3 * math.ceil(self.expert_bytes / degrees.expert_ranks / self.moe_layers))
        # Those of whole parameters have buffers of their own.
        together = replicated and degrees.expert_ranks == 1
        own_whole = (dense_trained + (experts_trained if together else 0)) if replicated else 0
        own = 0 if replicated else dense_trained * self.stored
        if training.gradients == "kept" and not together:
            own += experts_trained * self.stored
        elif training.gradients == "consumed" and training.optimizer_state != "device":
            # Those whose update waits for copies: of this rank's part of the largest parameter.
            own += HELD * math.ceil(self.largest_expert / degrees.expert_shards) * self.stored
        of_whole = int(gradient_buffers(whole_trained, own_whole, self.stored, self.reduced))
        # In float32, whole on each rank or with their experts: value, gradient and two moments.
        adapters = self.adapters + self.expert_adapters
        own += 4 * adapters
        state = int(self.trained * state_bytes(self.config))
        if training.optimizer_state != "device":
            state = TILES * TILE_BYTES
        rides = self._rides(transport)
        copied, waiting, at_once = self._alone()
        layer = max(rides.products, self.scores) + rides.experts + copied + reducing
        kept, last_kept = self._kept(rides)
        logits, after_loss = self._logits()
        # Those of earlier micro-batches are there, and those in the tensors of a graph.
        captured = self.cuda and dense == "replicate" and self._captured(transport)
        before = own if training.gradient_accumulation_steps > 1 or captured else 0
        # Gradients of copies on their way home: of the micro-batch before, and of the layers before.
        kept += self.copies.late if training.gradient_accumulation_steps > 1 else 0
        last_kept += self.copies.late * (1 - 1 / self.moe_layers)
        highest = max(
            _Moment(before, kept, logits),
            _Moment(before, kept + layer, after_loss),
            _Moment(before, kept + at_once, after_loss),
            _Moment(own, last_kept + layer + waiting, 0),
            _Moment(own, last_kept + at_once, 0),
            key=sum,
        )
        memory = {
            "parameters": 4 * adapters + dense_own * self.stored + here + whole * self.computed + gathered,
            "gradients": int(highest.gradients) + of_whole,
            "optimizer": state + 8 * adapters,
            "activations": int(highest.activations),
            "logits": int(highest.logits),
            "transport": rides.buffers,
        }
        if self.copies.arrived:
            memory["copies"] = math.ceil(self.copies.arrived)
        if here < experts_own:
            memory["loading"] = max(0, dense_own * self.stored + experts_own - sum(memory.values()))
        tensors = sum(memory.values())
        if self.cuda:
            if captured:
                memory["graphs"] = int(self._evaluation(rides))
            groups = (
                (degrees.dp_cp > 1)
                + (degrees.expert_ranks > 1)
                + (degrees.tp > 1)
                + (degrees.cp not in (1, degrees.dp_cp))
                + (degrees.efsdp not in (1, degrees.dp_cp))
            )
            memory |= beside_tensors(tensors, degrees.world_size, groups)
        else:
            freed = int(sum(highest)) + (0 if _has_buffers(transport) else rides.buffers)
            memory |= {"process": PROCESS_BYTES, "allocator": int(FREED_SHARE * freed)}
        return {**memory, "total": sum(memory.values())}

    def host_bytes(self, transport: str) -> int:
        """What a rank keeps in host memory: state of the optimizer, experts, and activations that are offloaded."""
        state = self.trained * state_bytes(self.config) if self.config.training.optimizer_state == "host" else 0
        dense = sum(self.kept.layers) if self.config.memory.policies["dense"] == "offload" else 0
        experts = 0
        own = math.ceil(self.expert_bytes / self.degrees.expert_shards)
        if self.config.memory.experts == "host":
            experts = own
        elif self.config.memory.experts == "disk":
            # Buffers for layers that are read ahead; and what stays there.
            stays = self.config.memory.experts_bytes[1]
            buffers = (BUFFERS if self.experts.trained else 2) * own / self.moe_layers
            experts = math.ceil(buffers + stays if self.experts.trained else max(buffers, stays))
        return int(state) + experts + dense + self._rides(transport).host

    def disk_bytes(self) -> int:
        """What a rank keeps in files: state of the optimizer, and experts that are trained."""
        state = self.trained * state_bytes(self.config) if self.config.training.optimizer_state == "disk" else 0
        experts = 0
        if self.config.memory.experts == "disk" and (self.experts.trained or self.config.model.from_scratch):
            own = math.ceil(self.expert_bytes / self.degrees.expert_shards)
            experts = max(0, own - self.config.memory.experts_bytes[1])
        return int(state) + experts

    def _in_full(self, replicated: bool) -> tuple[int, int]:
        """Bytes of parameters that are gathered besides the shards, and of gradients on their way to the shards."""
        degrees, layers = self.degrees, len(self.kept.layers)
        head = self.words * self.hidden
        gathered = reducing = 0
        if degrees.efsdp > 1 and not (replicated and degrees.expert_ranks == 1) and degrees.dp_cp > 1:
            one = math.ceil(self.experts.total / degrees.expert_ranks / self.moe_layers)
            gathered += 2 * one * self.computed
            reducing += one * self.reduced if self.experts.trained else 0
        if degrees.dp_cp > 1 and not replicated:
            one = math.ceil(max(0, self.dense.total - head) / degrees.tp / layers)
            # The output layer is not given back between forward and backward.
            gathered += (2 * one + head) * self.computed
            reducing += one * (self.computed + self.reduced) if self.dense.trained else 0
        return gathered, reducing

    def _alone(self) -> tuple[float, float, float]:
        """As `alone_bytes`; nothing where FSDP shards the experts, or has nothing to do with them."""
        degrees, layer = self.degrees, math.ceil(self.experts.total / self.degrees.expert_ranks / self.moe_layers)
        if degrees.efsdp > 1 or degrees.expert_ranks == 1 or degrees.dp_cp == 1:
            return 0.0, 0.0, 0.0
        if degrees.dp_replicate == 1 and self.computed == self.stored:
            return 0.0, 0.0, 0.0
        copied, waiting, at_once = alone_bytes(layer, self.computed, self.reduced)
        return copied, *((waiting, at_once) if self.experts.trained else (0.0, 0.0))

    def _rides(self, transport: str) -> _Rides:
        config, degrees = self.config, self.degrees
        way = find_transport(transport)
        # A token chooses every slice of its experts, which are on neighbouring ranks.
        copies = degrees.etp * way.copies_per_token(self.num_experts, self.top_k, degrees.ep)
        top_k, width, ranks = self.top_k * degrees.etp, self.width // degrees.etp, degrees.expert_ranks
        tokens = degrees.tokens_per_rank(self.tokens)
        pairs, choices = tokens * top_k, min(self.top_k, -(-self.num_experts // degrees.ep))
        options = transport_options(config, degrees, transport)
        buffers = way.buffer_bytes(options, ranks, self.row, self.computed, top_k)
        in_buffers = buffers > 0 and degrees.expert_ranks > 1
        # Rows at home are the layer's input, which is kept anyway.
        away = 0.0 if degrees.expert_ranks == 1 else copies * ((ranks - 1) / ranks if in_buffers else 1)
        policies = config.memory.policies
        if policies["dense"] == "offload":
            # `host_bytes` adds what was measured.
            policies["dense"] = "keep"
        kept_of, arena, host = [], 0.0, 0
        for layers in (self.moe_layers, 1):
            sizes = LayerSizes(layers, layers, self.row, width, top_k, 0, 0, 0, self.computed, copies=away)
            found = kept_bytes(sizes, tokens, policies)
            rows = float(found["rows"] + found["hidden"])
            if in_buffers:
                # The arena is there all the time.
                rows = arena = arena or ARENA_ROOM * rows
            kept_of.append(rows + found["sums"] + layers * tokens * copies * choices * INDEX_BYTES)
            host = host or found["host"]
        # Backward: gradients of pre-activations and of activations, activations, and then dx in place of the second.
        most = tokens * ranks * choices if in_buffers else pairs
        products = products_bytes(most, width, self.row, self.computed)
        if not self.cuda:
            # Gradients are gathered, and each step of the activation's backward makes a tensor.
            products = pairs * (7 * width + self.row) * self.computed
        if config.memory.hidden == "recompute":
            products += 2 * pairs * width * self.computed
        experts = math.ceil(self.experts.trained / ranks / self.moe_layers) * self.computed
        if buffers and config.memory.rows == "resend":
            buffers *= 2
        exchanged = (
            0 if buffers else int((2 if degrees.expert_ranks > 1 else 1) * tokens * copies * self.row * self.computed)
        )
        return _Rides(kept_of[0], kept_of[1], products + self.dequantised, experts, buffers or exchanged, host)

    def _kept(self, rides: _Rides) -> tuple[float, float]:
        """Bytes that are kept when the backward begins, and when only one layer is left."""
        policy, layers = self.config.memory.policies["dense"], len(self.kept.layers)
        # Blocks divide heads and widths, and all else is divided with the tokens; but what blocks read is whole.
        whole = self.own_tokens * self.hidden * self.computed if self.divided else 0
        one = self.share * max(self.kept.layers) + whole
        dense = self.share * sum(self.kept.layers) + layers * whole
        if policy == "recompute":
            dense = self.share * self.kept.layer_input * layers + one
            if self.config.memory.policies["sums"] == "keep":
                # What collectives brought: all that a block reads, and this rank's rows of its sums.
                dense += layers * whole * (1 + self.share)
        elif policy == "offload":
            dense = min(dense, 2 * one)
        kept, last = dense + rides.kept, one + rides.kept_by_one + self.copies.slots
        # Layers that are computed again fill their slots again.
        kept += self.copies.slots * (1 if policy == "recompute" else self.moe_layers)
        two = self.config.moe.schedule == "two-batch" and self.config.training.gradient_accumulation_steps > 1
        if two and self.degrees.pp == 1:
            # Two micro-batches are in the model at the same time.
            kept, last = 2 * kept, 2 * last
        # Of other micro-batches all is kept until their turn.
        others = (self.in_flight - 1) * (kept + self.kept.rest)
        return kept + self.kept.rest + others, last + self.kept.rest + others

    def _captured(self, transport: str) -> bool:
        """Whether steps are CUDA graphs, with dense parameters that are whole."""
        config = self.config
        if (
            config.training.cuda_graphs == "off"
            or not getattr(find_transport(transport), "graphable", False)
            or self.degrees.efsdp > 1
        ):
            return False
        return why_not_captured(config, config.moe.schedule) is None

    def _evaluation(self, rides: _Rides) -> float:
        """Bytes that a forward without a backward needs."""
        training, words = self.config.training, self.words
        tokens = training.per_device_eval_batch_size * self.config.data.sequence_length // self.degrees.cp
        logits = min(tokens, training.loss_chunk or piece_size(tokens, words)) * words * self.computed
        one_layer = max(self.kept.layers) * tokens / self.own_tokens
        return one_layer + max(rides.products * tokens / self.own_tokens, logits)

    def _logits(self) -> tuple[float, float]:
        """Bytes that the loss needs, and those that stay when the backward begins."""
        tokens, words = self.own_tokens, self.words
        if self.divided and not self.whole_logits:
            tokens = math.ceil(tokens * self.share)
        if self.whole_logits:
            # Log-softmax, its gradient and that of the loss; all in float32.
            return 12 * tokens * words, 0
        at_once = min(tokens, self.config.training.loss_chunk or piece_size(tokens, words))
        dweight = 4 * words * self.hidden if self.head_trains else 0
        stays = dweight + tokens * self.hidden * self.computed
        if self.divided:
            # The whole matrix, and what scatters its gradient.
            stays += words * self.hidden * self.computed
        piece = (self.computed + (0 if self.cuda else 4)) * at_once * words
        # The gradient of the weight is narrowed for who reduces it.
        return stays + piece, stays + (self.computed * words * self.hidden if self.computed < 4 else 0)


class _Rides(NamedTuple):
    """Bytes that the rides of all MoE layers keep, and of one; of products that the backward of one works with, and of
    its gradients of experts; of buffers that all share; and that all keep in host memory."""

    kept: float
    kept_by_one: float
    products: float
    experts: int
    buffers: int
    host: int


def _has_buffers(transport: str) -> bool:
    return not find_transport(transport).knows_rows


def tensors_of(memory: Memory) -> int:
    """Of an estimate: the bytes of PyTorch's tensors, as `torch.cuda.max_memory_allocated` counts them."""
    return sum(size for name, size in memory.items() if name not in (*BESIDE_TENSORS, "process", "allocator", "total"))


def state_bytes(config: Config) -> float:
    """What the optimizer keeps of a parameter; see `carpool.memory.optimizer.adamw`."""
    dtype, training = config.model.dtype or "float32", config.training
    if not training.one_pass(dtype):
        return 2 * STORED[dtype]
    moments = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}[training.optimizer_moments]
    return 2 * moments + (2 if dtype == "bfloat16" else 0)
