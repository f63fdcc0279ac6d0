"""The memory of a rank as a timeline: what is there while a step goes through its layers, and the moment of the most.

    peak = memory_of(shape, candidate)             of a plan
    peak = peak_of(sizes, candidate)               of sizes that someone else knows, such as a run
    peak.total                                     bytes of the fullest rank at its highest moment
    peak.at, peak.parts                            "backward begins", {"parameters": ..., "activations": ...}
    peak.timeline                                  (moment, bytes) through forward, loss and backward

What it assumes, which is where a prediction goes wrong:

    balance       each rank gets the mean number of rows, each expert the mean number of tokens. Not temporaries of
                  transports with buffers, which are for the worst case, nor their arena, which has a quarter more than
                  was saved
    one layer     of rides, backward: products, their gradients, rows, and the gradients of one layer's experts.
                  Under FSDP: a layer in full and the next one, which is gathered ahead; a layer's gradients as they are
                  computed and as they are reduced. With gradient checkpointing: the layer that is computed again
    transport     one lease of its buffers (schedules that overlap rides take more); without buffers: rows packed,
                  arrived, summed, sent
    context       on GPUs: 0.5 GiB of CUDA context and kernels; NCCL: 0.3 GiB, and 0.2 for each further kind of group
    fragments     on GPUs: 3 % of what PyTorch's tensors take, which its allocator cannot use
    graphs        CUDA graphs of a step keep all that it takes, also between steps. Their gradients take places that
                  other tensors have left, as far as these are large enough (`_Saved.reused`). What is computed eagerly
                  beside them takes memory of its own: the evaluation, of which one layer and a chunk of the logits are
                  there
    loading       experts that are to be in host memory are on the device first, before there is any step
    process       on CPUs: 60 MiB of code, threads and buffers that every rank takes once it trains
    allocator     on CPUs: half of what a step takes and frees, which the C library keeps in pieces of the wrong sizes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from carpool.parallel.schedules import in_flight
from carpool.planner.candidate import Candidate
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.sizes import (
    ARENA_ROOM,
    INDEX_BYTES,
    NOT_TENSORS,
    MiB,
    Parameters,
    RankSizes,
    alone_bytes,
    beside_tensors,
    gradient_buffers,
    products_bytes,
    sizes_of,
    stage_part,
)

# As in `carpool.parallel.replicated`, `carpool.optim.offloaded_state` and `carpool.optim.in_backward`: of gradients
# that wait for their updates, in elements of the largest parameter.
BUCKET, TILES, HELD = 100 * MiB, 8 * 64 * MiB, 2
# On CPUs, beside PyTorch's tensors; see above.
PROCESS_BYTES, FREED_SHARE = 60 * MiB, 0.5
Moment = tuple[str, float, float, float]  # its name; bytes of gradients, activations and logits


@dataclass(frozen=True)
class Peak:
    """Bytes of the fullest rank.

    Attributes:
        parts: by component, at the highest moment.
        at: that moment.
        timeline: (moment, bytes of PyTorch's tensors) in the order of a step.
        host: bytes in host memory: the optimizer's state, and activations that are offloaded.
    """

    parts: Mapping[str, float]
    at: str
    stage: int
    timeline: tuple[tuple[str, float], ...]
    host: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors(self) -> float:
        """Of PyTorch's tensors, as `torch.cuda.max_memory_allocated` counts them."""
        return sum(size for name, size in self.parts.items() if name not in NOT_TENSORS)


def memory_of(shape: ModelShape, candidate: Candidate, routes: Routes | None = None, every_layer: bool = False) -> Peak:
    """Of the fullest stage. `every_layer`: its timeline has a moment for each layer, forward and backward."""
    routes = routes or Routes()
    found = (
        peak_of(sizes_of(shape, candidate, one, routes), candidate, one, every_layer)
        for one in full_stages(candidate, shape.stages)
    )
    return max(found, key=lambda one: one.total)


def full_stages(candidate: Candidate, cut: Callable[[int], Sequence[range]]) -> list[int]:
    """Ranks of the pipeline, one of which holds the most: those at its ends, which have the embedding and the most
    micro-batches, or the output layer, and the first with the most layers. `cut` as of `stage_part`."""
    pp = candidate.degrees.pp
    layers = [sum(map(len, stage_part(candidate.pipeline, pp, stage, cut).layers)) for stage in range(pp)]
    return sorted({0, pp - 1, layers.index(max(layers))})


def peak_of(sizes: RankSizes, candidate: Candidate, stage: int = 0, every_layer: bool = False) -> Peak:
    """Of one rank of the pipeline. `every_layer` as of `memory_of`."""
    degrees, moe_layers, number = candidate.degrees, sizes.moe_layers, len(sizes.layers)
    computed, stored = candidate.computed, candidate.stored
    replicated, buffered = candidate.whole, candidate.experts_in_buffers
    dense_own, dense_trained = (one / degrees.non_expert_shards for one in sizes.dense)
    experts_own = sizes.expert_bytes / degrees.expert_shards
    experts_trained = sizes.experts.trained / degrees.expert_shards
    layer_total, layer_trained = (one / max(1, moe_layers) / degrees.expert_ranks for one in sizes.experts)
    whole, of_whole = 0.0, 0.0
    for parameters, ranks, buffers in (
        (sizes.dense, degrees.non_expert_shards, replicated),
        (Parameters(*(one / degrees.expert_ranks for one in sizes.experts)), degrees.efsdp, buffered),
    ):
        if buffers:
            # Of one rank in one dtype, shards are whole.
            whole += parameters.total * computed if ranks > 1 or stored != computed else 0.0
            of_whole += gradient_buffers(parameters.trained, ranks, stored, sizes.reduced)

    gathered, reducing = _on_their_way(sizes, candidate, 0 if replicated else layer_total, layer_trained)
    reducing += min(BUCKET, sizes.dense.trained * sizes.reduced) if replicated else 0.0
    copied = waiting = at_once = 0.0
    if candidate.copies_experts:
        copied, *later = alone_bytes(layer_total, computed, sizes.reduced)
        waiting, at_once = later if sizes.experts.trained else (0.0, 0.0)

    # Those of whole parameters have buffers of their own.
    own = 0.0 if replicated else dense_trained * stored
    own += 0.0 if buffered else experts_trained * stored
    if candidate.optimizer_in_backward:
        # Those whose update runs beside the backward, or waits for copies.
        beside = candidate.optimizer_offload != "none" or (sizes.cuda and sizes.here is None)
        largest = max(sizes.largest_adapter * sizes.adapter_stored, 0 if sizes.adapters else sizes.largest * stored)
        own = HELD * largest if beside else 0.0
    own += 0 if candidate.optimizer_in_backward else sizes.adapter_stored * sizes.adapters
    host = 0.0
    of_ends = min(dense_trained, sizes.ends * sizes.vocabulary * sizes.hidden / degrees.non_expert_shards)
    state = (dense_trained - of_ends + experts_trained) * sizes.state + of_ends * sizes.ends_state
    if candidate.optimizer_offload != "none":
        host, state = state, TILES

    saved = _Saved(sizes, candidate)
    host += saved.host
    others = sizes.rest
    if degrees.pp > 1:
        waits = in_flight(candidate.pipeline, degrees.pp, candidate.accumulation, candidate.paired, stage) - 1
        others += waits * (saved.by(number) + sizes.rest)

    # Attention's backward comes after that of the experts. Gradients of one layer's experts are among those that stay,
    # unless they are added to others, reduced, sent or used.
    used = candidate.optimizer_in_backward or candidate.accumulation > 1
    used |= buffered or degrees.efsdp > 1 or candidate.copies_experts
    work = max(saved.products + sizes.dequantised, sizes.scores) + copied + reducing
    work += layer_trained * computed * used + saved.again
    here = experts_own if sizes.here is None else min(experts_own, sizes.here)
    always = {
        "parameters": sizes.adapter_stored * sizes.adapters
        + dense_own * stored
        + here
        + whole
        + gathered
        - sizes.quantised_away,
        "optimizer": state + sizes.adapter_state * sizes.adapters,
        "transport": saved.exchanged,
        **({"copies": sizes.arrived} if sizes.arrived else {}),
    }
    logits, after_loss = _loss(sizes, candidate) if sizes.has_head else (0.0, 0.0)
    # Those of earlier micro-batches are there, and those that a graph leaves in tensors of its own.
    before = 0.0
    if candidate.accumulation > 1:
        before = own
    elif candidate.captured and not candidate.optimizer_in_backward:
        before = own = own - saved.reused(0.0 if buffered else layer_trained * stored, logits - work)
    moments: list[Moment] = [("step begins", before, others, 0.0)]
    if every_layer:
        moments += [
            (f"forward of layer {i}", before, others + saved.by(i + 1) + saved.again, 0.0) for i in range(number)
        ]
    if sizes.has_head:
        moments.append(("loss", before, others + saved.by(number), logits))
    moments.append(("backward begins", before, others + saved.by(number), after_loss))
    for i in reversed(range(number)) if every_layer else sorted({0, number - 1}, reverse=True):
        there = others + saved.by(i + 1)
        gradients = own if candidate.optimizer_in_backward else before + (own - before) * (number - i) / number
        moments.append((f"backward of layer {i}", gradients, there + work + waiting, 0.0))
        if candidate.copies_experts and i >= number - moe_layers:
            gradients = before + (own - before) * (number - 1 - i) / max(1, number - 1)
            of_loss = after_loss if i == number - 1 else 0.0
            moments.append((f"reduction of layer {i}", gradients, there + saved.again + at_once, of_loss))
    constant = sum(always.values()) + of_whole
    at, gradients, activations, of_loss = max(moments, key=lambda one: sum(one[1:]))
    at_peak = {"gradients": gradients + of_whole, "activations": activations, "logits": of_loss}
    parts = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, **at_peak, **always}
    if here < experts_own:
        parts["loading"] = max(0.0, dense_own * stored + experts_own - sum(parts.values()))
    tensors = sum(parts.values())
    if sizes.cuda:
        parts |= beside_tensors(tensors, degrees.world_size, _groups(candidate))
        if candidate.captured:
            parts["graphs"] = _evaluation(sizes, candidate, saved.products)
    else:
        freed = own + activations + of_loss + (0 if sizes.buffers else saved.exchanged)
        parts |= {"process": PROCESS_BYTES, "allocator": FREED_SHARE * freed}
    return Peak(parts, at, stage, tuple((name, constant + sum(of)) for name, *of in moments), host)


