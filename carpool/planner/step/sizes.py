"""What a rank of a run takes and saves, as numbers: what the memory of a step (`carpool.planner.step.peak`) follows
from.

They come from two places. A plan has a config.json and counts (`sizes_of`); a run has the model itself, without memory,
and its settings (`carpool.train.plan.estimate`): exact parameters, what its own forward saves, adapters,
quantised bases, experts in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carpool.optim.base import AVERAGE_BYTES
from carpool.parallel.schedules import stages_of
from carpool.planner.candidate import REDUCED, Candidate
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.transports import transport_class

MiB, GiB = 2**20, 2**30
# Of a GPU, beside PyTorch's tensors: CUDA's context and kernels, NCCL's first group and each further one, and the share
# of all tensors that the allocator cannot use.
CONTEXT_BYTES, NCCL_BYTES, NCCL_GROUP_BYTES, FRAGMENTS = GiB // 2, int(0.3 * GiB), int(0.2 * GiB), 0.03
# Components that a GPU has in use, and PyTorch does not count among its tensors.
NOT_TENSORS = ("context", "nccl", "fragments", "graphs")
# After an arena was too small, it gets this much of what was needed (`carpool.train.steps.capacity`).
ARENA_ROOM = 1.25
# Small tensors of int32 or float32 that a ride saves for each token that arrives and its choices: slots, weights,
# positions and orders.
INDEX_BYTES = 5 * 4


def beside_tensors(tensors: float, ranks: int, groups: int) -> dict[str, int]:
    """Bytes of a GPU that are in use beside PyTorch's `tensors` bytes, by component. `groups`: kinds of process
    groups."""
    return {
        "context": CONTEXT_BYTES,
        "nccl": NCCL_BYTES + NCCL_GROUP_BYTES * max(0, groups - 1) if ranks > 1 else 0,
        "fragments": int(FRAGMENTS * tensors),
    }


def products_bytes(pairs: float, width: float, hidden: int, element: int) -> float:
    """Temporary tensors of a layer's experts in the backward: gradients of pre-activations (2 F a pair) and of
    activations, activations, and then dx in place of the second."""
    return pairs * (3 * width + max(width, hidden)) * element


def scores_bytes(tokens: float, heads: int, length: int, element: int) -> float:
    """Temporary tensors of attention that is not fused, of so many tokens and heads of a rank: two score matrices
    beside the one that is saved. Forward, `softmax` has its input and the scores without sinks or mask beside its
    result; backward, the gradients of its result and of its input are there at once."""
    return 2 * tokens * heads * length * element


def alone_bytes(layer: float, stored: int, reduced: int) -> tuple[float, float, float]:
    """What FSDP copies of one layer's experts, `layer` parameters, where it has them (`carpool.hf.sharding`) and no
    other rank has the same: the parameters, to compute with them; gradients that wait for the next layer's; gradients
    at once, as they would be sent, divided, and as they would arrive (`foreach_reduce` of PyTorch 2.11 to 2.13)."""
    return layer * stored, layer * reduced, 3 * layer * reduced


def gradient_buffers(whole: float, ranks: int, stored: int, reduced: int) -> float:
    """Bytes of gradients of parameters that are whole on each of so many ranks, which are there all the time: all of
    them, the sums of this rank's shards, and these in the dtype of the shards (`carpool.parallel.replicated`).

    Args:
        stored, reduced: bytes of an element of a parameter, and of a gradient as it is added up over ranks."""
    return whole * reduced + whole / ranks * (reduced * (ranks > 1) + (stored if stored != reduced else 0))


# Of one chunk of the loss, as in `carpool.kernels.cross_entropy`.
LOGITS = 2**29


class Parameters(NamedTuple):
    """How many there are, and how many of them are trained."""

    total: float
    trained: float


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Of one rank of the pipeline; of all ranks of its stage together, unless the attribute says otherwise.

    Attributes:
        dense, experts: parameters.
        expert_bytes: as they are stored.
        largest: the most parameters of one tensor that one rank owns.
        ends: how many of embedding and output layer are there; has_head: whether the latter is.
        num_experts, top_k, hidden, row, width, vocabulary: E, K, H, elements of a row that travels, F, V.
        layers: bytes that each decoder layer saves for its backward, without its ride, of the rank's tokens.
        moe_layers: how many of them have experts, the last ones.
        layer_input, rest: bytes of a layer's input, and of what is saved outside of layers.
        tokens: of a data-parallel rank in a micro-batch.
        scores: bytes of attention's temporary tensors, if it is not fused.
        copies: rows that arrive at a rank's experts for each of its tokens.
        buffers: bytes of the transport's, which all layers share; 0: it has none.
        loss_tokens: whose logits are there at once; eval_tokens, eval_loss_tokens: the same of an evaluation.
        whole_logits: the loss has log-softmax and gradients of all logits, in float32.
        divided: tensor-parallel ranks divide tokens where blocks do not need all of them.
        reduced: bytes of an element of a gradient as it is added up over ranks.
        state: bytes of the optimizer's state for each trained parameter of a layer; ends_state: of the others.
        head_trains: whether the output layer does.
        dequantised: bytes of matrices that products make of a quantised base at a time; head_made: of the output layer.
        quantised_away: bytes that frozen non-expert parameters take less than as they would be stored.
        adapters: parameters of a rank; adapter_stored, adapter_state: bytes of each, and of its optimizer's state.
        largest_adapter: the most parameters of one tensor of these.
        here: bytes of experts on the device of a rank whose others are in host memory or on disk; None: all are here.
        arrived: bytes of spare slots.
    """

    dense: Parameters
    experts: Parameters
    expert_bytes: float
    largest: float
    ends: int
    has_head: bool
    num_experts: int
    top_k: int
    hidden: int
    row: int
    width: int
    vocabulary: int
    layers: tuple[float, ...]
    moe_layers: int
    layer_input: float
    rest: float
    tokens: int
    scores: float
    copies: float
    buffers: float
    loss_tokens: int
    eval_tokens: int
    eval_loss_tokens: int
    whole_logits: bool
    divided: bool
    state: float
    ends_state: float
    reduced: int = REDUCED
    head_trains: bool = True
    dequantised: float = 0.0
    head_made: float = 0.0
    quantised_away: float = 0.0
    adapters: float = 0.0
    adapter_stored: int = 4
    adapter_state: float = 8.0
    largest_adapter: float = 0.0
    here: float | None = None
    arrived: float = 0.0
    cuda: bool = True


