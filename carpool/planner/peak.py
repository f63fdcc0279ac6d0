"""The memory of a rank as a timeline: what is there while a step goes through its layers, and the moment of the most.

    peak = memory_of(shape, candidate)
    peak.total                    bytes of the fullest rank at its highest moment
    peak.at, peak.parts           "backward begins", {"parameters": ..., "activations": ...}
    peak.timeline                 (moment, bytes) through forward, loss and backward

The same accounts as `carpool.train.run.estimate`, which measures what layers keep by the model's own forward and knows
adapters, quantised bases and experts in host memory; here all follows from sizes, so that thousands of configurations
take a second. What both say of a layer's work and of what is beside tensors is in `held.py`, and
`tests/planner/test_peak.py` holds one against the other. Stage s of p in a 1F1B pipeline keeps p - s micro-batches at
once; others keep p.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from carpool.planner.candidate import MOMENT_BYTES, Candidate
from carpool.planner.held import (
    ARENA_ROOM,
    BESIDE_TENSORS,
    INDEX_BYTES,
    MiB,
    alone_bytes,
    beside_tensors,
    gradient_buffers,
    products_bytes,
    scores_bytes,
)
from carpool.planner.kept import LayerSizes, kept_bytes
from carpool.planner.lengths import ELEMENT, REDUCED, stage_layers
from carpool.planner.model_shape import LayerShape, ModelShape
from carpool.planner.routes import Routes

# As in `carpool.kernels.cross_entropy`, `carpool.parallel.replicated` and `carpool.memory.optimizer.streamed`.
LOGITS, BUCKET, TILES = 2**29, 100 * MiB, 8 * 64 * MiB


@dataclass(frozen=True)
class Peak:
    """Bytes of the fullest rank.

    Attributes:
        parts: by component, at the highest moment.
        at: that moment.
        stage: of the pipeline.
        timeline: (moment, bytes of PyTorch's tensors) in the order of a step.
        host: bytes in host memory.
        own_gradients: bytes of gradients of what the rank owns, as the backward leaves them.
    """

    parts: Mapping[str, float]
    at: str
    stage: int
    timeline: tuple[tuple[str, float], ...]
    host: float
    own_gradients: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors(self) -> float:
        """Of PyTorch's tensors, as `torch.cuda.max_memory_allocated` counts them."""
        return sum(size for name, size in self.parts.items() if name not in BESIDE_TENSORS)


def memory_of(shape: ModelShape, candidate: Candidate, routes: Routes | None = None, every_layer: bool = False) -> Peak:
    """Of the fullest stage. `every_layer`: its timeline has a moment for each layer, forward and backward."""
    stages = stage_layers(shape, candidate.degrees)
    ends = {0, len(stages) - 1}
    # Stages between the ends hold less than the first, which has as many layers, the embedding and more micro-batches.
    found = (_stage(shape, candidate, routes or Routes(), stage, stages[stage], every_layer) for stage in sorted(ends))
    return max(found, key=lambda one: one.total)


def _stage(
    shape: ModelShape,
    candidate: Candidate,
    routes: Routes,
    stage: int,
    layers: tuple[LayerShape, ...],
    every_layer: bool,
) -> Peak:
    degrees, policies = candidate.degrees, candidate.policies
    last = stage == degrees.pp - 1
    replicated = candidate.dense == "replicate" and degrees.dp_cp > 1
    head = shape.vocabulary * shape.hidden / degrees.tp
    # How many of embedding and head are here; a tied one is there once.
    ends = min((stage == 0) + last, 1 if shape.tied else 2)
    kinds = Counter(layers)
    dense = sum(number * layer.dense_parameters for layer, number in kinds.items()) / degrees.tp + ends * head
    moe_layers = sum(number * layer.experts for layer, number in kinds.items())
    one_layer = shape.num_experts * shape.expert_parameters / (degrees.ep * degrees.etp)
    dense_shards, efsdp = degrees.fsdp * degrees.cp, degrees.efsdp
    dense_own, experts_own = dense / dense_shards, moe_layers * one_layer / efsdp
    # With ep = 1 experts lie as dense parameters do.
    together = candidate.experts_as_dense
    whole = (dense + (moe_layers * one_layer if together else 0)) if replicated else 0

    # Gathered parameters, and gradients on their way to shards.
    gathered = reducing = 0.0
    if efsdp > 1 and not together:
        gathered += 2 * one_layer * ELEMENT
        reducing += one_layer * REDUCED
    if degrees.dp_cp > 1 and not replicated:
        one = max(0.0, dense - head * min(1, ends)) / max(1, len(layers))
        gathered += (2 * one + (head if last or stage == 0 else 0)) * ELEMENT
        reducing += one * (ELEMENT + REDUCED)
    reducing += min(BUCKET, whole * REDUCED)
    alone = candidate.copies_experts
    copied, waiting, at_once = alone_bytes(one_layer, ELEMENT, REDUCED) if alone else (0.0, 0.0, 0.0)

    # Those of whole parameters have buffers of their own.
    stored = candidate.stored
    own_gradients = ((0 if replicated else dense_own) + (0 if replicated and together else experts_own)) * stored
    if candidate.gradients == "consumed":
        # They wait for what their updates bring from host memory, and else for nothing.
        own_gradients = 0.0
    own_whole = (dense_own + (experts_own if together else 0)) if replicated else 0
    # Masters are the low bits beside parameters in bfloat16.
    state = (dense_own + experts_own) * (2 * MOMENT_BYTES[candidate.moments] + (2 if stored == 2 else 0))
    if candidate.optimizer == "torch":
        state = (dense_own + experts_own) * 2 * stored
    host = 0.0
    if candidate.optimizer_state != "device":
        host, state = state, TILES

    # What is kept: by layer, and by all.
    tokens = candidate.rank_tokens
    copies = _copies(shape, candidate, routes)
    in_buffers = candidate.transport == "nvlink" and degrees.ep > 1
    away = copies * ((degrees.ep - 1) / degrees.ep if in_buffers else 1.0) if degrees.ep > 1 else 0.0
    dense_policy = policies["dense"]

    of_rides = {**policies, "dense": "keep" if dense_policy == "offload" else dense_policy}
    choices = min(shape.top_k, max(1, shape.num_experts // degrees.ep))

    def of_layers(number: int) -> Mapping[str, int]:
        sizes = LayerSizes(
            number, number, shape.hidden, shape.expert_hidden // degrees.etp, shape.top_k * degrees.etp, 0, 0, 0,
            ELEMENT, copies=away,
        )  # fmt: skip
        return kept_bytes(sizes, tokens, of_rides)

    # The arena is there all the time.
    arena = ARENA_ROOM * sum(of_layers(moe_layers)[item] for item in ("rows", "hidden")) if in_buffers else None

    def rides(number: int) -> float:
        found = of_layers(number)
        rows = found["rows"] + found["hidden"] if arena is None else arena
        return rows + found["sums"] + number * tokens * copies * choices * INDEX_BYTES

    by_kind = {
        layer: layer.kept_bytes(shape.hidden, candidate.sequence_length, compiled=candidate.layers_compiled) * tokens
        for layer in kinds
    }
    kept_by = [0.0, *accumulate(by_kind[layer] for layer in layers)]
    experts_in = [0, *accumulate(layer.experts for layer in layers)]
    largest, layer_input = max(by_kind.values(), default=0.0), tokens * shape.hidden * ELEMENT
    if policies["dense"] == "offload":
        host += kept_by[-1]
    for item, rows in (("rows", away * shape.hidden), ("hidden", shape.top_k * 2 * shape.expert_hidden)):
        if policies[item] == "offload":
            host += moe_layers * tokens * rows * ELEMENT

    def kept(number: int) -> float:
        """By the first layers."""
        dense_kept = kept_by[number]
        if dense_policy == "recompute" and number:
            dense_kept = layer_input * number + largest
        elif dense_policy == "offload":
            dense_kept = min(dense_kept, 2 * largest)
        return dense_kept + (rides(experts_in[number]) if moe_layers else 0.0)

    in_flight = degrees.pp - stage if candidate.pipeline == "1F1B" else degrees.pp
    in_flight = min(in_flight, candidate.accumulation) if degrees.pp > 1 else 1
    if candidate.accumulation > 1:
        in_flight *= candidate.at_once
    rest = 6 * shape.hidden * tokens
    others = (in_flight - 1) * kept(len(layers)) + rest

    most = tokens * degrees.ep * min(shape.top_k, max(1, shape.num_experts // degrees.ep)) if in_buffers else 0
    pairs = max(most, tokens * shape.top_k * degrees.etp)
    width = shape.expert_hidden / degrees.etp
    products = products_bytes(pairs, width, shape.hidden, ELEMENT) if moe_layers else 0.0
    if policies["hidden"] == "recompute":
        products += 2 * tokens * shape.top_k * width * ELEMENT
    heads = max((layer.heads for layer in by_kind if layer.whole_scores), default=0)
    scores = scores_bytes(tokens, heads, candidate.sequence_length, ELEMENT)
    # Attention's backward comes after that of the experts.
    work = max(products, scores) + (one_layer * ELEMENT if moe_layers else 0.0) + copied + reducing
    buffers = _buffers(shape, candidate, copies) if moe_layers else 0.0

    logits = after_loss = 0.0
    if last:
        words = shape.vocabulary / degrees.tp
        all_tokens = tokens * degrees.tp
        if degrees.tp > 1:
            logits = 12 * all_tokens * words
        else:
            stays = 4 * words * shape.hidden + tokens * shape.hidden * ELEMENT
            pieces = max(1, math.ceil(all_tokens * words / LOGITS))
            logits = stays + ELEMENT * all_tokens * words / pieces
            after_loss = stays + ELEMENT * words * shape.hidden
    always = {
        "parameters": (dense_own + experts_own) * stored + whole * ELEMENT + gathered,
        "optimizer": state,
        "transport": buffers,
    }
    # Those of earlier micro-batches are there, and those in the tensors of a graph.
    before = own_gradients if candidate.accumulation > 1 or candidate.captured else 0.0
    number = len(layers)
    moments: list[tuple[str, float, float, float]] = [("step begins", before, others, 0.0)]
    if every_layer:
        moments += [(f"forward of layer {i}", before, others + kept(i + 1), 0.0) for i in range(number)]
    if last:
        moments.append(("loss", before, others + kept(number), logits))
    moments.append(("backward begins", before, others + kept(number) + work, after_loss))
    for i in reversed(range(number)) if every_layer else sorted({0, number - 1}, reverse=True):
        earlier, share = (before + (own_gradients - before) * done / number for done in (number - 1 - i, number - i))
        of_loss = after_loss if i == number - 1 else 0.0
        if i == 0 or i < number - 1:
            moments.append((f"backward of layer {i}", share, others + kept(i + 1) + work + waiting, 0.0))
        if alone and layers[i].experts:
            moments.append((f"reduction of layer {i}", earlier, others + kept(i) + at_once, of_loss))
    whole_gradients = gradient_buffers(whole, own_whole, stored, REDUCED)
    constant = sum(always.values()) + whole_gradients
    at, gradients, activations, of_loss = max(moments, key=lambda one: sum(one[1:]))
    parts = {
        **always,
        "gradients": gradients + whole_gradients,
        "activations": activations,
        "logits": of_loss,
    }
    tensors = sum(parts.values())
    groups = (degrees.dp > 1) + (degrees.ep > 1) + (degrees.tp > 1) + (degrees.efsdp not in (1, degrees.dp))
    groups += (degrees.cp > 1) + (degrees.pp > 1) + (degrees.etp > 1)
    parts |= beside_tensors(tensors, degrees.world_size, groups)
    if candidate.captured:
        # An evaluation of one sequence runs beside the graphs.
        share = 1 / candidate.micro_batch
        piece = min(candidate.sequence_length, LOGITS // shape.vocabulary) * shape.vocabulary * ELEMENT
        parts["graphs"] = largest * share + max(products * share, piece)
    timeline = tuple((name, constant + sum(sizes)) for name, *sizes in moments)
    return Peak(parts, at, stage, timeline, host, own_gradients)


def _copies(shape: ModelShape, candidate: Candidate, routes: Routes) -> float:
    """Rows that the experts of a rank get for each of its tokens."""
    ep = candidate.degrees.ep
    if ep == 1:
        return float(candidate.degrees.etp)
    return candidate.degrees.etp * routes.rows(candidate.transport, shape.choice, ep, ep).arrive


def _buffers(shape: ModelShape, candidate: Candidate, copies: float) -> float:
    """Of a transport: those that all layers share, or what one ride exchanges."""
    degrees, tokens = candidate.degrees, candidate.rank_tokens
    row = shape.hidden * ELEMENT
    if candidate.transport == "nvlink" and degrees.ep > 1:
        # A slab for each other rank, partial sums, choices and weights (`carpool.transport.nvlink.buffers.Regions`).
        away = (degrees.ep - 1) * tokens
        size = away * row + (away + tokens) * (row + 12 * shape.top_k)
        return size * (2 if candidate.policies["rows"] == "resend" else 1)
    return (2 if degrees.ep > 1 else 1) * tokens * copies * row
