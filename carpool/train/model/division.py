"""How a model is divided over ranks: its parameters, its sequences, the tokens between its layers."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from carpool.hf.axes.context import choose_way
from carpool.hf.axes.sequence_parallel import why_not_sequence_parallel
from carpool.parallel.context import Cut
from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.chosen import Kind
from carpool.train.config.schema import Config
from carpool.train.data.formats import are_packed


def context_cut(config: Config, degrees: Degrees, model: PreTrainedModel, rank: int = 0) -> Cut | None:
    """Which part of every sequence a rank has; None: whole ones.

    Args:
        model: may be on the meta device.

    Raises:
        ValueError: a model, sequences or heads that cannot be divided so."""
    if degrees.cp == 1:
        return None
    way = choose_way(
        model,
        degrees.cp,
        config.data.sequence_length,
        config.parallelism.cp_attention,
        heads_divided=degrees.tp,
        packed=are_packed(config.data),
        implementation=config.model.attn_implementation,
    )
    return Cut(degrees.cp, degrees.coordinate(rank, "cp"), way)


def distributed_config(degrees: Degrees, bf16: bool) -> DistributedConfig:
    """The mesh for transformers: FSDP2 x TP for dense parameters, FSDP2 x EP for experts."""
    return DistributedConfig(
        tp_size=degrees.tp,
        # Ranks that share sequences shard dense parameters, too.
        fsdp_size=degrees.fsdp * degrees.cp,
        dp_replicate_size=degrees.dp_replicate,
        # For transformers a slice of an expert is an expert.
        ep_size=degrees.expert_ranks,
        ep_implementation="carpool",
        fsdp_mixed_precision=bf16,
    )


SEQUENCE_KIND: Kind[bool] = Kind("sequence_parallel", lambda on: {"on": on}, lambda record: bool(record["on"]))


def divides_tokens(config: Config, degrees: Degrees, blueprint: PreTrainedModel) -> tuple[bool, str]:
    """Whether tensor-parallel ranks divide their tokens among themselves (`carpool.hf.axes.sequence_parallel`), and
    why.

    Raises:
        ValueError: that was asked for, and cannot be."""
    asked, reason = config.parallelism.sequence_parallel, None
    if degrees.tp == 1:
        reason = "there is one tensor-parallel rank"
    elif config.training.torch_compile:
        reason = "training.torch_compile compiles whole layers"
    elif config.training.gradients == "consumed":
        reason = "training.gradients = 'consumed' uses gradients before they are summed over ranks"
    else:
        reason = why_not_sequence_parallel(blueprint, degrees.ep)
    if asked == "on" and reason is not None:
        raise ValueError(f"parallelism.sequence_parallel = 'on' cannot be: {reason}; use 'auto' or 'off'")
    if asked == "off" or reason is not None:
        return False, reason or "asked for"
    return True, "fewer bytes between ranks, and norms and routers are computed once"
