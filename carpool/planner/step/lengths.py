"""How long the pieces of a layer take: products, attention, rides, gathers, updates. Forward, backward, and beside.

    Lengths(shape, hardware, candidate, per_node=8).forward(layer)      pieces in the order in which they run

What is counted, beside what travels (`carpool.planner.step.travel`):

    dense          each product by itself, divided by tp; three times the forward's operations in all
    attention      half of the score matrix of causal attention, a band of it through a window; backward 2.5 times
    elementwise    6.2 bytes moved for each byte that eager autograd keeps, if layers are compiled; 30 if they are not;
                   a third in the forward
    experts        grouped products of the fullest rank
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from carpool.optim import OPTIMIZERS
from carpool.planner.candidate import REDUCED
from carpool.planner.machine.hardware import HEAD_SIZES, SPREAD, Hardware, Source, Work
from carpool.planner.model.shape import LayerShape
from carpool.planner.step.travel import Piece, Travel

REDUCTIONS = "reductions"  # the stream of reductions, beside gathers
# Bytes moved for each byte that a layer keeps, and the forward's share; of the loss, for each byte of logits.
MOVED_COMPILED, MOVED_EAGER, FORWARD_SHARE, MOVED_BY_LOSS = 6.2, 30.0, 1 / 3, 5.8
# The same of what linear attention keeps, not measured: its norm with a gate moves 52 bytes forward for 18 it keeps.
MOVED_LINEAR = 9.0
# Passes over score matrices in bfloat16 where attention is not fused, forward; twice as many backward.
SCORE_PASSES = 21
# Multiprocessors that communication takes from what computes beside it, as a share of its time.
TAKEN = 0.12
# Seconds that the update of a parameter takes at least with 8-bit moments: of arithmetic. So an H200 is hardly faster
# than an H100 (docs/measurements.md, "Held out a third time").
CODES = 4.69e-12
# Seconds in which the host has to have seen the step before (docs/measurements.md: 167 ms, of which 165 kernels).
STEP_HOST = 2e-3
# The host's time for a forward or backward of a pipeline's stage, beside its layers: PyTorch's runtime (0.13 to 0.17 ms
# on a CPU's core), sends and receives, the launch of a graph. Not measured beside GPUs.
HOST_ACTION = 0.3e-3
# The host's time for a layer, in rides (`host ride`): attention, norms, router; the same of compiled layers; what
# transports over NCCL add.
HOST_EAGER, HOST_COMPILED, HOST_NCCL = 2.4, 1.4, 0.5
# What FSDP adds for a layer, and for its experts where it shards these by themselves: 1.7 together, as fitted, divided
# as their calls of Python are (docs/log.md, 2026-11-23).
HOST_FSDP, HOST_FSDP_EXPERTS = 1.1, 0.6


class Lengths(Travel):
    """See the module's docstring; arguments are those of `Travel`."""

    # -- what computes -------------------------------------------------------------------------------------------------

    def _work(self, what: str) -> Work:
        """How long a kind of kernel takes, in the dtype in which this computes."""
        return self.hardware.kernel(what, self.element)

    def _kernel(self, name: str, kind: str, what: str, flops: float, moved: float = 0.0, number: int = 1) -> Piece:
        """`number`: of kernels."""
        work = self._work(what)
        seconds = work.seconds(flops, moved) + (number - 1) * work.latency
        return Piece(name, kind, seconds, *work.spread, number * work.latency)

    def _products(self, name: str, products: tuple[tuple[int, int], ...], passes: int, tokens: int) -> Piece:
        tp = self.degrees.tp
        flops = passes * 2 * tokens * sum(a * b for a, b in products) / tp
        moved = passes * self.element * sum(tokens * (a + b / tp) + a * b / tp for a, b in products)
        return self._kernel(name, "dense", "dense", flops, moved, passes * len(products))

    def _attention(self, layer: LayerShape, backward: bool) -> Piece:
        candidate = self.candidate
        size = min(HEAD_SIZES, key=lambda known: abs(known - layer.qk_size))
        length = candidate.sequence_length
        mean = (layer.qk_size + layer.value_size) / 2
        seen = self.shape.seen(layer, length)
        if layer.kind == "linear":
            # Chunks of 64 tokens: their own scores, and a state of a head's size.
            seen = 64 + layer.qk_size
        flops = 4 * candidate.micro_tokens * seen * layer.heads * mean / (self.degrees.tp * self.degrees.cp)
        if layer.whole_scores:
            # Products that are not fused, and passes over whole matrices.
            entries = candidate.micro_tokens * length * layer.heads / (self.degrees.tp * self.degrees.cp)
            passes = 2 if backward else 1
            moved = passes * SCORE_PASSES * self.element * entries
            one = self._kernel("attention", "attention", "elementwise", 0, moved, 4)
            return one._replace(seconds=one.seconds + self._work("dense").seconds(passes * 4 * entries * mean))
        name = f"attention {size}" + (" backward" if backward else "")
        return self._kernel("attention", "attention", name, flops * (2.5 if backward else 1))

    def _elementwise(self, layer: LayerShape, backward: bool) -> Piece:
        per_byte = MOVED_COMPILED if self.candidate.layers_compiled else MOVED_EAGER
        share = 1 - FORWARD_SHARE if backward else FORWARD_SHARE
        # Score matrices that are not fused are counted with attention.
        kept, linear = layer.saved_bytes(self.shape.hidden, 0, self.element), layer.linear_bytes(self.element)
        moved = (per_byte * (kept - linear) + MOVED_LINEAR * linear) * share * self.tokens
        kernels = 8 if self.candidate.layers_compiled else 60
        return self._kernel("norms", "elementwise", "elementwise", 0, moved, kernels)

    def _experts(self, backward: bool) -> Piece:
        shape, degrees = self.shape, self.degrees
        fullest, _ = self.load
        pairs = self.tokens * shape.top_k * fullest * degrees.etp
        width = shape.expert_hidden / degrees.etp
        weights = shape.num_experts / degrees.ep * 3 * shape.hidden * width
        flops = 6 * pairs * shape.hidden * width
        if not backward:
            found = self._kernel(
                "experts",
                "experts",
                "experts",
                flops,
                self.element * (pairs * (2 * shape.hidden + 3 * width) + weights),
            )
        else:
            moved = self.element * (pairs * (4 * shape.hidden + 8 * width) + 3 * weights)
            found = self._kernel("experts", "experts", "experts backward", 2 * flops, moved)
            if self.candidate.policies["expert_activations"] == "recompute":
                again = self._work("experts").seconds(2 / 3 * flops)
                found = found._replace(seconds=found.seconds + again)
        if self.candidate.experts == "fp8":
            # Quantised anew in every pass: 1.05 to 1.15 times as fast (docs/measurements.md).
            found = found._replace(seconds=found.seconds / 1.1, low=0.9 * found.low, high=1.1 * found.high)
        return found

    # -- what travels inside a layer -----------------------------------------------------------------------------------

    def _tensor_parallel(self, name: str) -> Piece | None:
        """Before or after a part of a layer: sums over tensor-parallel ranks, twice the bytes of an all-gather."""
        size = 2 * self.tokens * self.degrees.tp * self.shape.hidden * self.element
        return self.collective(name, "reduction", size, "tp", "tensor parallel")

    def _context_parallel(self, layer: LayerShape, backward: bool) -> Piece | None:
        """Queries, keys and values to the ranks of their heads, and back (Ulysses)."""
        degrees = self.degrees
        if degrees.cp == 1:
            return None
        size = self.tokens * (layer.heads + layer.key_heads) * (layer.qk_size + layer.value_size) * self.element
        return self.collective("sequences", "all-gather", size * (2 if backward else 1), "cp", "context parallel")

    # -- a layer -------------------------------------------------------------------------------------------------------

    def forward(self, layer: LayerShape) -> Iterator[Piece]:
        """In order; schedules put rides beside what computes."""
        tokens = self.tokens * self.degrees.tp
        inner = layer.products[layer.attention_products :]
        pieces = [
            self._elementwise(layer, False),
            self._products("projections", layer.products[: layer.attention_products], 1, tokens),
            self._context_parallel(layer, False),
            self._attention(layer, False),
            self._tensor_parallel("attention sums"),
            self._products("router and MLP", inner, 1, tokens),
            self._tensor_parallel("MLP sums") if layer.dense_width or layer.shared_width else None,
        ]
        if layer.experts:
            pieces += [
                self._copied_experts(),
                self.ride("dispatch", "dispatch", "dispatch", plan=True),
                self._experts(False),
                self.ride("combine", "combine", "combine"),
            ]
        yield from (piece for piece in pieces if piece is not None)

    def backward(self, layer: LayerShape) -> Iterator[Piece]:
        """The same, the other way round."""
        tokens, policies = self.tokens * self.degrees.tp, self.candidate.policies
        inner = layer.products[layer.attention_products :]
        pieces: list[Piece | None] = []
        again = policies["layer_activations"] == "recompute"
        if again:
            pieces += [
                piece
                for piece in self.forward(layer)
                if policies["moe_outputs"] == "recompute" or piece.name not in _OF_RIDE
            ]
        if layer.experts:
            pieces.append(None if again and policies["moe_outputs"] == "recompute" else self._copied_experts())
            pieces.append(self.ride("combine_backward", "gradients to experts", "dispatch"))
            if policies["expert_inputs"] == "resend":
                pieces.append(self.ride("dispatch", "rows again", "dispatch"))
            pieces += [self._experts(True), self.ride("dispatch_backward", "gradients back", "combine")]
        pieces += [
            self._products("router and MLP", inner, 2, tokens),
            self._tensor_parallel("MLP sums") if layer.dense_width or layer.shared_width else None,
            self._attention(layer, True),
            self._context_parallel(layer, True),
            self._products("projections", layer.products[: layer.attention_products], 2, tokens),
            self._tensor_parallel("attention sums"),
            self._elementwise(layer, True),
        ]
        yield from (piece for piece in pieces if piece is not None)

    def _copied_experts(self) -> Piece | None:
        """Of parameters, read and written, before each pass where FSDP copies them."""
        if not self.candidate.copies_experts:
            return None
        return self._kernel("copied experts", "elementwise", "elementwise", 0, 2 * self.element * self.experts_of_layer)

    def offloaded(self, layer: LayerShape) -> Piece | None:
        """What a layer's policies copy to host memory, or back."""
        policies, shape, size = self.candidate.policies, self.shape, 0.0
        if policies["layer_activations"] == "offload":
            size += self.tokens * layer.saved_bytes(
                shape.hidden, self.candidate.sequence_length, self.element, self.candidate.layers_compiled
            )
        if layer.experts and policies["expert_inputs"] == "offload":
            size += self.arriving * self.tokens * shape.hidden * self.element
        if layer.experts and policies["expert_activations"] == "offload":
            size += self.tokens * shape.top_k * 2 * shape.expert_hidden * self.element
        if not size:
            return None
        rate = self.hardware.host_link
        return Piece("copies", "offload", rate.latency + size / rate.bytes_per_second, *SPREAD[self.host_source])

    @property
    def host_source(self) -> Source:
        return "measured" if self.hardware.host is not None else "datasheet"

    @cached_property
    def arriving(self) -> float:
        """Rows that a rank's experts get for each of its tokens."""
        shape, ep = self.shape, self.degrees.ep
        if ep == 1:
            return 1.0
        per_node = self.members_per_node("ep")[1]
        return self.routes.rows(self.candidate.transport, shape.choice, ep, per_node).arrive

    def host(self, backward: bool) -> float:
        """Seconds in which the host asks for a layer's forward or backward; 0 where graphs are replayed."""
        if self.candidate.captured:
            return 0.0
        ride = self.hardware.kernel("host ride").latency
        share = 1.0 + (HOST_COMPILED if self.candidate.layers_compiled else HOST_EAGER)
        if self.candidate.waits:
            share += HOST_NCCL
        if self.candidate.data_parallel == "fsdp" and self.degrees.dp_cp > 1:
            share += HOST_FSDP
        if self.candidate.experts_apart:
            share += HOST_FSDP_EXPERTS
        return ride * share / 2

    # -- outside of layers ---------------------------------------------------------------------------------------------

    def head(self, backward: bool) -> Iterator[Piece]:
        """The output layer and the loss, in chunks of tokens."""
        shape, tokens = self.shape, self.tokens * self.degrees.tp
        yield self._products("head", ((shape.hidden, shape.vocabulary),), 2 if backward else 1, tokens)
        moved = MOVED_BY_LOSS * tokens * shape.vocabulary * self.element / self.degrees.tp / 2
        yield self._kernel("loss", "loss", "elementwise", 0, moved)

    def dense_of(self, layer: LayerShape) -> float:
        """Non-expert parameters of a layer on a tensor-parallel rank."""
        return layer.dense_parameters / self.degrees.tp

    @property
    def embeddings(self) -> float:
        """Parameters of embedding and head on a tensor-parallel rank."""
        return self.shape.vocabulary * self.shape.hidden * (1 if self.shape.tied else 2) / self.degrees.tp

    @property
    def experts_of_layer(self) -> float:
        """Parameters of a layer's experts on a rank, before efsdp divides them."""
        return self.shape.num_experts * self.shape.expert_parameters / (self.degrees.ep * self.degrees.etp)

    def parameters(self, stage_layers: tuple[LayerShape, ...], ends: int) -> tuple[float, float]:
        """(dense, experts') parameters of a rank's stage, before anything but tp, ep and etp divides them.

        Args:
            ends: how many of embedding and head the stage has."""
        dense = sum(self.dense_of(layer) for layer in stage_layers) + self.embeddings * ends / 2
        return dense, sum(layer.experts for layer in stage_layers) * self.experts_of_layer

    def update(self, dense: float, experts: float, layers: tuple[LayerShape, ...]) -> Iterator[Piece]:
        """Norm, clipping and update of what a rank owns, and parameters that are gathered after it."""
        degrees, candidate = self.degrees, self.candidate
        own = dense / (degrees.fsdp * degrees.cp) + experts / degrees.efsdp
        moved = candidate.update_bytes
        if candidate.optimizer_in_backward and candidate.moments == "int8":
            moved -= candidate.stored  # the update's own pass has the norm
        piece = self._kernel("optimizer", "optimizer", "optimizer", 0, moved * own)
        if candidate.moments == "int8":
            piece = piece._replace(seconds=max(piece.seconds, CODES * own))
        yield piece
        if flops := self.whole_matrices(layers):
            # Shards go to the owners of matrices in bfloat16, and the results come back.
            size = 2 * 2 * dense / (degrees.fsdp * degrees.cp)
            yield from _some(self.collective("matrices", "all-gather", size, "fsdp and cp"))
            work = self.hardware.kernel("dense", 2)
            yield Piece("optimizer", "optimizer", work.seconds(flops), *work.spread, work.latency)
        if not candidate.optimizer_in_backward:
            yield from _some(self.streamed_state(dense, experts))
        if candidate.whole:
            yield from _some(self.collective("parameters", "all-gather", self.element * dense, "fsdp and cp"))
            if not candidate.writes_experts_late:
                yield from _some(self.collective("experts", "all-gather", self.element * experts, "efsdp"))

    def whole_matrices(self, layers: tuple[LayerShape, ...]) -> float:
        """Operations of a rank in an update that multiplies matrices (Muon), which ranks divide among them evenly."""
        flops_of, shape, degrees = OPTIMIZERS[self.candidate.optimizer].update_flops, self.shape, self.degrees
        dense = sum(flops_of(a, b) for layer in layers for a, b in layer.products)
        expert = 3 * shape.num_experts * flops_of(shape.hidden, shape.expert_hidden)
        experts = sum(layer.experts for layer in layers) * expert
        return (dense / degrees.non_expert_shards + experts / degrees.expert_shards) / degrees.dp_replicate

    def streamed_state(self, dense: float, experts: float) -> Piece | None:
        """The optimizer's state of these parameters, from host memory and back; None: it is on the device."""
        degrees, candidate = self.degrees, self.candidate
        if candidate.optimizer_offload == "none":
            return None
        own = dense / (degrees.fsdp * degrees.cp) + experts / degrees.efsdp
        seconds = stream_seconds(own * sum(candidate.state_bytes.values()), self.hardware)
        return Piece("state", "offload", seconds, *SPREAD[self.host_source])

    def gathers(self, layer: LayerShape) -> Iterator[Piece]:
        """Of a layer's parameters before its forward or backward."""
        if self.candidate.data_parallel == "fsdp":
            yield from _some(
                self.collective("all-gather", "all-gather", self.element * self.dense_of(layer), "fsdp and cp")
            )
        if layer.experts and not self.candidate.whole:
            yield from _some(
                self.collective("all-gather experts", "all-gather", self.element * self.experts_of_layer, "efsdp")
            )

    def written_late(self, layer: LayerShape) -> Piece | None:
        """A layer's whole experts, that the first forward of a step gathers ahead of it."""
        if not (layer.experts and self.candidate.writes_experts_late):
            return None
        return self.collective("experts", "all-gather", self.element * self.experts_of_layer, "efsdp")

    def reductions(self, dense: float, experts: float) -> Iterator[Piece]:
        """Of gradients of so many parameters, to their shards and over copies of the model."""
        degrees = self.degrees
        yield from _some(self.collective("reduce", "reduction", REDUCED * dense, "fsdp and cp", REDUCTIONS))
        yield from _some(self.collective("reduce experts", "reduction", REDUCED * experts, "efsdp", REDUCTIONS))
        if experts and self.candidate.copies_experts:
            # As they would be sent, divided, as they would arrive, and in the dtype of the parameters.
            moved = experts * (2 * self.element + 6 * REDUCED)
            one = self._kernel("copied gradients", "reduction", "elementwise", 0, moved)
            yield one._replace(stream=REDUCTIONS)
        shards = dense / (degrees.fsdp * degrees.cp) + experts / degrees.efsdp
        yield from _some(
            self.collective("copies", "reduction", 2 * REDUCED * shards, "dp_replicate", REDUCTIONS, tree=True)
        )


