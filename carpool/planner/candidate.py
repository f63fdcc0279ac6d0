"""One configuration of a run, as numbers and words: what the planner varies, its TOML for `carpool train`, why steps
are not CUDA graphs, and which layers each stage of its pipeline has.

Why forward and backward are no CUDA graph is asked in many places, and answered here:

    a plan                    `Candidate.why_eager`: by its transport, by FSDP, and by all else that plans vary
    an estimate, a dry run    the same of the run's own candidate, whose `eager` is what its settings and its model say
    a run                     by what was built, else by the same rules (`carpool.train.plan.compile_and_capture`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple

from carpool.optim import OPTIMIZERS
from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import PAIRED
from carpool.planner.model.shape import LayerShape, ModelShape
from carpool.planner.transports import preferred_transport, transport_class

FSDP = "FSDP gathers parameters layer by layer from the host (parallelism.data_parallel)"
FSDP_SHARDS = (
    "FSDP gathers experts layer by layer from the host, as tensor-parallel ranks share one's (parallelism.ep_size)"
)
PLANS = "this plan of spare slots reads loads on the host (moe.spare_plan)"
PLANS_OF = "over transport {} the host reads which experts go to spare slots (moe.spare_slots)"
LENGTHS = "this attention reads the lengths of documents on the host (model.attn_implementation)"
SHAPES = "batches are as long as their longest sequence (data.pad_to=sequence_length makes all alike)"
# A graph can draw once more what it has drawn, and nothing that another graph has.
RANDOM = "layers are computed again in another graph than their forward's, which has drawn random numbers (drop-out)"
RECORDED = "the host names the tokens whose choices each step records (placement.tokens, placement.every)"
STRETCH = 512  # neighbouring tokens that `carpool.hf.trace_recorder` records of a forward
# Whether layers with FSDP's hooks on the inside are compiled where they are computed again. Older releases of PyTorch
# were not tried: if hooks cut a layer's graph elsewhere the second time, its checkpoint ends the run.
COMPILED_AGAIN = [int(number) for number in version("torch").split(".")[:2]] >= [2, 13]
NOT_COMPILED_AGAIN = (
    "layers whose experts FSDP shards by themselves, and which are computed again, are compiled with PyTorch 2.13 alone"
)
TEACHER = "a teacher computes between a batch and its forward (distillation.teacher)"
_TIERS = {"host": "host memory", "disk": "disk"}


def of_transport(name: str | None) -> str:
    """Of one that waits for the device in each ride, to learn how many tokens travel."""
    return f"transport {name} waits for the host"


def by_settings(settings: Mapping[str, Mapping[str, Any]], gpu: bool = True, ranks: int = 1) -> str | None:
    """Why, by what plans do not vary (`settings`: sections and keys, with their defaults); None: nothing of that.
    `ranks`: with tokens of their own."""
    if settings["training"]["cuda_graphs"] == "off":
        return "training.cuda_graphs = 'off'"
    if not gpu:
        return "there is no GPU"
    if settings["data"]["pad_to"] == "longest" and settings["data"]["packing"] == "off":
        return SHAPES
    if settings.get("distillation", {}).get("teacher") is not None:
        return TEACHER
    if (every := (placement := settings["placement"])["every"]) is not None and placement["policy"] == "migrate":
        forwards = settings["training"]["gradient_accumulation_steps"]
        if recorded_steps(placement["tokens"], ranks, forwards) >= every:
            return RECORDED
    if (tier := settings["memory"]["experts"]) != "device":
        return f"experts come from {_TIERS[tier]}"
    return None


def recorded_steps(tokens: int, ranks: int, forwards: int) -> int:
    """Of so many forwards, in which so many ranks record the choices of so many tokens: a stretch of each forward."""
    stretch = min(STRETCH, tokens)
    return math.ceil(math.ceil(tokens / (stretch * ranks)) / forwards)


# What may be done about each item that is saved for the backward (`carpool.planner.step.peak`).
POLICIES: Mapping[str, tuple[str, ...]] = {
    "expert_inputs": ("save", "resend", "offload"),
    "expert_activations": ("save", "recompute", "offload"),
    "layer_activations": ("save", "recompute", "offload"),
    "moe_outputs": ("save", "recompute"),
}
KEEP: Mapping[str, str] = dict.fromkeys(POLICIES, "save")
REDUCED = 4  # bytes of a gradient as it is added up over ranks


class Spare(NamedTuple):
    """Spare slots of each rank (`carpool.ride.balanced`); 0: none."""

    slots: int = 0
    limit: float | None = 1.1
    saved: bool = False

    @classmethod
    def of(cls, moe: Mapping[str, Any]) -> Spare:
        """From the section of a configuration."""
        return cls(moe["spare_slots"], moe["balance_limit"], moe["spare_weights"] == "save")

    def bytes(self, expert: float, layers: int) -> float:
        """Of replicas on a rank, for experts of so many bytes in a layer: two sets that all layers share, their
        gradients, and what is saved."""
        return self.slots * expert * (3 + (layers if self.saved else 0))


NO_SPARE = Spare()


@dataclass(frozen=True)
class Candidate:
    """See the module's docstring.

    Attributes:
        micro_batch: sequences of a data-parallel rank in a micro-batch.
        accumulation: micro-batches of a step.
        transport, schedule: as in [moe]; "none", "chunks" or "two-batch" of the schedules.
        data_parallel: "zero1" or "fsdp".
        policies: of saved activations, by item of `POLICIES`.
        moments: the dtype in which the optimizer has them.
        optimizer: a name of `carpool.optim.OPTIMIZERS`.
        averaged: an average of the weights is kept, too.
        optimizer_offload: where its state is: "none" (the device), "host" or "disk", which is priced as "host".
        optimizer_in_backward: each gradient is used for its update in the backward, and freed.
        max_grad_norm: gradients are clipped to it; 0: they are not. In the backward by the norm of the step before.
        compiled: layers are compiled, where they can be (`layers_compiled`).
        eager: why steps are not CUDA graphs, for a reason that is not in the other attributes; None: there is none.
        experts: "grouped", or "fp8" (lossy).
        pipeline: the order of stages (`carpool.planner.step.pipelines`).
        chunks, backward_chunks: of a ride, with schedule "chunks"; None: backward as many as forward.
        stored: bytes of a stored parameter: 2 of bfloat16 with float32 masters, 4 of float32.
        computed: of one as it is computed, and of an activation.
        codecs: what is said in [codec], such as {"dispatch": "fp8"} (lossy).
        spare: as in [moe]: spare_slots, balance_limit, and whether spare_weights is "save".
        peers: GPUs of a node write into each other's memory.
    """

    degrees: Degrees
    sequence_length: int
    micro_batch: int
    accumulation: int = 1
    transport: str = field(default_factory=preferred_transport)
    schedule: str = "none"
    _: KW_ONLY
    data_parallel: str = "zero1"
    policies: Mapping[str, str] = field(default_factory=lambda: KEEP)
    moments: str = "float32"
    optimizer: str = "one-pass"
    averaged: bool = False
    optimizer_offload: str = "none"
    optimizer_in_backward: bool = False
    max_grad_norm: float = 1.0
    compiled: bool = True
    eager: str | None = None
    experts: str = "grouped"
    pipeline: str = "1F1B"
    chunks: int = 1
    backward_chunks: int | None = None
    codecs: Mapping[str, str] = field(default_factory=dict)
    spare: Spare = NO_SPARE
    stored: int = 2
    computed: int = 2
    peers: bool = True

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        return self.micro_tokens * self.accumulation * self.degrees.dp

    @property
    def micro_tokens(self) -> int:
        """Of a data-parallel rank in a micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def rank_tokens(self) -> int:
        """The tokens of a micro-batch that one rank routes."""
        return self.degrees.tokens_per_rank(self.micro_tokens)

    @property
    def whole(self) -> bool:
        """Whether parameters are whole on each rank that computes with them, and the optimizer's state is sharded."""
        return self.data_parallel == "zero1" and self.degrees.dp_cp > 1

    @property
    def experts_in_buffers(self) -> bool:
        """Whether whole experts are in flat buffers as non-expert parameters are (`carpool.parallel.replicated`)."""
        degrees = self.degrees
        return self.whole and (degrees.efsdp > 1 or degrees.dp_replicate > 1 or self.stored != self.computed)

    @property
    def writes_experts_late(self) -> bool:
        """Whether experts in buffers are written beside the next forward, and not after the update."""
        return self.experts_in_buffers and self.degrees.expert_ranks > 1 and self.degrees.pp == self.at_once == 1

    @property
    def gathers(self) -> bool:
        """Whether FSDP gathers parameters layer by layer."""
        return not self.whole and (self.degrees.efsdp > 1 or self.degrees.dp_cp > 1)

    @property
    def copies_experts(self) -> bool:
        """Whether FSDP has a group of one rank for a layer's experts, and copies (`alone_bytes`): it casts them, or
        there are replicas of the model."""
        degrees, asked = self.degrees, self.stored != self.computed or self.degrees.dp_replicate > 1
        return asked and not self.whole and degrees.efsdp == 1 and degrees.expert_ranks > 1 and degrees.dp_cp > 1

    @property
    def experts_apart(self) -> bool:
        """Whether FSDP shards a layer's experts by themselves, with hooks on the inside of the layer."""
        degrees = self.degrees
        shared = degrees.expert_ranks > 1 and (degrees.efsdp > 1 or degrees.dp_replicate > 1)
        return self.copies_experts or (shared and not self.whole)

    @property
    def layers_compiled(self) -> bool:
        """Whether layers run compiled."""
        again = self.experts_apart and self.policies["layer_activations"] == "recompute"
        return self.compiled and (COMPILED_AGAIN or not again)

    @property
    def divides_tokens(self) -> bool:
        """Whether tensor-parallel ranks divide tokens where blocks do not need all of them, if the model can."""
        return self.degrees.tp > 1 and not self.compiled and not self.optimizer_in_backward

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device in each MoE layer, to learn how many tokens travel."""
        way = transport_class(self.transport)
        return not (way.graphable and (self.peers or not way.writes_to_peers))

    @property
    def why_eager(self) -> str | None:
        """Why forward and backward are not CUDA graphs; None: they are."""
        found = self.eager or (of_transport(self.transport) if self.waits else None)
        return found or self.why_fsdp or self.why_eager_by_plan

    @property
    def why_fsdp(self) -> str | None:
        """Why FSDP's hooks run layer by layer, which no graph can hold; None: it has no parameters."""
        if not (self.gathers or self.experts_apart):
            return None
        return FSDP if self.degrees.dp_cp > 1 else FSDP_SHARDS

    @property
    def recomputes_stages(self) -> bool:
        """Whether layers are computed again in a graph of their backward alone, as those of a pipeline are."""
        return self.degrees.pp > 1 and self.policies["layer_activations"] == "recompute"

    @property
    def why_eager_by_plan(self) -> str | None:
        """Why, by what plans vary beside the transport and FSDP; None: nothing of that speaks against it."""
        offloads = "offload" in self.policies.values()
        if self.spare.slots and self.degrees.expert_ranks > 1 and not transport_class(self.transport).links_slots:
            return PLANS_OF.format(self.transport)
        if self.schedule == "two-batch" and offloads:
            return "saved activations of two batches go to host memory"
        if self.degrees.pp > 1 and offloads:
            return "saved activations of a stage go to host memory in one graph, and come back in another"
        if self.optimizer_in_backward and self.optimizer_offload not in OPTIMIZERS[self.optimizer].captured_places:
            return f"the optimizer runs in the backward, with a state that comes from {self.optimizer_offload}"
        return None

    @property
    def state_bytes(self) -> Mapping[str, float]:
        """Of the optimizer's state, for each element of a trained parameter that is no matrix of a layer, by name."""
        return OPTIMIZERS[self.optimizer].state_bytes(self.dtype, self.moments)

    @property
    def matrix_state_bytes(self) -> Mapping[str, float]:
        """The same of a matrix of a layer."""
        return OPTIMIZERS[self.optimizer].matrix_state_bytes(self.dtype, self.moments)

    @property
    def update_bytes(self) -> float:
        """That the norm and the update read and write for each of them."""
        return OPTIMIZERS[self.optimizer].update_bytes(self.dtype, self.moments)

    @property
    def dtype(self) -> str:
        """Of stored parameters."""
        return "bfloat16" if self.stored == 2 else "float32"

    @property
    def captured(self) -> bool:
        """Whether forward and backward are CUDA graphs (`carpool.train.plan.compile_and_capture`, `stage_graphs`)."""
        return self.why_eager is None

    @property
    def at_once(self) -> int:
        """Micro-batches, or halves of the only one, that go forward and backward at the same time. A pipeline has pairs
        of a forward and a backward instead (`paired`)."""
        return 2 if self.schedule == "two-batch" and self.degrees.pp == 1 else 1

    @property
    def paired(self) -> bool:
        """Whether the pairs of a pipeline's schedule run at the same time (`carpool.ride.forward_backward`)."""
        return self.schedule == "two-batch" and self.degrees.pp > 1 and self.pipeline in PAIRED

    @property
    def label(self) -> str:
        """A few words for tables."""
        degrees = self.degrees
        sizes = [("pp", degrees.pp), ("dp", degrees.dp), ("cp", degrees.cp), ("tp", degrees.tp), ("ep", degrees.ep)]
        found = " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name in ("dp", "ep"))
        if degrees.etp > 1:
            found += f" etp{degrees.etp}"
        if degrees.dp_replicate > 1:
            found += f" x{degrees.dp_replicate} replicas"
        kept = [f"{item} {policy}" for item, policy in self.policies.items() if policy != "save"]
        parts = [found, f"{self.micro_batch} x {self.accumulation}", self.transport, self.data_parallel]
        if degrees.pp > 1:
            parts.append(self.pipeline + (" in pairs" if self.paired else ""))
        if self.schedule != "none" and not self.paired:
            of = self.chunks, self.chunks if self.backward_chunks is None else self.backward_chunks
            parts.append(self.schedule if self.schedule != "chunks" else f"{of[0]} and {of[1]} chunks")
        if self.spare.slots:
            parts.append(f"{self.spare.slots} spare slots")
        if self.optimizer_in_backward:
            parts.append("optimizer in backward")
        if self.optimizer_offload != "none":
            parts.append(f"optimizer in {self.optimizer_offload}")
        return ", ".join(parts + kept)

    def flat_settings(self) -> dict[str, Any]:
        """`settings` by section and key, such as "moe.schedule"."""
        return {f"{section}.{key}": value for section, of in self.settings().items() for key, value in of.items()}

    def settings(self) -> dict[str, dict[str, Any]]:
        """Sections and keys that differ from the defaults of `carpool train`."""
        degrees = self.degrees
        parallelism: dict[str, Any] = {
            "num_ranks": degrees.world_size,
            "fsdp_size": degrees.fsdp,
            "ep_size": degrees.ep,
            "data_parallel": self.data_parallel,
        }
        for name in ("dp_replicate", "tp", "cp", "etp", "pp"):
            if (size := degrees.size(name)) > 1:
                parallelism[f"{name}_size"] = size
        training: dict[str, Any] = {
            "per_device_train_batch_size": self.micro_batch,
            "per_device_eval_batch_size": 1,
            "gradient_accumulation_steps": self.accumulation,
            "torch_compile": "on" if self.compiled else "off",
            "optimizer": self.optimizer,
        }
        if len(OPTIMIZERS[self.optimizer].moments) > 1:
            training |= {"optimizer_state_dtype": self.moments, "optimizer_offload": self.optimizer_offload}
        if self.computed == 4:
            training["bf16"] = False
        if self.max_grad_norm != 1.0:
            training["max_grad_norm"] = self.max_grad_norm
        if self.optimizer_in_backward:
            training |= {"optimizer_in_backward": True} | ({"grad_clipping": "delayed"} if self.max_grad_norm else {})
        if degrees.pp > 1:
            parallelism["pp_schedule"] = self.pipeline
        moe: dict[str, Any] = {"transport": self.transport, "schedule": self.schedule, "experts": self.experts}
        if transport_class(self.transport).alone:
            del moe["transport"]
        if self.schedule == "chunks":
            moe["chunks"] = self.chunks
            if self.backward_chunks is not None:
                moe["backward_chunks"] = self.backward_chunks
        if self.spare.slots:
            weights = "save" if self.spare.saved else "fetch"
            moe |= {"spare_slots": self.spare.slots, "balance_limit": self.spare.limit, "spare_weights": weights}
        memory = dict(self.policies)
        if memory["layer_activations"] != "recompute":
            del memory["moe_outputs"]
        codec = {"codec": dict(self.codecs)} if self.codecs else {}
        return {
            "model": {"dtype": "bfloat16" if self.stored == 2 else "float32"},
            "data": {"sequence_length": self.sequence_length},
            "parallelism": parallelism,
            "moe": moe,
            **codec,
            "memory": memory,
            "training": training,
        }


def stage_layers(shape: ModelShape, degrees: Degrees, of_rank: int = 1, fewer: int = 0) -> list[tuple[LayerShape, ...]]:
    """The layers of each stage of a pipeline, `of_rank` of which each rank has; each stage with so many `fewer`."""
    parts = shape.stages(degrees.pp * of_rank)
    return [shape.layers[one.start : one.stop - fewer] for one in parts]
