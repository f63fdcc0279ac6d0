"""What the memory of a rank is made of, whatever transport and dense parameters will be: parameters of its model, and
what its layers keep. `carpool.train.run.estimate` adds up what is there at each moment of a step."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from carpool.experts.quantised import quantised_bytes
from carpool.hf.activations import Activations, measure_activations
from carpool.hf.attention import FLEX
from carpool.hf.build import experts_modules
from carpool.hf.documents import DOCUMENTS
from carpool.hf.freeze import freeze_all_but_experts, freeze_experts
from carpool.hf.head import output_layer, why_whole
from carpool.hf.narrow import row_size
from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import in_flight
from carpool.planner.held import scores_bytes
from carpool.planner.model_shape import kept_if_compiled
from carpool.train.config.schema import Config
from carpool.train.data.formats import are_packed
from carpool.train.run.adapter import outline_adapter
from carpool.train.run.copies import copies_of
from carpool.train.run.model import attention_of, context_cut, divides_tokens, top_k_of

STORED = {"float32": 4, "bfloat16": 2, "float16": 2}


class RankSizes:
    """Sizes of one rank of a run.

    Args:
        config: the micro-batch, dtypes, optimizer and policies count.
        degrees: of parallelism.
        model: on the meta device.
        cuda: on GPUs.
        nodes: on which the ranks of an expert-parallel group are.
        like: those of the same model; what its layers keep is not measured again if it is the same.
    """

    def __init__(
        self,
        config: Config,
        degrees: Degrees,
        model: PreTrainedModel,
        cuda: bool,
        nodes: int = 1,
        like: RankSizes | None = None,
    ) -> None:
        self.config, self.degrees, self.model, self.cuda, self.nodes = config, degrees, model, cuda, nodes
        training = config.training
        self.bf16 = bf16 = training.computes_in_bf16(cuda)
        counts = experts_modules(model)
        self.num_experts, self.moe_layers = max(counts.values()), len(counts)
        self.expert_adapters = 0
        if training.freeze is not None or config.adapter.kind is not None:
            model = copy.deepcopy(model)
        if training.freeze == "dense":
            freeze_all_but_experts(model, list(counts))
        elif training.freeze == "experts":
            freeze_experts(model, counts)
        if config.adapter.kind is not None:
            one = outline_adapter(model, config.adapter)
            self.expert_adapters = one * math.ceil(self.num_experts / degrees.ep) * self.moe_layers
        attention = attention_of(config, degrees, model, cuda)
        if attention == FLEX:
            # On the meta device another fused attention stands for it, which keeps as much.
            model = copy.deepcopy(model)
            model.config.get_text_config()._attn_implementation = "sdpa"
        self.stored = STORED[config.model.dtype or "float32"]
        self.computed = 2 if bf16 else self.stored
        # Of gradients as they are added up over ranks.
        self.reduced = 4 if bf16 else self.stored
        dtype = torch.bfloat16 if bf16 and degrees.dp_cp > 1 else getattr(torch, config.model.dtype or "float32")
        autocast = torch.bfloat16 if bf16 and degrees.dp_cp == 1 and dtype != torch.bfloat16 else None
        # Of the rank with most, where their speeds differ.
        batch = max(config.parallelism.batch_sizes(training.per_device_train_batch_size, degrees))
        length = config.data.sequence_length
        self.tokens = batch * length
        # Of a rank, in layers that are not routed.
        self.own_tokens = self.tokens // degrees.cp
        cut = context_cut(config, degrees, model)
        # These take the ends of documents in place of a mask.
        documents = "flash" not in (attention or "") and attention != DOCUMENTS and are_packed(config.data)
        self.measured = (batch, length, dtype, autocast, training.freeze, config.adapter, documents, cut, attention)
        # What each layer keeps: of all layers, and of this rank's.
        self.kept_by_all: Activations
        if like is not None and like.measured == self.measured:
            self.kept_by_all = like.kept_by_all
        else:
            adapters = self.expert_adapters > 0
            self.kept_by_all = measure_activations(model, batch, length, dtype, autocast, adapters, documents, cut)

        self.kept = self.kept_by_all
        text = model.config.get_text_config()
        if training.torch_compile:
            share = kept_if_compiled(text.to_dict(), length)
            self.kept = replace(self.kept, layers=tuple(int(share * size) for size in self.kept.layers))
        heads = text.num_attention_heads if attention == "eager" else 0
        # Divided among ranks of tp and cp, by heads.
        self.scores = scores_bytes(self.tokens, heads, length, self.computed) / (degrees.tp * degrees.cp)
        self.hidden, self.top_k = text.hidden_size, top_k_of(model)
        self.row = row_size(model.config)
        self.width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        self.words = text.vocab_size
        theirs = {id(p) for name in counts for p in model.get_submodule(name).parameters()}
        of_experts = [p for p in model.parameters() if id(p) in theirs]
        self.experts = _Parameters.of(of_experts)
        self.expert_bytes = sum(_stored_bytes(p, config, self.stored) for p in of_experts)
        # Products make the matrices of a quantised base again, one at a time.
        self.largest_expert = max(p.numel() for p in of_experts)
        largest = self.largest_expert * self.computed
        self.dequantised = 0 if config.adapter.base_dtype is None else math.ceil(largest / degrees.expert_ranks)
        added = {id(p) for name, p in model.named_parameters() if "lora_" in name}
        self.dense = _Parameters.of([p for p in model.parameters() if id(p) not in theirs | added])
        self.adapters = sum(p.numel() for p in model.parameters() if id(p) in added)
        head: Any = output_layer(model)
        self.head_trains = head is not None and head.weight.requires_grad
        # Of all tokens of a tensor-parallel group, what this rank has between two blocks, and in the loss.
        self.divided, _ = divides_tokens(config, degrees, model)
        self.share = 1 / degrees.tp if self.divided else 1.0
        over_words = degrees.tp > 1 and not self.divided
        self.whole_logits = training.loss_chunk == 0 or over_words or why_whole(model) is not None

        self.in_flight = 1.0
        if degrees.pp > 1:
            self._count_one_stage()
        rows = self.num_experts * degrees.etp
        row = self.experts.total * self.computed / (rows * self.moe_layers)
        self.copies = copies_of(config, degrees, row, rows, self.moe_layers, nodes)
        self.trained = math.ceil(self.dense.trained / degrees.dense_shards)
        self.trained += math.ceil(self.experts.trained / degrees.expert_shards)

    def _count_one_stage(self) -> None:
        """From here on, of a rank of a pipeline: the embedding and the head, which a V has on one rank, and its share
        of all else."""
        ranks, ends = self.degrees.pp, 2 * self.words * self.hidden
        body = max(0, self.dense.total - ends)
        share = (math.ceil(body / ranks) + ends) / self.dense.total
        self.dense = _Parameters(int(self.dense.total * share), int(self.dense.trained * share))
        self.experts = _Parameters(math.ceil(self.experts.total / ranks), math.ceil(self.experts.trained / ranks))
        self.expert_bytes, self.moe_layers = self.expert_bytes // ranks, math.ceil(self.moe_layers / ranks)
        self.kept = replace(self.kept, layers=self.kept.layers[-math.ceil(len(self.kept.layers) / ranks) :])
        schedule, micro_batches = self.config.parallelism.pp_schedule, self.config.training.gradient_accumulation_steps
        self.in_flight = in_flight(schedule, ranks, micro_batches, self.config.moe.schedule == "two-batch")


class _Parameters(NamedTuple):
    total: int
    trained: int

    @staticmethod
    def of(parameters: list[torch.nn.Parameter]) -> _Parameters:
        return _Parameters(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))


def _stored_bytes(parameter: torch.nn.Parameter, config: Config, stored: int) -> int:
    """Of a stack of experts' matrices or biases, of which matrices may be quantised."""
    kind = config.adapter.base_dtype
    if kind is None or parameter.dim() != 3:
        return parameter.numel() * stored
    return quantised_bytes(kind, parameter.shape)
