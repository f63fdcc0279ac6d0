"""The memory that a rank will need, before anything is built: the planner's account of a step
(`carpool.planner.step.peak`, which says what it assumes) of what the model itself takes and keeps.

Parameters are exact sums of what each rank holds, and what decoder layers keep is measured by the model's own forward
without memory (`carpool.hf.activation_sizes`). `memory_peak_bytes` of a run is PyTorch's own count on GPUs,
hence without context, NCCL and fragments (`tensors_of`), and the growth of the resident set on CPUs.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from carpool.experts.quantised import AT_ONCE, Kind, quantised_bytes
from carpool.hf.activation_sizes import Activations, measure_activations
from carpool.hf.architecture_changes import row_size
from carpool.hf.decoder_layers import draws_random_numbers
from carpool.hf.documents import DOCUMENTS, FLEX
from carpool.hf.loss_head import output_layer, why_whole
from carpool.hf.pipeline_stages import cut_model
from carpool.hf.quantised_base import base_bytes, quantisable_layers
from carpool.hf.seam.find_modules import experts_modules, freeze_all_but_experts, freeze_experts
from carpool.kernels.cross_entropy import chunk_size
from carpool.kernels.distillation import CHUNK_LOGITS
from carpool.memory import TIERS
from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import LENGTHS, PLANS, RANDOM, Candidate, Spare, by_settings
from carpool.planner.model.shape import saved_if_compiled
from carpool.planner.step.peak import Peak, full_stages, peak_of
from carpool.planner.step.sizes import NOT_TENSORS, Parameters, RankSizes, scores_bytes, stage_part
from carpool.train.blueprint import attention_of, meta_model, model_size, top_k_of
from carpool.train.config.schema import Config
from carpool.train.data.formats import are_packed
from carpool.train.extensions import extensions_in_use
from carpool.train.lora import outline_adapter
from carpool.train.plan.division import context_cut, divides_tokens, teacher_ep
from carpool.train.plan.transport_choice import transport_options
from carpool.transport import find_transport

STORED = {"float32": 4, "bfloat16": 2, "float16": 2}


def state_bytes(config: Config) -> float:
    """What the optimizer keeps of each element of a parameter (`carpool.optim.base`)."""
    return sum(config.training.state_bytes(config.model.stored_dtype).values())


Memory = dict[str, int]


class MemoryEstimate:
    """Predicts the memory of one rank of a run, whatever its transport and the layout of non-expert parameters.

    Args:
        config: the micro-batch, dtypes, optimizer and policies count.
        model: on the meta device.
        like: those of the same model; what its layers keep is not measured again if it is the same.
        packed: the checkpoint has its experts in MXFP4.
    """

    def __init__(
        self,
        config: Config,
        degrees: Degrees,
        model: PreTrainedModel,
        cuda: bool,
        like: MemoryEstimate | None = None,
        packed: bool = False,
    ) -> None:
        self.config, self.degrees, self.model, self.cuda = config, degrees, model, cuda
        self.packed = packed
        training = config.training
        self.bf16 = bf16 = training.computes_in_bf16(cuda)
        counts = experts_modules(model)
        self.num_experts, self.moe_layers = max(counts.values()), len(counts)
        self.expert_adapters = self.largest_adapter = 0
        if training.freeze is not None or config.adapter.is_used:
            model = copy.deepcopy(model)
        if training.freeze == "non_expert":
            freeze_all_but_experts(model, list(counts))
        elif training.freeze == "experts":
            freeze_experts(model, counts)
        if config.adapter.is_used:
            sizes = outline_adapter(model, config.adapter).values()
            per_rank = math.ceil(self.num_experts / degrees.ep)
            self.expert_adapters = per_rank * sum(map(sum, sizes))
            self.largest_adapter = per_rank * max(map(max, sizes), default=0)
        attention = attention_of(config, degrees, model, cuda)
        if attention == FLEX:
            # On the meta device another fused attention stands for it, which keeps as much.
            model = copy.deepcopy(model)
            model.config.get_text_config()._attn_implementation = "sdpa"
        self.stored = STORED[config.model.stored_dtype]
        self.computed = 2 if bf16 else self.stored
        dtype = torch.bfloat16 if bf16 and degrees.dp_cp > 1 else getattr(torch, config.model.stored_dtype)
        autocast = torch.bfloat16 if bf16 and degrees.dp_cp == 1 and dtype != torch.bfloat16 else None
        # Of the rank with most, where their speeds differ.
        batch = max(config.batch_sizes(degrees))
        self.length = length = config.data.sequence_length
        self.tokens = batch * length
        cut = context_cut(config, degrees, model)
        # These take the ends of documents in place of a mask.
        documents = "flash" not in (attention or "") and attention != DOCUMENTS and are_packed(config.data)
        self.measured = (batch, length, dtype, autocast, training.freeze, config.adapter, documents, cut, attention)
        # What each layer keeps, before layers are compiled.
        self.eager: Activations
        if like is not None and like.measured == self.measured:
            self.eager = like.eager
        else:
            adapters = self.expert_adapters > 0
            own = getattr(torch, config.adapter.dtype)
            self.eager = measure_activations(model, batch, length, dtype, autocast, adapters, documents, cut, own)
        self.kept, text = self.eager, model.config.get_text_config()
        if training.compiled:
            share = saved_if_compiled(text.to_dict(), length)
            self.kept = replace(self.kept, layers=tuple(int(share * size) for size in self.kept.layers))
        heads = text.num_attention_heads if attention == "eager" else 0
        # Divided among ranks of tp and cp, by heads.
        self.scores = scores_bytes(self.tokens, heads, length, self.computed) / (degrees.tp * degrees.cp)
        self.hidden, self.top_k = text.hidden_size, top_k_of(model)
        self.width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        self.vocabulary = text.vocab_size
        theirs = {id(p) for name in counts for p in model.get_submodule(name).parameters()}
        of_experts = [p for p in model.parameters() if id(p) in theirs]
        self.experts = _count(of_experts)
        self.expert_kind: Kind | None = "mxfp4" if packed else config.adapter.base_dtype
        self.expert_bytes = sum(_stored_bytes(p, self.expert_kind, self.stored) for p in of_experts)
        self.largest_expert = max(p.numel() for p in of_experts)
        added = {id(p) for name, p in model.named_parameters() if ".lora_" in name or ".trainable_tokens_" in name}
        self.dense = _count([p for p in model.parameters() if id(p) not in theirs | added])
        self.adapters = sum(p.numel() for p in model.parameters() if id(p) in added)
        # On several ranks only experts are quantised, and experts in MXFP4 are so in any case.
        kind, keep = config.adapter.base_dtype, config.adapter.base_keep if degrees.world_size == 1 else None
        self.quantised_away = self.head_made = 0.0
        if kind is not None:
            number, size = base_bytes(self.model, kind, keep)
            self.quantised_away = number * self.stored - size
            if (last := output_layer(self.model)) in quantisable_layers(self.model, kind, keep).values():
                self.head_made = min(last.weight.numel(), AT_ONCE) * self.computed
        self.head: Any = output_layer(model)
        self.tied = bool(getattr(model.config, "tie_word_embeddings", False))
        # Of all tokens of a tensor-parallel group, what this rank has between two blocks, and in the loss.
        self.divided = divides_tokens(config, degrees, model).answer
        over_vocabulary = degrees.tp > 1 and not self.divided
        self.whole_logits = training.loss_chunk_size == 0 or over_vocabulary or why_whole(model) is not None
        self.trained = math.ceil(self.dense.trained / degrees.non_expert_shards / degrees.pp)
        self.trained += math.ceil(self.experts.trained / degrees.expert_shards / degrees.pp)

    def changed(self, config: Config) -> MemoryEstimate:
        """The same of a run with other settings, on the same ranks."""
        return MemoryEstimate(config, self.degrees, self.model, self.cuda, self, self.packed)

    def __call__(self, transport: str, data_parallel: str) -> Memory:
        """Predicted bytes of each component on one rank when memory is highest, and their total.

        Args:
            transport: the one that is used, not "auto".
            data_parallel: "fsdp" or "zero1", as `parallelism.data_parallel`.

        Returns:
            parameters, gradients, optimizer, activations, logits, transport, copies (of experts that came from other
            ranks), extensions and teacher if there are any, and loading where that is more; on GPUs context, nccl and
            fragments, and graphs if steps are captured; on CPUs process and allocator; total.
        """
        found = {name: math.ceil(size) for name, size in self._peak(transport, data_parallel).parts.items()}
        if brought := sum(extension.device_bytes(self) for extension in extensions_in_use(self.config)):
            found["extensions"] = brought
        if (learned := self.config.distillation).is_used:
            # Besides a teacher, what a chunk of logits takes in float32.
            found["teacher"] = 24 * min(CHUNK_LOGITS, self.tokens // self.degrees.cp * self.vocabulary)
            if learned.teacher is not None:
                parameters = teacher_parameters(learned.teacher, self.degrees.world_size)
                found["teacher"] += parameters * (2 if self.bf16 else 4)
        return {**found, "total": sum(found.values())}

    def _peak(self, transport: str, data_parallel: str) -> Peak:
        """Of the fullest rank of the pipeline."""
        candidate = self.candidate(transport, data_parallel)
        found = (peak_of(self.of_stage(candidate, one), candidate, one) for one in full_stages(candidate, self._cut))
        return max(found, key=lambda one: one.total)

    def host_bytes(self, transport: str) -> int:
        """What a rank keeps in host memory: state of the optimizer, experts, and activations that are offloaded."""
        on_disk = self.trained * state_bytes(self.config) if self.config.training.optimizer_offload == "disk" else 0
        experts = 0
        own = math.ceil(self.expert_bytes / self.degrees.expert_shards)
        if self.config.memory.experts == "host":
            experts = own
        elif self.config.memory.experts == "disk":
            # Buffers for layers that are read ahead; and what stays there.
            stays = min(own, self.config.memory.experts_bytes[1])
            buffers = (TIERS["disk"].BUFFERS if self.experts.trained else 2) * own / self.moe_layers
            experts = math.ceil(buffers + stays if self.experts.trained else max(buffers, stays))
        return max(0, int(self._peak(transport, "fsdp").host - on_disk)) + experts

    def disk_bytes(self) -> int:
        """What a rank keeps in files: state of the optimizer, and experts that are trained."""
        state = self.trained * state_bytes(self.config) if self.config.training.optimizer_offload == "disk" else 0
        experts = 0
        if self.config.memory.experts == "disk" and (self.experts.trained or self.config.model.from_scratch):
            own = math.ceil(self.expert_bytes / self.degrees.expert_shards)
            experts = max(0, own - self.config.memory.experts_bytes[1])
        return int(state) + experts

    def candidate(self, transport: str, data_parallel: str) -> Candidate:
        """What the planner calls such a configuration."""
        config, training = self.config, self.config.training
        return Candidate(
            degrees=self.degrees, sequence_length=self.length,
            micro_batch=self.tokens // self.length, accumulation=training.gradient_accumulation_steps,
            transport=transport, schedule=config.moe.schedule, data_parallel=data_parallel,
            policies=config.memory.policies, optimizer_offload=training.optimizer_offload,
            optimizer_in_backward=training.optimizer_in_backward, compiled=training.compiled,
            pipeline=config.parallelism.pp_schedule,
            spare=Spare.of(config.moe.model_dump()),
            stored=self.stored, computed=self.computed, eager=self._why_eager,
        )  # fmt: skip

    @cached_property
    def _why_eager(self) -> str | None:
        """Why steps are not CUDA graphs, by settings and model."""
        config = self.config
        if found := by_settings(config.model_dump(), self.cuda, self.degrees.world_size // self.degrees.tp):
            return found
        if (spare := config.moe.spare) is not None and spare.planner().on_host:
            return PLANS
        given = self.model._supports_attention_backend and self.degrees.cp == 1
        if "flash" in (self.measured[-1] or "") and not given:
            return LENGTHS
        again = config.memory.layer_activations == "recompute" and self.degrees.pp > 1
        if again and (config.moe.drops.random_second or draws_random_numbers(self.model)):
            return RANDOM
        return None

    @cached_property
    def _cuts(self) -> dict[int, list[range]]:
        return {1: [range(len(self.kept.layers))]}

    def _cut(self, number: int) -> list[range]:
        """The layers of each stage of a pipeline."""
        if number not in self._cuts:
            self._cuts[number] = [part.layers for part in cut_model(self.model, number)]
        return self._cuts[number]

    def of_stage(self, candidate: Candidate, stage: int) -> RankSizes:
        """Of a rank of the pipeline. Layers are taken to be alike, and those with experts to be the last ones."""
        config, degrees, training = self.config, self.degrees, self.config.training
        part = stage_part(candidate.pipeline, degrees.pp, stage, self._cut)
        own = [i for one in part.layers for i in one]
        moe_layers = sum(i >= len(self.kept.layers) - self.moe_layers for i in own)
        ends, head = min(part.first + part.last, 1 if self.tied else 2), self.vocabulary * self.hidden
        all_ends = (1 if self.tied else 2) * head
        body = max(0.0, self.dense.total - all_ends) * len(own) / len(self.kept.layers)
        share = (body + ends * head) / self.dense.total if degrees.pp > 1 else 1.0
        of_experts = moe_layers / self.moe_layers
        way = find_transport(candidate.transport)
        options = transport_options(config, degrees, candidate.transport)
        row, rows = row_size(self.model.config), self.num_experts * degrees.etp
        # A token chooses every slice of its experts, which are on neighbouring ranks.
        copies = degrees.etp * way.ranks_per_token(self.num_experts, self.top_k, degrees.ep)
        one = self.experts.total * self.computed / (rows * self.moe_layers)
        spare = candidate.spare.bytes(one, moe_layers) if degrees.ep > 1 else 0.0
        here = None
        if config.memory.experts != "device":
            # Three layers' at most.
            one = math.ceil(self.expert_bytes / degrees.expert_ranks / self.moe_layers)
            here = config.memory.experts_bytes[0] + 3 * one
        # Matrices of a quantised base are made again for each product, on GPUs some experts' at a time.
        matrix = 0.0 if self.expert_kind is None else self.largest_expert / degrees.expert_ranks
        adapter = config.adapter
        own_tokens, chunk = self.tokens // degrees.cp, training.loss_chunk_size
        eval_tokens = training.eval_batch_size * self.length // degrees.cp
        loss_tokens = -(-own_tokens // degrees.tp) if self.divided else own_tokens
        return RankSizes(
            dense=Parameters(*(one * share for one in self.dense)),
            experts=Parameters(*(one * of_experts for one in self.experts)),
            expert_bytes=self.expert_bytes * of_experts,
            largest=max(self.largest_expert / degrees.expert_shards, head / degrees.non_expert_shards),
            ends=ends, has_head=part.last, num_experts=self.num_experts, top_k=self.top_k, hidden=self.hidden,
            row=row, width=self.width, vocabulary=self.vocabulary,
            layers=tuple(self.kept.layers[i] for i in own), moe_layers=moe_layers,
            layer_input=self.kept.layer_input, rest=self.kept.rest, tokens=self.tokens, scores=self.scores,
            copies=copies,
            buffers=way.buffer_bytes(options, degrees.expert_ranks, row, self.computed, self.top_k * degrees.etp),
            loss_tokens=chunk or chunk_size(loss_tokens, self.vocabulary), eval_tokens=eval_tokens,
            eval_loss_tokens=min(eval_tokens, chunk or chunk_size(eval_tokens, self.vocabulary)),
            whole_logits=self.whole_logits, divided=self.divided,
            state=sum(training.state_bytes(config.model.stored_dtype, matrix=True).values()),
            ends_state=state_bytes(config), reduced=4 if self.bf16 else self.stored,
            head_trains=self.head is not None and self.head.weight.requires_grad,
            dequantised=min(matrix, AT_ONCE if self.cuda else matrix) * self.computed, head_made=self.head_made,
            quantised_away=self.quantised_away, adapters=self.adapters + self.expert_adapters,
            adapter_stored=STORED[adapter.dtype], adapter_state=sum(training.state_bytes(adapter.dtype).values()),
            largest_adapter=self.largest_adapter, here=here,
            arrived=spare, cuda=self.cuda,
        )  # fmt: skip


def _count(parameters: list[torch.nn.Parameter]) -> Parameters:
    return Parameters(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))


@cache
def teacher_parameters(folder: str, ranks: int) -> int:
    """That a rank has of the teacher in a folder (`carpool.train.build.teacher`)."""
    model = meta_model(Path(folder))
    counts = experts_modules(model)
    size = model_size(model, counts, 1)
    return size.total - size.experts + (size.experts // teacher_ep(counts.values(), ranks) if counts else 0)


def _stored_bytes(parameter: torch.nn.Parameter, kind: Kind | None, stored: int) -> int:
    """Of a stack of experts' matrices or biases, of which matrices may be quantised."""
    if kind is None or parameter.dim() != 3:
        return parameter.numel() * stored
    return quantised_bytes(kind, parameter.shape)


def tensors_of(memory: Memory) -> int:
    """Of an estimate: the bytes of PyTorch's tensors, as `torch.cuda.max_memory_allocated` counts them."""
    return sum(size for name, size in memory.items() if name not in (*NOT_TENSORS, "process", "allocator", "total"))