_OF_RIDE = ("copied experts", "dispatch", "experts", "combine")


def _some(piece: Piece | None) -> Iterator[Piece]:
    if piece is not None:
        yield piece


# -- state in host memory ----------------------------------------------------------------------------------------------

# The share of a step's operations that the backward computes, while parameters are updated as soon as their gradients
# are there.
BACKWARD_SHARE = 2 / 3
# 41 of 45 GB/s each way: 8 B parameters' state in a training step on an H200 (docs/measurements/streaming.json).
BOTH_WAYS = 0.9


def stream_seconds(state_bytes: float, hardware: Hardware) -> float:
    """How long the copies of one step take, in and out at the same time, of so many bytes of a rank."""
    return state_bytes / (BOTH_WAYS * hardware.host_link.bytes_per_second)


def break_even_tokens(state_bytes: float, flops_per_token: float, hardware: Hardware) -> float:
    """The tokens of a rank and step from which streaming the optimizer's state costs nothing, if parameters are updated
    in the backward: the copies take the same time whatever the batch is, and the time to compute grows with the tokens.

        30.5 B parameters on one H200, 8-bit moments and low bits: 4.03 bytes each
        copies     123 GB in, 123 GB out meanwhile, each way at 41 GB/s           3.0 s
        backward   2/3 of 6 * 3.3 B operations a token at 500 TFLOP/s             27 us a token
        together   3.0 s / 27 us                                                  114,000 tokens of a rank and step

    Args:
        state_bytes: of one rank's state in host memory.
        flops_per_token: of one token, forward and backward."""
    return stream_seconds(state_bytes, hardware) * hardware.flops / (BACKWARD_SHARE * flops_per_token)
