"""What cannot be built: sizes that do not fit each other or the ranks, and checkpoints that would be read wrongly."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import is_sharded_checkpoint

from carpool.hf.axes.sequence_parallel import sequence_plan
from carpool.hf.seam.layers import experts_modules
from carpool.hf.seam.refusals import check_tensor_parallel
from carpool.hf.weights.conversions import merges_experts, unshardable
from carpool.parallel.degrees import chunks
from carpool.parallel.meshes import Meshes


def check_ranks(distributed_config: DistributedConfig | None, meshes: Meshes | None) -> None:
    """Refuse a parallelism for another number of ranks than there are."""
    if distributed_config is None:
        return
    sizes = {name: size_of(distributed_config, name) for name in ("pp", "dp_replicate", "fsdp", "tp")}
    needed = math.prod(sizes.values())
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if meshes is not None:
        world = meshes.degrees.stage_size
    if (ep_size := size_of(distributed_config, "ep")) > world:
        raise ValueError(f"ep_size is {ep_size}, but only {world} ranks run; start more of them or lower it")
    if needed != world:
        product = " x ".join(f"{name}_size {size}" for name, size in sizes.items())
        raise ValueError(f"the parallelism is for {needed} ranks ({product}), but {world} run; make the numbers equal")


def size_of(distributed_config: DistributedConfig | None, axis: str) -> int:
    """Ranks along an axis ("fsdp", "tp", "ep", ...); 1 if it is not set."""
    return 1 if distributed_config is None else int(getattr(distributed_config, f"{axis}_size") or 1)


def check_experts(blueprint: PreTrainedModel, distributed_config: DistributedConfig | None, slices: int = 1) -> None:
    """Refuse a model without experts, and experts that the ranks do not divide."""
    name = type(blueprint).__name__
    experts = experts_modules(blueprint, distributed_config)
    if not experts:
        raise ValueError(
            f"{name} ({blueprint.config.model_type}) is not a mixture of experts that Carpool can train: "
            "it has no module with an expert-parallel plan"
        )
    ep_size, over = divmod(size_of(distributed_config, "ep"), slices)
    if over:
        raise ValueError(f"{slices} slices of each expert do not divide the {ep_size * slices + over} ranks of experts")
    whole = ep_size == math.prod(size_of(distributed_config, axis) for axis in ("fsdp", "tp"))
    for module, num_experts in experts.items():
        if num_experts % ep_size and not (whole and slices == 1 and min(chunks(num_experts, ep_size)) > 0):
            divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"ep_size {ep_size} does not divide the {num_experts} experts of {name}'s {module}; "
                f"it can be one of {', '.join(map(str, divisors))}"
            )


def check_parallelism(
    blueprint: PreTrainedModel,
    distributed_config: DistributedConfig | None,
    dense: str | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Refuse a parallelism that this model cannot have: what a plan, a dry run and a run (`build_model`) ask alike."""
    ranks = size_of(distributed_config, "tp")
    if distributed_config is not None and ranks > 1 and distributed_config.tp_plan != {}:
        own = distributed_config.tp_plan if isinstance(distributed_config.tp_plan, dict) else {}
        plan = (blueprint.tp_plan or {}) | (sequence_plan(blueprint) if sequence_parallel else {}) | own
        check_tensor_parallel(blueprint, plan, ranks)
    if dense != "zero1":
        check_tied(blueprint, distributed_config)


def check_tied(blueprint: PreTrainedModel, distributed_config: DistributedConfig | None) -> None:
    """Refuse a tied weight that tensor parallelism divides in one of its places only, and what FSDP would train wrongly
    without an error: it pads uneven shards, and keeps two of a tied weight, of which the optimizer updates one."""
    ranks = size_of(distributed_config, "fsdp")
    divided = blueprint._expand_parallel_plan(blueprint.tp_plan) if size_of(distributed_config, "tp") > 1 else {}
    for name, other in (blueprint.all_tied_weights_keys or {}).items():
        if (name.rpartition(".")[0] in divided) != (other.rpartition(".")[0] in divided):
            raise ValueError(
                f"{name} and {other} are one weight, which the tensor-parallel plan of {type(blueprint).__name__} "
                "divides in one of these places only: use tp_size=1, or do not tie "
                "(model.config.tie_word_embeddings=false)"
            )
    for name in sorted(set((blueprint.all_tied_weights_keys or {}).values())):
        if (rows := blueprint.get_parameter(name).shape[0]) % ranks:
            raise ValueError(
                f"{name} is tied, and FSDP cannot shard its {rows} rows evenly over {ranks} ranks: make the vocabulary "
                f"a multiple of fsdp_size (model.config.vocab_size={-(-rows // ranks) * ranks}), do not tie "
                "(model.config.tie_word_embeddings=false), or keep it whole (parallelism.data_parallel=zero1)"
            )


def check_shardable(folder: Path, blueprint: PreTrainedModel, distributed_config: DistributedConfig | None) -> None:
    """Refuse what transformers would load wrongly, partly without an error; see `carpool.hf.weights.conversions`."""
    sharded = any(size_of(distributed_config, axis) > 1 for axis in ("dp_replicate", "fsdp", "tp"))
    if sharded and not is_sharded_checkpoint(str(folder)) and (names := unshardable(blueprint)):
        raise ValueError(
            f"Transformers cannot shard the checkpoints of {type(blueprint).__name__} while it reads them: "
            f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''} would come out wrong; train it from scratch "
            "or on one process"
        )
    ep = size_of(distributed_config, "ep")
    shards = size_of(distributed_config, "fsdp") * size_of(distributed_config, "tp") // ep
    for name, number in experts_modules(blueprint).items():
        own = -(-number // ep)
        if min(chunks(own, shards)) == 0 and merges_experts(blueprint) and not is_sharded_checkpoint(str(folder)):
            raise ValueError(
                f"FSDP would divide the {own} experts that {name} has on a rank (ep_size = {ep}) over {shards} ranks, "
                "and Transformers cannot read a checkpoint on those that get none: raise parallelism.ep_size, or shard "
                "over fewer ranks (parallelism.dp_replicate_size)"
            )