def saved_by_rides(
    policies: Mapping[str, str], layers: int, inputs: float, activations: float, row: float
) -> dict[str, int]:
    """Bytes that rides save for the backward of a micro-batch: on the device by item of `POLICIES`, and in host memory.

    What is offloaded is on the device for two layers at a time. If layers and their MoE outputs are computed again,
    rides are repeated, and one layer at a time saves its experts' inputs and pre-activations.

    Args:
        layers: that have experts.
        inputs, activations: of one layer: hidden states that arrived at its experts, and the experts' pre-activations.
        row: of one layer: hidden states of the tokens of its rank."""
    again = policies["layer_activations"] == "recompute"
    number = 1 if again and policies["moe_outputs"] == "recompute" else layers
    found = {"expert_inputs": 0.0, "expert_activations": 0.0, "moe_outputs": 0.0, "host": 0.0}
    for item, size in (("expert_inputs", inputs), ("expert_activations", activations)):
        if policies[item] == "save":
            found[item] = number * size
        elif policies[item] == "offload":
            found[item] = min(2, number) * size
            found["host"] += number * size
    if again and policies["expert_inputs"] == "resend":
        # What is sent again is not computed again.
        found["expert_inputs"] = number * row
    if again and policies["moe_outputs"] == "save":
        found["moe_outputs"] = layers * row
    return {item: int(size) for item, size in found.items()}