def sizes_of(shape: ModelShape, candidate: Candidate, stage: int, routes: Routes) -> RankSizes:
    """Of a plan, on a rank of the pipeline."""
    degrees = candidate.degrees
    part = stage_part(candidate.pipeline, degrees.pp, stage, shape.stages)
    layers = [shape.layers[i] for one in part.layers for i in one]
    head = shape.vocabulary * shape.hidden
    ends = min(part.first + part.last, 1 if shape.tied else 2)
    dense = sum(layer.dense_parameters for layer in layers) + ends * head
    moe_layers = sum(layer.experts for layer in layers)
    one_layer = shape.num_experts * shape.expert_parameters
    own_tokens = candidate.micro_tokens // degrees.cp
    kept = {
        layer: own_tokens
        * layer.saved_bytes(shape.hidden, candidate.sequence_length, candidate.computed, candidate.layers_compiled)
        for layer in set(layers)
    }
    heads = max((layer.heads for layer in kept if layer.whole_scores), default=0)
    stored, eval_tokens = candidate.stored, candidate.sequence_length // degrees.cp
    copies, expert = float(degrees.etp), shape.expert_parameters * candidate.computed
    if degrees.ep > 1:
        copies *= routes.rows(candidate.transport, shape.choice, degrees.ep, degrees.ep).arrive
    average = AVERAGE_BYTES if candidate.averaged else 0
    return RankSizes(
        dense=Parameters(dense, dense), experts=Parameters(moe_layers * one_layer, moe_layers * one_layer),
        expert_bytes=moe_layers * one_layer * stored,
        largest=max(2 / 3 * one_layer / degrees.expert_shards, head / degrees.non_expert_shards),
        ends=ends, has_head=part.last, num_experts=shape.num_experts, top_k=shape.top_k, hidden=shape.hidden,
        row=shape.hidden, width=shape.expert_hidden, vocabulary=shape.vocabulary,
        layers=tuple(kept[layer] for layer in layers), moe_layers=moe_layers,
        layer_input=own_tokens * shape.hidden * candidate.computed,
        rest=(candidate.computed + 4) * shape.hidden * own_tokens,
        tokens=candidate.micro_tokens,
        scores=scores_bytes(candidate.rank_tokens, heads, candidate.sequence_length, candidate.computed),
        copies=copies, buffers=_buffers(shape, candidate),
        loss_tokens=_chunk_size(own_tokens // (degrees.tp if candidate.divides_tokens else 1), shape.vocabulary),
        eval_tokens=eval_tokens, eval_loss_tokens=_chunk_size(eval_tokens, shape.vocabulary),
        whole_logits=degrees.tp > 1 and not candidate.divides_tokens, divided=candidate.divides_tokens,
        state=average + sum(candidate.matrix_state_bytes.values()),
        ends_state=average + sum(candidate.state_bytes.values()),
        arrived=candidate.spare.bytes(expert, moe_layers) if degrees.ep > 1 else 0.0,
    )  # fmt: skip


class Part(NamedTuple):
    """What of a model a rank of a pipeline has: layers, the embedding (`first`), the output layer (`last`)."""

    layers: tuple[range, ...]
    first: bool
    last: bool


def stage_part(schedule: str, stages: int, stage: int, cut: Callable[[int], Sequence[range]]) -> Part:
    """`cut`: the layers of each chunk of the pipeline, by their number."""
    own = stages_of(schedule if stages > 1 else "1F1B", stages)
    number = sum(map(len, own))
    chunks = cut(number)
    return Part(tuple(chunks[one] for one in own[stage]), 0 in own[stage], number - 1 in own[stage])


def _chunk_size(tokens: int, vocabulary: int) -> int:
    return math.ceil(tokens / max(1, math.ceil(tokens * vocabulary / LOGITS)))


def _buffers(shape: ModelShape, candidate: Candidate) -> float:
    degrees, row_bytes = candidate.degrees, shape.hidden * candidate.computed
    if degrees.expert_ranks == 1:
        return 0.0
    way = transport_class(candidate.transport)
    return way.planned_buffer_bytes(candidate.rank_tokens, degrees.expert_ranks, row_bytes, shape.top_k * degrees.etp)