class _Saved:
    """What layers save for their backward, and what rides work with and exchange.

    Attributes:
        products: bytes that the backward of one layer's experts works with.
        exchanged: of the transport: buffers that all layers share, or what one ride exchanges.
        host: of activations that are offloaded.
        again: of the layer that is computed again in the backward.
    """

    def __init__(self, sizes: RankSizes, candidate: Candidate) -> None:
        self.sizes, self.policies = sizes, candidate.policies
        degrees, computed = candidate.degrees, candidate.computed
        ranks, self.tokens = degrees.expert_ranks, degrees.tokens_per_rank(sizes.tokens)
        own_tokens = sizes.tokens // degrees.cp
        # Two micro-batches are in the model at the same time.
        self.at_once = candidate.at_once if candidate.accumulation > 1 else 1
        # Blocks divide heads and widths, and all else is divided with the tokens; but what blocks read is whole.
        self.share = 1 / degrees.tp if sizes.divided else 1.0
        self.whole = own_tokens * sizes.hidden * computed if sizes.divided else 0.0
        self.one = self.share * max(sizes.layers, default=0.0) + self.whole
        # The layer that is computed again saves all until its backward is done. In float32 its first norm saves the
        # layer's input as it is, which is counted with those of the others.
        counted = self.share * sizes.layer_input if computed == 4 else 0.0
        self.again = self.at_once * (self.one - counted) if self.policies["layer_activations"] == "recompute" else 0.0
        self.saved_by = [0.0, *accumulate(self.share * layer + self.whole for layer in sizes.layers)]

        top_k, width = sizes.top_k * degrees.etp, sizes.width // degrees.etp
        choices = min(sizes.top_k, -(-sizes.num_experts // degrees.ep))
        self.indices = self.tokens * sizes.copies * choices * INDEX_BYTES
        in_buffers = sizes.buffers > 0 and ranks > 1
        # Tokens at home are the layer's input, which is saved anyway.
        away = 0.0 if ranks == 1 else sizes.copies * ((ranks - 1) / ranks if in_buffers else 1)
        row = self.tokens * sizes.row * computed
        self.of_one = away * row, self.tokens * top_k * 2 * width * computed, row
        of_all, self.of_one_layer = self._rides(sizes.moe_layers), self._rides(min(1, sizes.moe_layers))
        self.host = of_all["host"] + (self.saved_by[-1] if self.policies["layer_activations"] == "offload" else 0.0)
        # The arena is there all the time.
        self.arena = ARENA_ROOM * (of_all["expert_inputs"] + of_all["expert_activations"]) if in_buffers else None

        self.products = self.exchanged = 0.0
        if not sizes.moe_layers:
            return
        pairs = self.tokens * top_k
        self.products = products_bytes(
            self.tokens * ranks * choices if in_buffers else pairs, width, sizes.row, computed
        )
        if not sizes.cuda:
            # Gradients are gathered, and each step of the activation's backward makes a tensor.
            self.products = pairs * (7 * width + sizes.row) * computed
        if self.policies["expert_activations"] == "recompute":
            self.products += 2 * pairs * width * computed
        self.exchanged = sizes.buffers * (2 if self.policies["expert_inputs"] == "resend" else 1)
        if not sizes.buffers:
            self.exchanged = (2 if ranks > 1 else 1) * self.tokens * sizes.copies * sizes.row * computed

    def _rides(self, layers: int) -> Mapping[str, int]:
        return saved_by_rides(self.policies, layers, *self.of_one)

    def reused(self, layer: float, loss: float) -> float:
        """Of gradients of experts that a graph leaves: bytes that lie where other tensors were. PyTorch's allocator
        gives a tensor the place of a larger one alone: what the loss had, and each layer's pre-activations for those of
        the layer before.

        Args:
            layer: of one layer's experts; a third is of down projections.
            loss: bytes that the loss needs, and no layer's backward."""
        sizes, hidden = self.sizes, 0.0
        if self.arena is None and self.policies["expert_activations"] == "save":
            hidden = self.of_one_layer["expert_activations"]
        loss = min(loss, 4 * sizes.vocabulary * sizes.hidden)

        def fits(place: float) -> float:
            return max((size for size in (layer, layer * 2 / 3, layer / 3) if size <= place), default=0.0)

        return max(0, sizes.moe_layers - 1) * fits(hidden) + fits(loss)

    def by(self, number: int) -> float:
        """Bytes that the first layers save."""
        sizes, dense = self.sizes, self.saved_by[number]
        moe_layers = max(0, number - (len(sizes.layers) - sizes.moe_layers))
        if self.policies["layer_activations"] == "recompute" and number:
            dense = self.share * sizes.layer_input * number
            if self.policies["moe_outputs"] == "save":
                # What collectives brought: all that a block reads, and this rank's rows of its sums.
                dense += number * self.whole * (1 + self.share)
        elif self.policies["layer_activations"] == "offload":
            dense = min(dense, 2 * self.one)
        rides = 0.0
        if sizes.moe_layers:
            found = self._rides(moe_layers)
            rows = found["expert_inputs"] + found["expert_activations"] if self.arena is None else self.arena
            rides = rows + found["moe_outputs"] + moe_layers * self.indices
        return self.at_once * (dense + rides)


def _groups(candidate: Candidate) -> int:
    """Kinds of process groups with more than one rank."""
    degrees = candidate.degrees
    apart = (degrees.efsdp not in (1, degrees.dp_cp)) + (degrees.cp not in (1, degrees.dp_cp))
    return (degrees.dp_cp > 1) + (degrees.expert_ranks > 1) + (degrees.tp > 1) + (degrees.pp > 1) + apart


def _on_their_way(
    sizes: RankSizes, candidate: Candidate, layer_total: float, layer_trained: float
) -> tuple[float, float]:
    """Bytes of parameters that FSDP has gathered, and of gradients on their way to shards.

    Args:
        layer_total, layer_trained: parameters of one layer's experts, gathered; total 0: they are whole."""
    degrees, computed = candidate.degrees, candidate.computed
    gathered = reducing = 0.0
    if degrees.efsdp > 1 and degrees.dp_cp > 1 and layer_total:
        gathered += 2 * layer_total * computed
        reducing += layer_trained * sizes.reduced
    if degrees.dp_cp > 1 and candidate.data_parallel != "zero1":
        head = sizes.vocabulary * sizes.hidden if sizes.ends else 0
        one = max(0.0, sizes.dense.total - head) / degrees.tp / max(1, len(sizes.layers))
        # The output layer is not given back between forward and backward.
        gathered += (2 * one + head / degrees.tp) * computed
        reducing += one * (computed + sizes.reduced) if sizes.dense.trained else 0.0
    return gathered, reducing


def _evaluation(sizes: RankSizes, candidate: Candidate, products: float) -> float:
    """Bytes that a forward without a backward needs."""
    share = sizes.eval_tokens / (sizes.tokens // candidate.degrees.cp)
    logits = sizes.eval_loss_tokens * sizes.vocabulary * candidate.computed + sizes.head_made
    return max(sizes.layers, default=0.0) * share + max(products * share + sizes.dequantised, logits)


def _loss(sizes: RankSizes, candidate: Candidate) -> tuple[float, float]:
    """Bytes that the loss needs, and those that stay when the backward begins."""
    degrees, head, computed = candidate.degrees, sizes.vocabulary * sizes.hidden, candidate.computed
    tokens = sizes.tokens // degrees.cp
    if sizes.whole_logits:
        # Log-softmax, its gradient and that of the loss; all in float32.
        return 12 * tokens * sizes.vocabulary, 0
    tokens = -(-tokens // degrees.tp) if sizes.divided else tokens
    stays = (4 * head if sizes.head_trains else 0) + tokens * sizes.hidden * computed
    if sizes.divided:
        # The whole matrix, and what scatters its gradient.
        stays += head * computed
    chunk = (computed + (0 if sizes.cuda else 4)) * min(tokens, sizes.loss_tokens) * sizes.vocabulary + sizes.head_made
    # The gradient of the weight is narrowed for who reduces it.
    return stays + chunk, stays + (computed * head if computed < 4 and sizes.head_trains else 0)
